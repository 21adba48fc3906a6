"""Which decoder layers each stage of a pipeline has; pure."""

from __future__ import annotations

import itertools

from megatron_fsdp.automodel.pipeline_parallel.schedules import ScheduleKind
from megatron_fsdp.errors import ParallelSizeError


def split_layers(num_layers: int, num_stages: int, layers_per_stage: int | None = None) -> tuple[tuple[int, int], ...]:
    """Cut layers into stages of lengths that differ by one at most; earlier stages take the remainder.

    Args:
        num_layers: Of the model.
        num_stages: Of the whole pipeline.
        layers_per_stage: The most that a stage may have; None: any number.

    Returns:
        (first layer, one past the last layer) of each stage.

    Raises:
        ParallelSizeError: A stage would be empty, or longer than allowed.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise ParallelSizeError(
            f"{num_layers} layers cannot be cut into {num_stages} stages, since each needs a layer; use fewer pipeline "
            "ranks, or fewer stages per rank"
        )
    length, remainder = divmod(num_layers, num_stages)
    longest = length + bool(remainder)
    if layers_per_stage is not None and longest > layers_per_stage:
        raise ParallelSizeError(
            f"{num_layers} layers in {num_stages} stages make stages of {longest}, more than "
            f"layers_per_stage={layers_per_stage}; use more stages"
        )
    starts = [stage * length + min(stage, remainder) for stage in range(num_stages + 1)]
    return tuple(itertools.pairwise(starts))


def count_stages(kind: ScheduleKind, num_layers: int, num_ranks: int, layers_per_stage: int | None = None) -> int:
    """How many stages a pipeline has.

    Without `layers_per_stage` each rank has one, or two under a schedule of several; with it there are
    ceil(num_layers / layers_per_stage).

    Args:
        kind: Of schedule.
        num_layers: Of the model.
        num_ranks: Of the pipeline.
        layers_per_stage: The most layers of a stage, or None.

    Raises:
        ParallelSizeError: The stages do not divide over the ranks as the schedule needs it.
    """
    if layers_per_stage is None:
        return num_ranks * (2 if kind.several_stages else 1)
    stages = -(-num_layers // layers_per_stage)
    made = f"{num_layers} layers with layers_per_stage={layers_per_stage} make {stages} stages"
    if stages % num_ranks:
        raise ParallelSizeError(
            f"{made}, no multiple of {num_ranks} pipeline ranks; change layers_per_stage or leave it None"
        )
    if kind.several_stages != (stages > num_ranks):
        wanted = "at least two stages" if kind.several_stages else "one stage"
        raise ParallelSizeError(
            f"{made}, {stages // num_ranks} on each of {num_ranks} ranks, but {kind.name} runs {wanted} per rank; "
            "change layers_per_stage or the schedule"
        )
    return stages
