"""Phases as ranges of torch's profiler: there while one runs, and of no influence."""

from collections import Counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.trace import trace
from tests.conftest import RunRanks
from tests.support.zoo import FLOORS
from tests.trace import training
from tests.trace.training import data, sharded_tower

CPU = (ProfilerActivity.CPU,)


def _profiled(is_profiled: bool) -> dict[str, Any]:
    """Three steps with a recording; a profiler, if any, sees the second one."""
    model, optimizer = sharded_tower(3)
    losses: list[float] = []
    names: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    with trace(model) as recording:
        for step in range(3):
            profiler = profile(activities=CPU, acc_events=True) if is_profiled and step == 1 else None
            if profiler is not None:
                profiler.start()
            losses += training.plain(model, data(step))
            optimizer.step()
            optimizer.zero_grad()
            if profiler is not None:
                profiler.stop()
                names.update(event.name for event in profiler.events() if event.name.startswith("mfsdp/"))
    timeline = recording.result()
    for span in timeline.spans:
        if span.step == 1 and span.phase in [phase.value for phase in Phase]:
            phases[f"mfsdp/{span.phase} {timeline.units[span.unit]}"] += 1
    return {"losses": losses, "names": names, "phases": phases, "open": bool(recording._ranges)}


def test_a_profiler_sees_the_phases_of_its_steps_and_changes_nothing(run_ranks: RunRanks) -> None:
    with_profiler, without = run_ranks(2, _profiled, True), run_ranks(2, _profiled, False)
    for seen, plain in zip(with_profiler, without, strict=True):
        assert seen["losses"] == plain["losses"]
        assert plain["names"] == {}
        assert seen["names"]["mfsdp/forward floors.3"] == 1
        assert sum(name.startswith("mfsdp/backward") for name in seen["names"]) == FLOORS + 1
        assert seen["names"] == seen["phases"]
        assert not seen["open"]
