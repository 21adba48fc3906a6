"""Timelines made by hand."""

from dataclasses import replace
from typing import Any

from megatron_fsdp.trace.timeline import Collective, MemorySample, Span, StepWindow, Timeline

EMPTY = Timeline(
    rank=0,
    world_size=2,
    device="cpu",
    clock="host",
    units=("(root)", "layers.0", "layers.1"),
    started_unix_ns=1_700_000_000_000_000_000,
    is_aligned=True,
    is_cut=False,
    recording="",
    peers=(),
    memory_kind="held",
    steps=(StepWindow(0, 0, 1000),),
    spans=(),
    collectives=(),
    memory=(),
)


def span(phase: str, start: int, end: int, depth: int = 0, unit: int = 0, step: int = 0, num_bytes: int = 0) -> Span:
    """A phase from `start` to `end`."""
    return Span(step, unit, phase, start, end - start, depth, num_bytes)


def collective(launch: tuple[int, int], done: int | None, wait: tuple[int, int, int] | None, **more: Any) -> Collective:
    """One that is launched in the interval `launch`, done at `done`, and waited for: (begin, arrived, end)."""
    begin, arrived, end = wait or (None, None, None)
    plain = Collective(
        number=0,
        step=0,
        unit=1,
        purpose="gather",
        axis="dp",
        stream="gather",
        num_bytes=100,
        launch_ns=launch[0],
        launched_ns=launch[1],
        done_ns=done,
        arrived_ns=arrived,
        wait_step=None if begin is None else 0,
        wait_ns=begin,
        waited_ns=end,
    )
    return replace(plain, **more)


# One step of 1000 ns, worked out by hand:
#
#       0    100  150       300      400        600   650  700   800        900  1000
#       |root forward ------------------------------------------|optimizer--------|
#             |gather 1|     |forward 1---------|                |  install |
#                 (launch 110-120)  |wait (blocked 420-480)|
#
# The gather of 100 bytes is in flight from 110 until 470; of the wait, 420-470 is exposed, as is the launch 110-120.
KNOWN = replace(
    EMPTY,
    spans=(
        span("forward", 0, 700),
        span("unshard", 100, 150, depth=1, unit=1, num_bytes=100),
        span("forward", 300, 600, depth=1, unit=1),
        span("wait", 410, 490, depth=2, unit=1),
        span("blocked", 420, 480, depth=3, unit=1),
        span("optimizer", 700, 900),
        span("install", 800, 900, depth=1),
    ),
    collectives=(collective((110, 120), 470, (420, 480, 480)),),
    memory=(MemorySample(0, 0, 0, 64), MemorySample(0, 1, 300, 96), MemorySample(0, 1, 310, 80)),
)
