"""A description as lines of text: runs of equal units in one line, options only where they were given. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fsdp.description import (
        AxisDescription,
        Description,
        GroupDescription,
        MemoryDescription,
        UnitDescription,
    )

_RANKS_SHOWN = 8
_NAMES_SHOWN = 4


def lines_of(told: Description) -> list[str]:
    """A description for people.

    Args:
        told: What to describe.

    Returns:
        Lines without line ends.
    """
    outer = f", {told.outer_strategy} outside" if told.outer_strategy is not None else ""
    lines = [
        f"{told.wrapper} of {told.model}: {told.numel:,} parameters, strategy {told.strategy}{outer}",
        f"rank {told.rank} of {told.world_size}, on {told.device}",
        *_axis_lines(told),
        "",
        *_unit_lines(told),
        "",
        *_memory_lines(told.memory),
        *_optimizer_lines(told),
        "",
        *_option_lines(told),
    ]
    return [*lines, *(f"note: {notice}" for notice in told.notices)]


def _axis_lines(told: Description) -> Iterator[str]:
    for axis in told.axes:
        yield f"  {axis.name} ({axis.role}): {_ranks(axis)}"
    if told.own_groups:
        yield "  collectives run over process groups of the engine's own"


def _ranks(axis: AxisDescription) -> str:
    if axis.backend is None:
        return "1 rank, never communicates"
    second = ", gathers over a second group" if axis.has_gather_group else ""
    shared = " and shared memory" if axis.shares_memory else ""
    return (
        f"{axis.size} ranks, this is {axis.position}, {axis.backend}{shared}, global ranks {_some(axis.ranks)}{second}"
    )


def _some(ranks: Sequence[int]) -> str:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step or 1)):
        return f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step != 1 else "")
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return shown + (f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else "")


def _unit_lines(told: Description) -> Iterator[str]:
    yield f"{len(told.units) - 1} units besides the root ({told.unit_source})"
    for _, run in groupby(told.units, key=_pattern):
        yield from _run_lines(list(run))
    for further, first in told.tied:
        yield f"  {further} is tied to {first}"
    if told.frozen_numel:
        yield f"  {told.frozen_numel:,} parameters are frozen"
    if told.unused:
        more = f" and {len(told.unused) - _NAMES_SHOWN} more" if len(told.unused) > _NAMES_SHOWN else ""
        yield f"  no rank used {', '.join(told.unused[:_NAMES_SHOWN])}{more}"


def _pattern(unit: UnitDescription) -> tuple[object, ...]:
    """Units with the same pattern that follow one another are described together."""
    return (unit.index == 0, re.sub(r"\d+", "#", unit.label), unit.class_name, unit.numel, unit.groups)


def _run_lines(run: Sequence[UnitDescription]) -> Iterator[str]:
    first, each = run[0], " each" if len(run) > 1 else ""
    names = first.label if len(run) == 1 else f"{first.label} ... {run[-1].label}"
    count = f"{len(run)} x " if len(run) > 1 else ""
    yield f"  {names} ({count}{first.class_name}): {first.numel:,} parameters{each}"
    for group in first.groups:
        yield from (f"    {line}" for line in _group_lines(group))


def _group_lines(group: GroupDescription) -> Iterator[str]:
    kinds = [
        "" if group.is_trainable else "frozen",
        "experts" if group.is_expert else "",
        f"{group.tensor_parallel} cut by tensor parallelism" if group.tensor_parallel else "",
    ]
    kind = "".join(f", {kind}" for kind in kinds if kind)
    padding = f"{group.padding_numel:,} ({100 * group.padding_fraction:.2f} %)" if group.padding_numel else "none"
    yield (
        f"{group.parameters} tensors{kind}; padding {padding}; {group.shard_numel:,} elements here, "
        f"cut at {' or '.join(group.granularity)}"
    )
    yield (
        f"weights: compute {group.compute} [{', '.join(group.compute_weight)}], gather {group.gather or 'none'}, "
        f"main {group.main} [{', '.join(group.main_weight)}]"
    )
    if group.is_trainable:
        state = f"; optimizer state {', '.join(group.optimizer_state)}" if group.optimizer_state else ""
        yield (
            f"gradients: reduce {group.reduce or 'none'}, accumulate {group.accumulate} "
            f"[{', '.join(group.main_gradient)}]{state}"
        )


def _memory_lines(memory: MemoryDescription) -> Iterator[str]:
    held = f"{in_bytes(memory.persistent_bytes)} of weights and gradients at rest"
    yield f"memory: {held}, {in_bytes(memory.optimizer_bytes)} of optimizer state"
    if memory.slots:
        yield (
            f"  gathered weights: at most {memory.slots} units besides the root, {in_bytes(memory.slot_bytes)} each "
            f"({memory.allocator}); {memory.forward_prefetch} ahead in forward, {memory.backward_prefetch} in backward"
        )
    yield f"  gradients on their way: {memory.buckets} buckets of {in_bytes(memory.bucket_bytes)}"
    yield f"  so far at most {in_bytes(memory.transient_peak_bytes)} of these, {in_bytes(memory.gathered_bytes)} now"
    if memory.shared_bytes:
        yield f"  shared memory: {in_bytes(memory.shared_bytes)}"


def _optimizer_lines(told: Description) -> Iterator[str]:
    if not told.optimizers:
        yield "no optimizer is connected"
    for optimizer in told.optimizers:
        how = "steps on local tensors" if optimizer.steps_locally else "steps on DTensors"
        yield f"{optimizer.class_name}: {optimizer.parameters} parameters in {optimizer.param_groups} groups, {how}"


def _option_lines(told: Description) -> Iterator[str]:
    given = [option for option in told.options if not option.is_default]
    yield f"options given ({len(told.options) - len(given)} others are at their defaults)"
    for option in given:
        mark = "" if option.has_effect else "no effect: "
        yield f"  {option.name}={option.value}: {mark}{option.effect}"


def in_bytes(count: float) -> str:
    """A number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
