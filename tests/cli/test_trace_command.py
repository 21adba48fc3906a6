"""`mfsdp trace ...` from the outside: what it prints, what it writes, and its exit status."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fsdp.cli.main import main
from megatron_fsdp.trace.files import write_timeline
from tests.trace.synthetic import KNOWN, collective
from tests.trace.test_files import check

OTHER = replace(KNOWN, rank=1, collectives=(collective((110, 120), 200, (480, 480, 480)),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks."""
    for timeline in (KNOWN, OTHER):
        write_timeline(tmp_path / "traces", timeline)
    return tmp_path / "traces"


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "communication hidden 84.4%",
        "ranks 2 of 2, cpu",
        "",
        "rank step time communication exposed hidden",
        "0 0 0.00 0.00 0.00 83.3%",
        "1 0 0.00 0.00 0.00 88.9%",
    ]


def test_json_has_exact_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hidden"] == 1 - 70 / 450
    assert [(step["rank"], step["communication_ns"], step["exposed_ns"]) for step in told["steps"]] == [
        (0, 360, 60),
        (1, 90, 10),
    ]


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
