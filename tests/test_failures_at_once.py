"""A failure is on the screen before the next test has run, in one process and in several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = "tests.support.failures_at_once"
# The second test ends only when the failure of the first has been read, or after ten minutes.
TESTS = """
import time
from pathlib import Path

def test_first():
    raise ValueError("no luck")

def test_second():
    until = time.monotonic() + 600
    while not Path("read").exists() and time.monotonic() < until:
        time.sleep(0.02)
"""


@pytest.mark.full(short=["options0"])
@pytest.mark.parametrize("options", [(), ("-p", "xdist", "--numprocesses", "2", "--dist", "loadfile")])
def test_a_failure_is_shown_while_the_next_test_runs(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-u", "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--tb=short", *options]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        shown = ""
        for line in running.stdout:
            shown += line
            if "E   ValueError: no luck" in line:
                assert "failed: test_two.py::test_first (call)" in shown
                assert "passed" not in shown
                (tmp_path / "read").touch()
    assert running.returncode == 1
    assert shown.index("ValueError: no luck") < shown.index("= FAILURES =")
    assert "1 failed, 1 passed" in shown
