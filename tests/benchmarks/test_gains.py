"""What optimisations gave is read from two contenders that differ in nothing else, and shown before -> after."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.ablation import request_of
from benchmarks.contenders import missing_peers
from benchmarks.gains import gains
from benchmarks.optimisations import OPTIMISATIONS, no_exchange, no_local_step
from benchmarks.performance import published, render
from benchmarks.plots import savings
from benchmarks.sections import ablation_table, breakdown_section, checkpoint_section
from benchmarks.variants import PLAIN, variants
from megatron_fsdp.comm.axis import Axis
from megatron_fsdp.optim import local_step
from tests.benchmarks.documents import comparison, contender, spread
from tests.support.source_tree import ROOT

MIB = 2**20


def line(name: str, cpu: float, sent_mib: int, peak_mib: int, **over: float) -> dict[str, Any]:
    counted = {"gathers": 2, "reductions": 1, "gather_bytes": sent_mib * MIB, "reduce_bytes": 0}
    times = {"cpu_s": spread(cpu), "wall_s": spread(2 * cpu), "sent": counted}
    return contender(name, over=over, peak=peak_mib * MIB, sent=0) | times


def ablation() -> dict[str, Any]:
    """The first saves half of the CPU time, the second bytes alone, the third nothing, the fourth took no part."""
    lines = (
        line("ours-3", 0.1, 10, 80, slow=0.0, wide=1.0, vain=0.99),
        line("slow", 0.2, 10, 100),
        line("wide", 0.1, 15, 80),
        line("vain", 0.1, 10, 80),
    )
    listed = [(name, f"without {name}", "ours-3") for name in ("slow", "wide", "vain", "gone")]
    request = {"model": "large", "ranks": 2, "steps": 5}
    return comparison(*lines, what="ablation", optimisations=listed, absent={"gone": "no such option"}, request=request)


def test_gains_are_before_and_after_and_say_what_is_missing() -> None:
    document = ablation()
    found, missing = gains(document, document["optimisations"])
    slow, wide, vain = found
    assert (slow.cpu_s, slow.peak_bytes) == ((0.2, 0.1), (100 * MIB, 80 * MIB))
    assert (wide.sent_bytes, wide.allocations) == ((15 * MIB, 10 * MIB), (7, 7))
    assert [gain.is_small for gain in found] == [False, False, True]
    assert slow.largest == 1.0  # by the clock; 0.5 of CPU time, 0.2 of the peak
    assert wide.largest == pytest.approx(1 / 3)
    assert vain.largest == pytest.approx(0.01)
    assert missing == {"without gone": "no such option"}


def test_who_computes_something_else_gains_nothing() -> None:
    document = ablation()
    document["contenders"][1]["disagrees"] = "loss 3 at step 1"
    found, missing = gains(document, document["optimisations"])
    assert [gain.name for gain in found] == ["wide", "vain"]
    assert missing["without slow"] == "loss 3 at step 1"


def test_the_table_shows_changes_and_names_small_ones() -> None:
    text = ablation_table("ablation-large", ablation())
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in map(_cells, text.splitlines())}
    slow = rows["without slow (`slow`)"]
    assert slow == [
        "200.0 -> 100.0",
        "50.0% [50.0%, 50.0%]",
        "400.0 -> 200.0",
        "100.0% [100.0%, 100.0%]",
        "10.00",
        "100.0 -> 80.0",
        "7",
        "",
    ]
    assert rows["without wide (`wide`)"][4] == "15.00 -> 10.00"
    assert rows["without vain (`vain`)"][-1] == "under 2%"
    assert "- without gone was not measured: no such option" in text
    assert savings({"a": ablation()}) == {"large": {"slow": 0.5, "wide": 0.0, "vain": pytest.approx(0.005)}}


def _cells(row: str) -> list[str]:
    return row.split("|") if row.count("|") > 2 else ["", "", ""]


def test_every_switch_has_a_contender_with_it_in_the_same_run() -> None:
    request = request_of("tiny", 2, 3, 1)
    names = [each.name for each in OPTIMISATIONS]
    assert len(set(names)) == len(names)
    assert {*names, *(each.base for each in OPTIMISATIONS)} == set(request.contenders) - {"floor"}
    assert set(names) <= variants().keys() | {"ours-3"}
    assert {each.base for each in OPTIMISATIONS} <= {"ours-3", *PLAIN}
    assert request_of("tiny", 2, 3, 1, ["no-exchange"]).contenders == ("floor", "ours-3", "no-exchange")


def test_parts_of_the_engine_are_switched_off_inside_a_block_only() -> None:
    axis = Axis(None, 0, 1, sums_locally=True)
    exchanges, kinds = Axis.__dict__["exchanges_pairwise"], dict(local_step._SHARDED_STATE)
    with no_exchange(), no_local_step():
        assert not axis.exchanges_pairwise
        assert not local_step.steps_locally(torch.optim.AdamW(nn.Linear(1, 1).parameters()))
    assert Axis.__dict__["exchanges_pairwise"] is exchanges
    assert kinds == local_step._SHARDED_STATE


def test_compiled_contenders_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.contenders.which", lambda _: None)
    assert missing_peers(["ours-3", "ours-3-compiled"]) == {"ours-3-compiled": "there is no C++ compiler here"}


def traced(count: int) -> dict[str, Any]:
    """A root and further units; unit i computes for i milliseconds and waits for one."""

    def times(compute: float) -> dict[str, float]:
        columns = dict.fromkeys(("gather", "wait", "compute", "copy", "reduce", "update", "other"), 0.0)
        return columns | {"compute": compute * 1e6, "wait": 1e6}

    units = [
        {"unit": f"unit {i}", "times": times(i), "exposed_ns": 5e5, "sent_bytes": MIB, "skew_ns": 0}
        for i in range(count)
    ]
    rank = {"rank": 1, "step_ns": 3e7, "times": times(20), "exposed_ns": 4e6, "hidden": 0.75, "sent_bytes": 3 * MIB}
    request = {"model": "large", "ranks": 2, "rounds": 5}
    return {"what": "breakdown", "request": request, "breakdown": {"ours-3": {"ranks": [rank], "units": units}}}


def test_a_traced_step_is_shown_by_rank_and_unit() -> None:
    text = breakdown_section("breakdown-large", traced(3))
    assert "| ours-3 | 1 | 30.00 | 0.00 | 1.00 | 20.00 | 0.00 | 0.00 | 0.00 | 0.00 | 4.00 | 75% | 3.00 |" in text
    assert "| ours-3 | unit 2 | 0.00 | 1.00 | 2.00 | 0.00 | 0.00 | 0.00 | 0.00 | 0.50 | 1.00 |" in text


def test_of_many_units_root_mean_and_slowest_are_shown() -> None:
    text = breakdown_section("breakdown-large", traced(21))
    units = [cells[2].strip() for cells in map(_cells, text.splitlines()) if len(cells) == 13]
    assert units[2:] == ["unit 0", "mean of 20", "unit 20"]  # behind the head
    assert "| ours-3 | mean of 20 | 0.00 | 1.00 | 10.50 |" in text


def test_checkpoints_are_shown_as_ratios_to_the_slowest_rank_of_the_peer() -> None:
    act = {"wall_s": [1.0, 4.0], "cpu_s": [1.0, 1.0], "counts": {"collectives": 9}}
    slow = {"wall_s": [2.0, 2.0], "cpu_s": [3.0, 3.0], "counts": {"collectives": 19}}
    readings = {"ours": [{"save": slow, "load": slow}], "fsdp2, dcp": [{"save": act, "load": act}] * 2}
    text = checkpoint_section("checkpoints", {"readings": readings, "facts": {"date": "today", "command": "run"}})
    assert "| save | ours | 1.25 | 3.00 | 19 |" in text  # 2 / 1 and 2 / 4


def test_docs_follow_from_the_published_results() -> None:
    assert Path(ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == render(published())


def test_docs_show_what_is_missed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "large, 2 ranks: wall time of a step over fsdp2's"
    monkeypatch.setattr("benchmarks.reasons.REASONS", ((title, "the wire"),))
    ours = contender("ours-3", over={"floor": 1.5, "fsdp2": 0.75}, peak=90 * MIB)
    peer = contender("fsdp2", over={"floor": 2.0, "fsdp2": 1.0}, peak=100 * MIB)
    text = render({"large-2": comparison(ours, peer), "ablation-large": ablation()})
    assert f"| {title} | at most 0.65 | 0.75 | missed; the wire |" in text
    assert "| large, 2 ranks: wall time of a step over the floor's | at most 1.25 | 1.5 | missed |" in text
    assert "| large, 2 ranks | ours-3 | 1.50 [1.50, 1.50] |" in text
    assert "| 90.0 | 0.90 |" in text
    assert "Less than 2% in everything, on every workload: without vain." in text
    assert "Not measured: " in text
