"""`mfsdp trace ...` from the outside: what it prints, what it writes, and its exit status."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fsdp.cli.main import main
from megatron_fsdp.trace.files import write_timeline
from tests.trace.synthetic import KNOWN
from tests.trace.test_files import check
from tests.trace.test_summary import OTHER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks."""
    for timeline in (KNOWN, OTHER):
        write_timeline(tmp_path / "traces", timeline)
    return tmp_path / "traces"


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:6] == [
        "communication hidden 84.4%",
        "steps 0",
        "ranks 2 of 2, cpu",
        "slowest rank 1, 0.00 ms more work than the fastest",
        "slowest unit (root)",
        "clocks ranks left a barrier together",
    ]
    assert lines[7].split()[:4] == ["rank", "step", "own", "compute"]
    assert lines[8].endswith("83.3% 100 B 96 B")
    assert lines[9].endswith("88.9% 100 B -")
    assert [line.split()[0] for line in lines[11:]] == ["unit", "(root)", "layers.0"]


def test_json_has_exact_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder), "--json", "--step", "0"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hidden"] == 1 - 70 / 450
    assert [rank["own_ns"] for rank in told["ranks"]] == [920, 1000]
    assert told["units"][1]["times"]["wait"] == 40
    assert told["units"][1]["skew_ns"] == 100


def test_one_file_for_a_viewer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder), "--merge", str(tmp_path / "all.json")]) == 0
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    check(events)
    assert {event["pid"] for event in events} == {0, 1}
    capsys.readouterr()


def test_missing_ranks_are_an_error_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_timeline(tmp_path, replace(KNOWN, recording="now", peers=(0, 1), is_cut=True))
    assert main(["trace", str(tmp_path)]) == 2
    assert "lacks the files of ranks 1, which recorded too" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--partial"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2, cpu" in shown
    assert "incomplete            a step had more phases than there was room for" in shown
    assert main(["trace", str(tmp_path), "--partial", "--step", "7"]) == 2
    assert "step 7 was not recorded; those of all ranks are 0" in capsys.readouterr().err
