"""The short suite leaves out what is marked and keeps what the mark names; a file without a short case is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

CONFTEST = """
from tests.support.tiers import leave_out_full
def pytest_configure(config):
    config.addinivalue_line("markers", "full")
def pytest_collection_modifyitems(items):
    leave_out_full(items, whole_files=True)
"""
MARKED = """
import pytest
def test_plain(): pass
@pytest.mark.full
def test_left_out(): pass
@pytest.mark.full(short=["b"])
@pytest.mark.parametrize("x", "abc")
def test_named(x): pass
@pytest.mark.full(cover=1)
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [1, 2])
def test_covered(x, y): pass
"""


def collected(folder: Path, marked: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_marked.py").write_text(marked)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, str(folder)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_cases_are_left_out_as_marked(tmp_path: Path) -> None:
    chosen = [line.partition("::")[2] for line in collected(tmp_path, MARKED).splitlines() if "::" in line]
    assert chosen == ["test_plain", "test_named[b]", "test_covered[1-1]", "test_covered[2-2]"]


@pytest.mark.parametrize(
    ("marked", "said"),
    [
        (MARKED.replace('["b"]', '["d"]'), "no parameter set has the id ['d']"),
        (MARKED.replace("test_plain", "plain").replace("(short=", "(but=").replace("(cover=", "(but="), "keep one"),
    ],
)
def test_wrong_marks_are_told(tmp_path: Path, marked: str, said: str) -> None:
    assert said in collected(tmp_path, marked)
