"""The observers that debug switches add to a model: comparison of ranks, checks of memory, delays."""

from __future__ import annotations

from megatron_fsdp.debug.delays import DelayObserver, resolve_delays
from megatron_fsdp.debug.lifetimes import LifetimeChecker, resolve_check_lifetimes
from megatron_fsdp.debug.verify_ranks import RankVerifier
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.errors import ScheduleError


def watch(engine: Engine, verify_ranks_s: float) -> None:
    """Add the observers that arguments and environment ask for. Collective where ranks are compared."""
    if verify_ranks_s and engine.dense.group is not None:
        engine.observers.add(RankVerifier(engine.dense.group, engine.units, verify_ranks_s))
    if resolve_check_lifetimes():
        check_lifetimes(engine)
    delays = resolve_delays()
    if delays is not None:
        engine.observers.add(DelayObserver(*delays, engine.device))


def check_lifetimes(engine: Engine) -> None:
    """Check every use of borrowed memory from now on; further calls do nothing.

    Raises:
        ScheduleError: A forward or backward is running.
    """
    if engine.scheduler.in_forward or engine.scheduler.in_backward:
        raise ScheduleError("check_lifetimes was called inside a forward or backward; call it between steps")
    if not engine.observers.include(LifetimeChecker):
        engine.executor.run(engine.scheduler.weights_changed())
        engine.observers.add(LifetimeChecker(engine.units))
