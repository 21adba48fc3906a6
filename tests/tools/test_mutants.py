"""The faults of `make mutants` can be planted, and what it says of a test run is what happened."""

import ast
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT
from tools.mutants import Mutant, failing_test, load_mutants

MUTANTS = load_mutants()


def is_there(test: str) -> bool:
    """Whether there is such a file, folder or function."""
    path, _, function = test.partition("::")
    return (ROOT / path).exists() and (not function or f"def {function}(" in (ROOT / path).read_text())


def test_faults_can_be_planted_and_their_first_tests_are_there() -> None:
    for mutant in MUTANTS:
        ast.parse(mutant.planted(ROOT))
        assert mutant.new != mutant.old
        assert mutant.tests
        assert [test for test in mutant.tests if not is_there(test)] == [], mutant.name


def test_a_fault_whose_text_has_moved_is_stale(tmp_path: Path) -> None:
    fault = Mutant("x", "a.py", "+ 1", "+ 2", ("tests",))
    for text in ("n + 2", "n + 1 + 1"):
        (tmp_path / "a.py").write_text(text)
        with pytest.raises(ValueError, match="the fault 'x' is stale"):
            fault.planted(tmp_path)
    (tmp_path / "a.py").write_text("n + 1")
    assert fault.planted(tmp_path) == "n + 2"


RUNS = {
    "def test_a(): pass": None,
    "import pytest\n@pytest.mark.parametrize('x', ['a b'])\ndef test_a(x): assert not x": "test_it.py::test_a[a b]",
    "import nothing_of_this_name": "test_it.py",
}


@pytest.mark.full
@pytest.mark.parametrize(("text", "found"), RUNS.items(), ids=["passes", "fails", "cannot be imported"])
def test_the_first_failing_test_is_named(tmp_path: Path, text: str, found: str | None) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(text)
    assert failing_test(tmp_path, ["tests"], 600.0) == (None if found is None else f"tests/{found}")
