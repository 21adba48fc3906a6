"""Programs on several ranks end cleanly: no thread of gloo aborts a process that has done its work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "clean_exits.py"


@pytest.mark.parametrize("words", [["--only", "gathers_last"], []], ids=["a gather last", "all"])
@pytest.mark.full(short=["a gather last"])
def test_every_launch_ends_with_status_zero(words: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(TOOL), "--rounds", "2", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
