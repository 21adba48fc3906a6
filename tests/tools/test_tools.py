"""The tools: faults that are planted, clean exits, tables, the public surface, and what needs a GPU, rehearsed."""

import ast
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron_fsdp.sharding.placement import plan_layout
from tests.support.source_tree import ROOT
from tools import gpu_half_hour
from tools.gpu_half_hour import PART_S, PARTS, Section, Session, run_part
from tools.mutants import Mutant, failing_test, load_mutants
from tools.padding_table import BF16_ALIGNMENT_NUMEL, RANK_COUNTS, groups, lcm_rule_numel

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


# ---- programs on several ranks end cleanly: no thread of gloo aborts a process that has done its work ----------------


TOOL = Path(__file__).parents[2] / "tools" / "clean_exits.py"


@pytest.mark.full
def test_every_launch_ends_with_status_zero() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(TOOL), "--rounds", "1"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


# ---- the padding table keeps what it promises ------------------------------------------------------------------------


GROUPS = {group.name: group for group in groups()}


def test_real_layers_waste_at_most_one_percent() -> None:
    for (name, group), num_shards in product(GROUPS.items(), RANK_COUNTS):
        layout = plan_layout(group.shapes, num_shards, alignment_numel=BF16_ALIGNMENT_NUMEL)
        assert layout.padding_fraction <= 0.01, name
        # Alignment aside, the least common multiple is never better.
        assert layout.numel <= lcm_rule_numel(group.shapes, num_shards) + num_shards * BF16_ALIGNMENT_NUMEL, name


# ---- the script for half an hour on a GPU, rehearsed on the CPU ------------------------------------------------------


def lines_of(folder: Path, part: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"part{part}.jsonl").read_text().splitlines()]


def test_the_sections_of_a_part_fit_into_its_time() -> None:
    for part, sections in PARTS.items():
        assert sum(section.limit_s for section in sections) <= PART_S[part]
        assert len({section.label for section in sections}) == len(sections)


@pytest.mark.full
def test_a_part_goes_on_after_a_section_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, runs = Section(gpu_half_hour.alone, 0.01), Section(gpu_half_hour.machine, 1200)
    monkeypatch.setitem(gpu_half_hour.PARTS, 1, (stopped, runs))
    monkeypatch.setitem(gpu_half_hour.PART_S, 1, 1300.0)
    monkeypatch.setattr(gpu_half_hour, "LEAST_S", 0.0)
    assert run_part(Session(torch.device("cpu"), tmp_path, 1)) == 1
    ended = {line["section"]: line.get("ended") for line in lines_of(tmp_path, 1) if line["what"] == "section"}
    assert ended == {"alone": "stopped after 0 s", "machine": 0}


@pytest.mark.full
def test_the_checks_of_values_hold_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = (Section(gpu_half_hour.alone, 600.0), Section(gpu_half_hour.out_of_memory, 600.0))
    monkeypatch.setitem(gpu_half_hour.PARTS, 1, sections)
    monkeypatch.setitem(gpu_half_hour.PART_S, 1, 1200.0)
    assert run_part(Session(torch.device("cpu"), tmp_path, 1)) == 0
    found = {str(line["what"]): line for line in lines_of(tmp_path, 1)}
    for strategy in range(4):
        assert found[f"fp32, strategy {strategy}"]["off_plain"] == 0.0
        assert found[f"bf16, strategy {strategy}"]["equal_under_delays"] is True
    assert found["after a reset"]["equal"] is True
