"""Targets read the right figure out of the documents, and say in words what became of them."""

import fnmatch
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import reasons, targets
from benchmarks.reasons import REASONS
from benchmarks.suite import runs
from benchmarks.targets import MET, MISSED, OPEN, TARGETS, Results, Target, judge, told_amiss
from tests.benchmarks.documents import comparison, contender, phases

FLOOR = contender("floor", over={"floor": 1.0}, moved={"copied_numel": 60, "gloo_bytes": 0})
OURS = contender("ours-3", over={"floor": 1.5, "fsdp2": 0.25, "ddp": 1.1}, peak=90, sent=60)
FSDP2 = contender("fsdp2", over={"floor": 6.0, "fsdp2": 1.0}, peak=120, sent=80)
DDP_LIKE = contender("ours-0", over={"ddp": 1.25}, needed_bytes=80)
COUNTED = {"gathers": 2, "reductions": 1, "gather_bytes": 30, "reduce_bytes": 30}
NOTHING_SEEN = {"copied_numel": 60, "gloo_bytes": 0, "reduced_bytes": 0, "copied_by": {}}
DEFERRED = contender("ours-3-deferred", over={"fsdp2-deferred": 0.5}, peak=60) | {
    "sent": COUNTED,
    "moved": NOTHING_SEEN,
}
PEER = contender("fsdp2-deferred", over={}, peak=120, sent=80)


def results() -> dict[str, Any]:
    ours = {**OURS, "live": {**OURS["live"], "allocated": 600}}
    host = {"host_us_by_pass": {"forward": {"ours-3": 75.0}, "backward": {"ours-3": 150.0}}}
    saved = [
        {"save": {"wall_s": [1.0, 6.0], "cpu_s": [1.0, 1.0]}},
        {"save": {"wall_s": [3.0, 2.0], "cpu_s": [3.0, 3.0]}},
    ]
    plain = [{"save": {"wall_s": [4.0, 3.0], "cpu_s": [4.0, 8.0]}}]
    return {
        "many-small-2-accumulation": comparison(DEFERRED, PEER),
        "checkpoints-large": {"what": "checkpoints", "readings": {"ours": saved, "fsdp2, dcp": plain}},
        "many-small-2": comparison(FLOOR, ours, FSDP2, DDP_LIKE, planned_peak=100),
        "step-many-small-fused": phases("step", ("optimizer.step", "fsdp2", 1.0), ("optimizer.step", "ours-3", 0.375)),
        "host": phases("host", ("forward", "floor", 1.0)) | host,
        "facts": {"import_cpu_s": {"megatron_fsdp": [0.5, 0.125, 0.25]}, "largest_padding": 0.0078125},
    }


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (targets.ratio("many-small-2", "fsdp2"), 0.25),
        (targets.ratio("many-small-2", "fsdp2", "cpu_over"), 0.625),
        (targets.largest_ratio(["many-small-2"], ["ours-0", "ours-3"], "ddp", "wall_over"), 1.25),
        (targets.peak_ratio("many-small-2", "fsdp2"), 0.75),
        (targets.peak_over_plan("many-small-2"), 0.1),
        (targets.sent_over_needed("many-small-2", "ours-0"), 1.25),
        (targets.sent_over_parts("many-small-2", "ours-3", 3), 0.2),  # 120 of 3 * 4 * 100 / 2
        (targets.sent_over_parts("many-small-2-accumulation", "ours-3-deferred", 3), 0.1),  # 60, of which none is seen
        (targets.seen_over_needed("many-small-2", "ours-3", 3), 0.2),
        (targets.reduce_bytes_ratio("many-small-2-accumulation", "fsdp2-deferred", "ours-3-deferred"), 0.75),
        (targets.peak_ratio("many-small-2-accumulation", "fsdp2-deferred", "ours-3-deferred"), 0.5),
        (targets.host_us("host", "backward"), 150.0),
        (targets.checkpointing("checkpoints-large", "save"), 1.375),  # 3 over 4, and 6 over 3
        (targets.extra_allocated("many-small-2"), 0.5),
        (targets.engine_copied("many-small-2"), 0.6),
        (targets.phase_ratio("step-many-small-fused", "optimizer.step"), 0.375),
        (targets.import_beyond_torch, 0.25),
    ],
)
def test_figures_are_read_from_where_they_stand(read: Callable[[Results], float], value: float) -> None:
    assert read(results()) == pytest.approx(value)


@pytest.mark.parametrize(("value", "word"), [(0.39, MET), (0.4, MET), (0.41, MISSED), (float("nan"), MISSED)])
def test_a_limit_is_the_largest_value_that_meets_it(value: float, word: str) -> None:
    (verdict,) = judge({}, [Target("some", 0.4, lambda _: value)])
    assert verdict.word == word


def test_bytes_that_nobody_sees_are_not_taken_for_none_sent() -> None:
    read = targets.seen_over_needed("many-small-2-accumulation", "ours-3-deferred", 3)
    (verdict,) = judge(results(), [Target("t", 1, read)])
    assert verdict.word == OPEN


def test_reasons_belong_to_targets() -> None:
    titles = [target.title for target in TARGETS]
    assert [pattern for pattern, _ in REASONS if not fnmatch.filter(titles, pattern)] == []


def test_the_first_row_that_matches_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (("large, 2*: time", "sockets"), ("*: time", "Python"), ("*: bytes", "padding"))
    monkeypatch.setattr(reasons, "REASONS", table)
    titles = ("large, 2 ranks: time", "large, 4 ranks: time", "large: peak")
    assert [reasons.reason_for(title) for title in titles] == ["sockets", "Python", ""]


def test_reasons_that_are_lacking_and_that_nothing_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (("a*", "sockets"), ("b", "Python"), ("c", "nobody asked"))
    for module in (reasons, targets):
        monkeypatch.setattr(module, "REASONS", table)
    values = {"a1": 2.0, "a2": 0.5, "b": 0.5, "d": 2.0}
    verdicts = judge({}, [Target(title, 1.0, lambda _, value=value: value) for title, value in values.items()])
    assert told_amiss(verdicts) == (["d"], ["b"])  # of c nothing was measured


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert {verdict.word for verdict in judge({})} == {OPEN}


def test_a_contender_without_speeds_leaves_its_targets_open() -> None:
    silent = {**OURS, "wall_over": {}, "cpu_over": {}}
    (verdict,) = judge({"many-small-2": comparison(silent)}, [Target("t", 1, targets.ratio("many-small-2", "fsdp2"))])
    assert verdict.word == OPEN


def test_verdicts_of_the_small_document() -> None:
    words = {verdict.target.title: verdict.word for verdict in judge(results())}
    assert words["many-small, 2 ranks: wall time of a step over fsdp2's"] == MET
    assert words["many-small, 2 ranks: CPU time of a step over fsdp2's"] == MISSED
    assert words["many-small: optimizer.step over fsdp2's, fused AdamW"] == MET
    assert words["many-small, 2 ranks: peak off the planner's, fraction"] == MISSED
    assert words["host time per unit of 20 parameters, forward"] == MET
    assert words["host time per unit of 20 parameters, backward"] == MISSED
    assert words["large: time to save over fsdp2's"] == MISSED
    assert words["large, 2 ranks: wall time of a step over fsdp2's"] == OPEN


def test_every_target_reads_a_run_that_the_suite_has() -> None:
    class Names(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            asked.add(name)
            raise KeyError(name)

    asked: set[str] = set()
    judge(Names())
    assert asked <= {run.name for run in runs(is_quick=False)}
    assert len({target.title for target in TARGETS}) == len(TARGETS)
