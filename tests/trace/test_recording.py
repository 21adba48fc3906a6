"""What is recorded, against what is known of a step: the same values, exact bytes and counts, phases in place."""

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.profiler import ProfilerActivity, profile

from megatron_fsdp import ChainedOptimizer, MegatronFSDP, fully_shard
from megatron_fsdp.comm.collectives import Traffic
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace import Recorder, Timeline, recorder, trace
from megatron_fsdp.trace.summary import summarise
from tests.conftest import RunRanks
from tests.support.formulas import outer_step_traffic, step_traffic
from tests.support.on_ranks import assert_equal_tensors, engine_of, on_ranks, refusal
from tests.support.zoo import FLOORS, tower_loss
from tests.trace import training
from tests.trace.training import data, sharded_tower, train


def _both(how: str, strategy: int) -> tuple[dict[str, Any], dict[str, Any], Timeline]:
    """Values without a recording, values with one, and the recording."""
    make = {
        "flat": lambda: sharded_tower(strategy),
        "hsdp": lambda: sharded_tower(strategy, outer=(0, 2, 2)),
        "hfsdp": lambda: sharded_tower(strategy, outer=(1, 2, 2)),
    }[how]
    without, _ = train(make(), is_traced=False)
    values, timeline = train(make(), is_traced=True)
    assert timeline is not None
    return without, values, timeline


def _sent(timeline: Timeline, axis: str | None = None) -> Traffic:
    """What the collectives of a timeline add up to."""
    total = Traffic()
    for one in timeline.collectives:
        if axis in (None, one.axis):
            is_gather = one.purpose == "gather"
            total = total.plus(
                Traffic(int(is_gather), int(not is_gather), one.num_bytes * is_gather, one.num_bytes * (not is_gather))
            )
    return total


def _check_all(without: dict[str, Any], values: dict[str, Any], timeline: Timeline) -> None:
    """What holds for every recording."""
    for name in ("gradients", "weights"):
        assert_equal_tensors(values[name], without[name])
    others = without.keys() - {"gradients", "weights"}
    assert {name: values[name] for name in others} == {name: without[name] for name in others}
    assert _sent(timeline) == values["traffic"]
    for axis, sent in values["by_axis"].items():
        assert _sent(timeline, axis) == sent
    assert sum(span.num_bytes for span in timeline.spans) == sum(one.num_bytes for one in timeline.collectives)
    steps = summarise(timeline)
    assert [step.step for step in steps] == [0, 1]
    for step in steps:
        assert 0 <= step.exposed_ns <= step.communication_ns <= step.duration_ns
    for one in timeline.collectives:
        assert one.launch_ns <= one.launched_ns <= one.wait_ns <= one.arrived_ns <= one.waited_ns  # type: ignore[operator]
        assert one.done_ns <= one.arrived_ns  # type: ignore[operator]
    assert timeline.is_aligned
    assert not timeline.is_cut
    assert [span.phase for span in timeline.spans].count("optimizer") == 2


@pytest.mark.unmerged
@pytest.mark.parametrize("strategy", [0, 3])
def test_strategies(run_ranks: RunRanks, strategy: int) -> None:
    for rank, (without, values, timeline) in enumerate(run_ranks(2, _both, "flat", strategy)):
        _check_all(without, values, timeline)
        assert timeline.rank == rank
        assert timeline.units == ("(root)", *(f"floors.{floor}" for floor in range(FLOORS)))
        expected = step_traffic(values["footprints"], ShardingStrategy(strategy))
        for step in (0, 1):
            launched = [one for one in timeline.collectives if one.step == step]
            assert sum(one.num_bytes for one in launched if one.purpose == "gather") == expected.gather_bytes
            assert sum(one.num_bytes for one in launched if one.purpose == "reduce") == expected.reduce_bytes
            assert len(launched) == expected.gathers + expected.reductions
            phases = Counter((span.phase, span.unit) for span in timeline.spans if span.step == step)
            for unit in range(FLOORS + 1):
                assert phases["forward", unit] == phases["backward", unit] == phases["reduce", unit] == 1
                assert phases["copy", unit] == 2  # a floor has two parameters, and so has the root
                assert phases["local sum", unit] == 1
            assert phases["install", 0] == phases["finalise", 0] == phases["optimizer", 0] == 1


@pytest.mark.full(short=["hfsdp"])
@pytest.mark.parametrize("how", ["hsdp", "hfsdp"])
def test_hybrid_sharding_has_an_outer_stream(run_ranks: RunRanks, how: str) -> None:
    found = run_ranks(4, _both, how, 3)
    (recording,) = {timeline.recording for _, _, timeline in found}
    assert recording
    assert {timeline.peers for _, _, timeline in found} == {(0, 1, 2, 3)}
    for without, values, timeline in found:
        _check_all(without, values, timeline)
        across = [one for one in timeline.collectives if one.stream == "outer"]
        assert {one.axis for one in across} == {"dp_outer"}
        assert {one.axis for one in timeline.collectives if one.stream != "outer"} == {"dp_shard"}
        expected = outer_step_traffic(values["footprints"], ShardingStrategy.optim_grads_params)
        for step in (0, 1):
            count = Counter(one.purpose for one in across if one.step == step)
            assert (count["gather"], count["reduce"]) == (expected.gathers, expected.reductions)


@on_ranks(1)
def test_a_step_that_never_ends_is_cut_and_the_next_one_is_whole() -> None:
    model, optimizer = sharded_tower(2)
    with patch.object(recorder, "MAX_RECORDS", 60), trace(model, align=False) as recording:
        with torch.no_grad():
            for _ in range(20):
                tower_loss(model, data())
        training.plain(model, data())
        optimizer.step()
        training.plain(model, data())
    timeline = recording.result()
    assert timeline.is_cut
    forwards = Counter(span.step for span in timeline.spans if span.phase == "forward" and not span.unit)
    assert forwards[0] < 20
    assert forwards[1] == 1
    assert [span.phase for span in timeline.spans if span.step == 1].count("backward") == FLOORS + 1


class RefusalError(Exception):
    """Raised in the middle of a step."""


def _break(model: MegatronFSDP, where: str) -> None:
    """Fail in the middle of forward, or of backward, on every rank."""

    def refuse(*_: Any) -> None:
        raise RefusalError

    floor = model.module.floors[3].up
    handle = floor.register_forward_hook(refuse) if where == "forward" else None
    x = data()
    if where == "backward":
        handle = floor.register_forward_hook(lambda _m, _i, out: out.register_hook(refuse) and None)
    with pytest.raises(RefusalError):
        tower_loss(model, x).backward()
    assert handle is not None
    handle.remove()
    model.reset()


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_a_step_that_fails_is_survived(where: str) -> None:
    """A step, one that fails, and two more, which are compared with ones that nobody records."""
    outcomes: list[Any] = []
    timelines = []
    for is_traced in (False, True):
        wrapped = sharded_tower(3)
        model, optimizer = wrapped
        watcher = Recorder(model)
        if is_traced:
            watcher.start()
        training.plain(model, data())
        optimizer.step()
        optimizer.zero_grad()
        _break(model, where)
        model.zero_grad()
        if is_traced:
            timelines.append(watcher.result())  # while it goes on
        losses = training.plain(model, data(1))
        optimizer.step()
        watcher.stop()
        weights = {name: training.local(param.data) for name, param in model.named_parameters()}
        outcomes.append({"losses": losses, "weights": weights})
        if is_traced:
            timelines.append(watcher.result())
    without, with_trace, early, late = outcomes[0], outcomes[1], timelines[0], timelines[1]
    assert with_trace["losses"] == without["losses"]
    assert_equal_tensors(with_trace["weights"], without["weights"])
    assert late.spans[: len(early.spans)] == early.spans
    whole = [s for s in late.spans if (s.phase, s.unit, s.depth) == ("backward", 0, 0)]
    assert len(whole) == 2 + (where == "backward")  # the root's part ends where that of floor 7 begins
    assert [s.phase for s in late.spans].count("optimizer") == 2
    last = max(late.spans, key=lambda span: span.end_ns)
    assert (last.phase, last.depth) == ("optimizer", 0)


def _hooks() -> tuple[int, int]:
    pre = torch_optimizer._global_optimizer_pre_hooks  # type: ignore[attr-defined]
    post = torch_optimizer._global_optimizer_post_hooks  # type: ignore[attr-defined]
    return len(pre), len(post)


@on_ranks(2)
def test_the_last_steps_are_kept_and_afterwards_nobody_watches() -> None:
    model, optimizer = sharded_tower(2)
    hooks, observers = _hooks(), engine_of(model).observers
    watcher = Recorder(model, steps=2)
    watcher.stop()  # before it began: nothing
    assert not observers.active
    assert "call start" in refusal(watcher.result, error=TraceError)
    watcher.start()
    assert observers.active
    assert _hooks() == (hooks[0] + 1, hooks[1] + 1)
    assert "another Recorder" in refusal(watcher.start, error=TraceError)
    for step in range(5):
        training.plain(model, data(step))
        optimizer.step()
        other = torch.nn.Parameter(torch.zeros(1))
        other.grad = torch.ones(1)
        torch.optim.SGD([other]).step()  # of nobody's concern
    watcher.stop()
    watcher.stop()
    assert (_hooks(), bool(observers.active)) == (hooks, False)
    timeline = watcher.result()
    training.plain(model, data())
    optimizer.step()
    assert watcher.result() == timeline
    assert [window.index for window in timeline.steps] == [3, 4]
    assert Counter((span.step, span.depth) for span in timeline.spans if span.phase == "optimizer") == {
        (3, 0): 1,
        (4, 0): 1,
    }
    assert 0 < timeline.steps[0].start_ns < timeline.steps[0].end_ns == timeline.steps[1].start_ns
    with pytest.raises(RefusalError), trace(model, align=False):
        raise RefusalError
    assert not observers.active


@on_ranks(1)
def test_the_step_of_a_chain_is_one_span() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, *others = model.parameters()
    chain = ChainedOptimizer(torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others))
    sharded, optimizer = fully_shard(model, chain, fsdp_unit_modules=[nn.Linear])
    with trace(sharded, align=False) as recording:
        sharded(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    spans = [span for span in recording.result().spans if span.phase == "optimizer"]
    assert [span.depth for span in spans] == [0]


# ---- phases as ranges of torch's profiler: there while one runs, and of no influence ---------------------------------


CPU = (ProfilerActivity.CPU,)


def _profiled(is_profiled: bool) -> tuple[list[float], Counter[str]]:
    """Losses of three steps with a recording, and the ranges that a profiler, if any, sees of the second one."""
    model, optimizer = sharded_tower(3)
    losses: list[float] = []
    names: Counter[str] = Counter()
    with trace(model) as recording:
        for step in range(3):
            is_seen = is_profiled and step == 1
            with profile(activities=CPU, acc_events=True) if is_seen else nullcontext() as profiler:
                losses += training.plain(model, data(step))
                optimizer.step()
                optimizer.zero_grad()
            if profiler is not None:
                names.update(event.name for event in profiler.events() if event.name.startswith("mfsdp/"))
    assert not recording._ranges
    if is_profiled:
        timeline, known = recording.result(), {phase.value for phase in Phase}
        spans = [span for span in timeline.spans if span.step == 1 and span.phase in known]
        assert names == Counter(f"mfsdp/{span.phase} {timeline.units[span.unit]}" for span in spans)
    return losses, names


@on_ranks(2)
def test_a_profiler_sees_the_phases_of_its_steps_and_changes_nothing() -> None:
    (losses, seen), (expected, nothing) = _profiled(True), _profiled(False)
    assert losses == expected
    assert nothing == {}
    assert seen["mfsdp/forward floors.3"] == 1
    assert sum(name.startswith("mfsdp/backward") for name in seen) == FLOORS + 1
