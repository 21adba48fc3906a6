"""From raw logs to timelines, with logs written by hand."""

from typing import Any

from megatron_fsdp.comm.streams import HostClock, Moment
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.trace.timeline import (
    BEGIN,
    BROKEN,
    DONE,
    END,
    TOLD,
    Collective,
    Counts,
    Raw,
    StepLog,
    Timeline,
    Times,
    build_timeline,
)
from tests.trace.synthetic import EMPTY, span

BASE = 5_000  # where the host's clock stood when the recording started
AXES = ("outer", "inner")
NOTHING: Counts = (0, 0, 0, 0)


def build(*records: Raw, end: int = 1000) -> Timeline:
    """One step, whose marks count from 0."""
    return build_timeline([_step(0, 0, records)], _times(end), AXES, EMPTY)


def _times(end: int) -> Times:
    return Times(HostClock(), BASE + end, end)


def _step(index: int, start: int, records: tuple[Raw, ...]) -> StepLog:
    return StepLog(index, BASE + start, [(kind, BASE + mark, *rest) for kind, mark, *rest in records])


def _life(number: int, first: int, before: Any, after: Any, stream: str = "gather") -> list[Raw]:
    """Launch, wait and arrival, ten nanoseconds apart; the wait begins after 100."""
    at = {"LAUNCHES": 0, "LAUNCHED": 10, "WAITS": 100, "ARRIVED": 110, "FINISHED": 120, "WAITED": 130}
    sent = {"LAUNCHES": before, "LAUNCHED": after}
    return [(TOLD, first + late, number, Moment[name], stream, sent.get(name)) for name, late in at.items()]


def test_a_collective_from_its_moments() -> None:
    before, after = (NOTHING, (2, 0, 50, 0)), (NOTHING, (3, 0, 80, 0))
    launches, launched, *rest = _life(7, 200, before, after)
    found = build(
        (BEGIN, 190, Phase.GATHER, 2, None),
        launches,
        launched,
        (END, 215, Phase.GATHER, 2),
        (DONE, 250, 7),
        (BEGIN, 290, Phase.WAIT, 2, None),
        *rest,
        (END, 340, Phase.WAIT, 2),
    )
    assert found.collectives == (Collective(7, 0, 2, "gather", "inner", "gather", 30, 200, 210, 250, 310, 0, 300, 330),)
    assert found.spans == (
        span("gather", 190, 215, unit=2, num_bytes=30),
        span("wait", 290, 340, unit=2),
        span("blocked", 300, 310, depth=1, unit=2),
    )


def test_on_streams_what_arrives_before_the_wait_blocks_nobody() -> None:
    early = [
        (TOLD, 100, 0, Moment.LAUNCHES, "reduce", (NOTHING,)),
        (TOLD, 110, 0, Moment.LAUNCHED, "reduce", ((0, 1, 0, 8),)),
        (TOLD, 150, 0, Moment.ARRIVED, "reduce", None),
        (TOLD, 160, 0, Moment.FINISHED, "reduce", None),
        (TOLD, 300, 0, Moment.WAITS, "reduce", None),
        (TOLD, 302, 0, Moment.WAITED, "reduce", None),
    ]
    found = build_timeline([_step(0, 0, tuple(early))], _times(400), ("dp",), EMPTY)
    assert found.collectives[0].in_flight == (100, 150)
    assert found.collectives[0].blocked == (300, 300)


def test_an_exception_leaves_out_what_it_ended() -> None:
    found = build(
        (BEGIN, 10, Phase.FORWARD, 0, None),
        (BEGIN, 20, Phase.FORWARD, 1, None),
        (BEGIN, 30, Phase.WAIT, 1, None),  # raises
        (END, 40, Phase.FORWARD, 1),
        (END, 50, Phase.FORWARD, 0),
        (BEGIN, 52, Phase.RESHARD, 0, None),  # in nothing
        (END, 54, Phase.RESHARD, 0),
        (BEGIN, 60, Phase.BACKWARD, 0, None),  # raises
        (BROKEN, 70),
        (BEGIN, 80, Phase.FORWARD, 0, None),
        (END, 90, Phase.FORWARD, 0),
        (END, 95, Phase.BACKWARD, 0),  # nobody knows of it any more
    )
    assert found.spans == (
        span("forward", 10, 50),
        span("forward", 20, 40, depth=1, unit=1),
        span("release", 52, 54),
        span("forward", 80, 90),
    )
