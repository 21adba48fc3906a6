"""Which schedules of torch.distributed.pipelining are offered, and what numbers of microbatches they take; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule.

    Attributes:
        name: As torch spells it.
        several_stages: A rank may have more than one stage.
        fills_pipeline: It needs at least as many microbatches as stages.
        rounds: It runs microbatches in equal rounds of at least as many as there are ranks.
    """

    name: str
    several_stages: bool = False
    fills_pipeline: bool = False
    rounds: bool = False

    def torch_class(self) -> Any:
        """The class of torch."""
        from torch.distributed.pipelining.schedules import get_schedule_class

        return get_schedule_class(self.name)


_KINDS = (
    ScheduleKind("1F1B", fills_pipeline=True),
    ScheduleKind("GPipe"),
    ScheduleKind("Interleaved1F1B", several_stages=True, rounds=True),
    ScheduleKind("LoopedBFS", several_stages=True),
)


def schedule_named(name: str) -> ScheduleKind:
    """A schedule by its name in any case.

    Torch has more, which are not offered: the V-shaped ones cannot evaluate, and those that split backward (zero
    bubble) leave parameters without gradients, and say nothing, where FSDP2 has released weights after forward.

    Raises:
        ConfigurationError: There is none of this name.
    """
    for kind in _KINDS:
        if str(name).lower() == kind.name.lower():
            return kind
    allowed = ", ".join(kind.name.lower() for kind in _KINDS)
    raise ConfigurationError(f"pp_schedule is {name!r} but has to be one of {allowed}")


def count_microbatches(kind: ScheduleKind, rows: int, microbatch_size: int, num_ranks: int, num_stages: int) -> int:
    """How many microbatches a batch makes.

    Args:
        kind: Of schedule.
        rows: Of the batch.
        microbatch_size: Rows of a microbatch.
        num_ranks: Of the pipeline.
        num_stages: Of the pipeline.

    Raises:
        ConfigurationError: The rows do not divide, or the schedule cannot run that number of microbatches.
    """
    count, rest = divmod(rows, microbatch_size)
    if rest or not count:
        raise ConfigurationError(
            f"a batch of {rows} rows does not divide into microbatches of pp_microbatch_size={microbatch_size}; "
            "give a multiple of it, or change pp_microbatch_size"
        )
    made = f"{rows} rows in microbatches of {microbatch_size} make {count} microbatches"
    if kind.fills_pipeline and count < num_stages:
        raise ConfigurationError(
            f"{made}, but {kind.name} needs at least one for each of the {num_stages} stages; give more rows, lower "
            "pp_microbatch_size, or use gpipe"
        )
    num_rounds = max(1, count // num_ranks)
    if kind.rounds and count % num_rounds:
        raise ConfigurationError(
            f"{made}, but {kind.name} on {num_ranks} ranks runs them in {num_rounds} equal rounds; give a multiple of "
            f"{num_ranks} microbatches"
        )
    return count
