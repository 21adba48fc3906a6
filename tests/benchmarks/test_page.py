"""docs/performance.md says what the documents of runs say, and is written only when asked to publish."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.bench import commit_of, main, publish, published
from benchmarks.launching import shortened
from benchmarks.page import render
from tests.benchmarks.documents import comparison, contender, phases
from tests.support.source_tree import ROOT

MIB = 2**20
COUNTED = {"gathers": 2, "reductions": 1, "gather_bytes": 30, "reduce_bytes": 30}
OURS = contender("ours-3", over={"floor": 1.5, "fsdp2": 0.25}, peak=90 * MIB, sent=60, collectives=3.0) | {
    "sent": COUNTED
}
FSDP2 = contender("fsdp2", over={"floor": 6.0, "fsdp2": 1.0}, peak=100 * MIB, sent=80)
WRONG = contender("ddp", over={}, wall_s=None, cpu_s=None, disagrees="loss 3 at step 1", moved=None)


def rows(text: str, *cells: str) -> list[list[str]]:
    """The cells of the rows that begin like this."""
    found = (line for line in text.splitlines() if line.startswith("| " + " | ".join(cells) + " |"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


def row(text: str, *cells: str) -> list[str]:
    """The cells of the only row that begins like this."""
    (found,) = rows(text, *cells)
    return found


def results() -> dict[str, Any]:
    host = {"host_us_by_pass": {"forward": {"ours-3": 75.0}, "backward": {"ours-3": 150.0}}}
    made = {"made": {"date": "noon", "commit": "a1", "command": "python it"}}
    return {
        "large-2": comparison(OURS, FSDP2, WRONG, absent={"ddp-zero": "not here"}, **made),
        "step-many-small-fused": phases("step", ("optimizer.step", "fsdp2", 1.0), ("optimizer.step", "ours-3", 0.375)),
        "host": phases("host", ("forward", "floor", 1.0)) | host,
    }


def test_a_row_has_times_ratios_memory_and_counts() -> None:
    times, costs = rows(render(results()), "large-2", "ours-3")
    assert times[2] == "250.0 [250.0, 250.0]"
    assert [cell.split()[0] for cell in times[3:]] == ["1.50", "1.25", "0.25", "0.62", "-"]
    assert costs[2:] == ["0.0", "90.0", "0.90", "3", "0.00", "0.00", "1.00", "0.60"]


def test_what_is_missing_is_said_and_what_was_made_when() -> None:
    text = render(results())
    assert rows(text, "large-2", "ddp")[0][2:] == ["-"] * 6
    assert "- large-2, ddp: no speed, since loss 3 at step 1\n- ddp-zero took no part in large-2: not here" in text
    assert "- date: noon to noon, commit a1\n- versions: torch 9\n- hardware: one abacus" in text
    assert "- host, forward: host time per unit beyond the bare model: ours-3 75 us" in text
    assert row(text, "step-many-small-fused", "optimizer.step", "ours-3")[5] == "0.375 [0.375, 0.375]"


def test_the_share_of_the_bare_collectives_is_told() -> None:
    lines = [contender(name, over={"floor": over}) for name, over in (("wire-3", 0.31), ("ours-3", 1.52))]
    told = "ours-3: 1.52 of the floor, of which 0.31 are the time of its collectives alone and 0.21 are left"
    assert told in render({"large-2": comparison(*lines)})
    assert "collectives alone" not in render({"large-2": comparison(lines[1])})


# ---- publishing ------------------------------------------------------------------------------------------------------


def test_docs_follow_from_the_published_results() -> None:
    assert Path(ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == render(published())


def test_a_run_is_published_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "benchmarks.bench.perform", lambda run, _: (None, "it stopped") if "host" in run.name else ({}, "")
    )
    monkeypatch.setattr("benchmarks.bench.publish", lambda *found: asked.append(found))
    monkeypatch.setattr("benchmarks.bench.published", lambda: {"moe-2": {}, "start-many-small": {"made": {}}})
    common = ["--quick", "--out", str(tmp_path), "--only", "host", "start"]
    assert main(common) == 0
    assert (asked, (tmp_path / "bench.md").read_text().endswith("\n- host: it stopped\n")) == ([], True)
    assert main([*common, "--publish"]) == 0
    (results, failures) = asked[0]
    assert (list(results), failures) == (["moe-2", "start-many-small"], {"host": "it stopped"})  # others stay
    assert results["start-many-small"]["made"]["command"].startswith("python benchmarks/phases.py start --model many-s")


def test_what_is_published_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    publish({"large-2": comparison(OURS, FSDP2)}, {"moe-2": "it stopped"}, tmp_path)
    assert (tmp_path / "docs" / "performance.md").read_text() == render(published(tmp_path))
    assert json.loads((tmp_path / page.PUBLISHED).read_text())["failures"] == {"moe-2": "it stopped"}


def test_figures_are_stored_with_six_digits() -> None:
    assert shortened({"a": [1.23456789, 12345678, "x", None, (0.1,)]}) == {"a": [1.23457, 12345678, "x", None, [0.1]]}


def test_a_commit_is_noted_where_there_is_one(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "not noted"
    assert commit_of(ROOT).rstrip("+").isalnum()
