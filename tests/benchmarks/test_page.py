"""docs/performance.md says what the documents of runs say, and is written only when asked to publish."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import page
from benchmarks.bench import commit_of, main, publish, published, runs
from benchmarks.compare import parse
from benchmarks.launching import shortened
from benchmarks.page import MET, MISSED, OPEN, TARGETS, Results, Target, ablation_table, judge, render, verdict
from benchmarks.variants import MAIN, OPTIMISATIONS, no_exchange, no_local_step, variants
from megatron_fsdp.comm.axis import Axis
from megatron_fsdp.optim import local_step
from tests.benchmarks.documents import comparison, contender, phases, spread
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
        "ablation-large": ablation(),
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


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (page.time_ratio("large-2", "fsdp2"), 0.25),
        (page.time_ratio("large-2", "fsdp2", "cpu_over"), 0.625),
        (page.peak_ratio("large-2", "fsdp2"), 0.9),
        (page.sent_over_parts("large-2", 3), 0.2),  # 120 of 3 * 4 * 100 / 2
        (page.engine_copied("large-2"), 0.6),
        (page.phase_ratio("step-many-small-fused", "optimizer.step"), 0.375),
        (page.host_us("host", "backward"), 150.0),
    ],
)
def test_figures_are_read_from_where_they_stand(read: Callable[[Results], float], value: float) -> None:
    assert read(results()) == pytest.approx(value)


@pytest.mark.parametrize(("value", "word"), [(0.4, MET), (0.41, MISSED), (float("nan"), MISSED), (None, OPEN)])
def test_a_limit_is_the_largest_value_that_meets_it(value: float | None, word: str) -> None:
    assert verdict(Target("some", 0.4, lambda _: 0.0), value) == word


def test_targets_stand_beside_what_was_reached() -> None:
    assert {verdict(*each) for each in judge({})} == {OPEN}
    text = render(results())
    assert "| large-2: wall time of a step over fsdp2's | at most 0.65 | 0.25 | met |" in text
    assert "| host time per unit of 20 parameters, backward, us | at most 100 | 150 | missed |" in text
    assert "| moe-2: peak of live bytes over fsdp2's | at most 0.9 | - | not measured |" in text


def test_every_target_reads_a_run_that_the_suite_has() -> None:
    class Names(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            asked.add(name)
            raise KeyError(name)

    asked: set[str] = set()
    judge(Names())
    assert asked <= {run.name for run in runs(is_quick=False)}
    assert len({target.title for target in TARGETS}) == len(TARGETS)


def test_the_share_of_the_bare_collectives_is_told() -> None:
    lines = [contender(name, over={"floor": over}) for name, over in (("wire-3", 0.31), ("ours-3", 1.52))]
    told = "ours-3: 1.52 of the floor, of which 0.31 are the time of its collectives alone and 0.21 are left"
    assert told in render({"large-2": comparison(*lines)})
    assert "collectives alone" not in render({"large-2": comparison(lines[1])})


# ---- optimisations ---------------------------------------------------------------------------------------------------


def ablation() -> dict[str, Any]:
    """The first saves half of the CPU time, the second bytes alone, the third nothing, the fourth took no part."""

    def line(name: str, cpu: float, sent_mib: int, peak_mib: int, **over: float) -> dict[str, Any]:
        counted = {"gathers": 2, "reductions": 1, "gather_bytes": sent_mib * MIB, "reduce_bytes": 0}
        times = {"cpu_s": spread(cpu), "wall_s": spread(2 * cpu), "sent": counted}
        return contender(name, over=over, peak=peak_mib * MIB, sent=0) | times

    lines = (
        line("ours-3", 0.1, 10, 80, slow=0.0, wide=1.0, vain=0.99),
        line("slow", 0.2, 10, 100),
        line("wide", 0.1, 15, 80),
        line("vain", 0.1, 10, 80),
    )
    listed = [(name, f"without {name}", "ours-3") for name in ("slow", "wide", "vain", "gone")]
    request = {"model": "large", "ranks": 2, "steps": 5}
    return comparison(*lines, what="ablation", optimisations=listed, absent={"gone": "no such option"}, request=request)


def test_an_optimisation_is_shown_before_and_after_and_small_ones_are_named() -> None:
    document = ablation()
    text = ablation_table(document)
    slow = row(text, "without slow (`slow`)")[1:]
    assert slow[:2] == ["200.0 -> 100.0", "50.0% [50.0%, 50.0%]"]
    assert slow[2:] == ["400.0 -> 200.0", "100.0% [100.0%, 100.0%]", "10.00", "100.00 -> 80.00", ""]
    assert row(text, "without wide (`wide`)")[5] == "15.00 -> 10.00"
    assert row(text, "without vain (`vain`)")[-1] == "under 2%"
    assert "- without gone was not measured: no such option" in text
    document["contenders"][1]["disagrees"] = "loss 3 at step 1"
    assert "- without slow was not measured: loss 3 at step 1" in ablation_table(document)


def test_every_switch_has_a_contender_with_it_in_the_same_run() -> None:
    contenders = parse(["--ablation", "--device", "cpu"])[0].contenders
    names = [each.name for each in OPTIMISATIONS]
    assert len(set(names)) == len(names)
    assert {MAIN, *names} == set(contenders) - {"floor"}
    assert set(names) <= variants().keys() | {"ours-3"}


def test_parts_of_the_engine_are_switched_off_inside_a_block_only() -> None:
    axis = Axis(None, 0, 1, sums_locally=True)
    exchanges, slots = Axis.__dict__["exchanges_pairwise"], dict(local_step._SHARDED_STATE)
    with no_exchange(), no_local_step():
        assert not axis.exchanges_pairwise
        assert not local_step.steps_locally(torch.optim.AdamW(nn.Linear(1, 1).parameters()))
    assert Axis.__dict__["exchanges_pairwise"] is exchanges
    assert slots == local_step._SHARDED_STATE


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
