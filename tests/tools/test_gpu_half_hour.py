"""The script for half an hour on a GPU, rehearsed on the CPU."""

import json
from pathlib import Path

import pytest
import torch

from tools import gpu_half_hour
from tools.gpu_half_hour import PART_S, PARTS, Section, Session, run_part


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
