"""The description of a wrapped model: plain data, for people (`str`) and for programs (`to_dict`). Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_RANKS_SHOWN = 8
_NAMES_SHOWN = 4


def lines_of(told: Description) -> list[str]:
    """Format a description as text: runs of equal units in one line, options only where they were given.

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
    return f"{axis.size} ranks, this is {axis.position}, {axis.backend}, global ranks {_some(axis.ranks)}{second}"


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
    """Return what consecutive units that are described together have in common."""
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


def _optimizer_lines(told: Description) -> Iterator[str]:
    if not told.optimizers:
        yield "no optimizer is connected"
    for optimizer in told.optimizers:
        how = "steps on local tensors" if optimizer.steps_locally else "steps on DTensors"
        yield f"{optimizer.class_name}: {optimizer.parameters} parameters in {optimizer.param_groups} groups, {how}"


def _option_lines(told: Description) -> Iterator[str]:
    if told.options:
        yield ""
        yield "options that are not at their defaults"
    for name, value in told.options.items():
        yield f"  {name}={value}"


def in_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


@dataclass(frozen=True)
class AxisDescription:
    """One mesh axis as seen from this rank.

    Attributes:
        name: Name of its mesh dimension.
        role: "shard", "outer", "tensor parallel", "expert shard" or "expert outer".
        size: Ranks on it.
        position: This rank's, from 0.
        ranks: Global ranks of its group, in order; just this one where it never communicates.
        backend: Back end of its group; None for a single rank.
        has_gather_group: Whether gathers run over a second group of the same ranks.
    """

    name: str
    role: str
    size: int
    position: int
    ranks: tuple[int, ...]
    backend: str | None
    has_gather_group: bool = False


@dataclass(frozen=True)
class GroupDescription:
    """Parameters of one unit that share their buffers.

    Attributes:
        parameters: Number of parameters.
        numel: Their elements, on this tensor-parallel rank.
        padding_numel: Further elements of the buffer.
        shard_numel: Elements of main weights, and of optimizer state, on this rank, padding included.
        granularity: What shard edges may not cut, the finest wish first.
        is_trainable: Whether they take gradients.
        is_expert: Whether they belong to experts.
        tensor_parallel: How many of them tensor parallelism has cut before.
        storage: Dtype of compute weights while they are sharded.
        compute: Dtype of forward and backward.
        gather: Dtype in which weights travel; None where they do not.
        reduce: Dtype in which gradients travel; None where they do not.
        accumulate: Dtype of main gradients; None where frozen.
        main: Dtype of main weights.
        optimizer_state: Dtypes of the optimizer's state, as far as there is any.
        compute_weight: Placements of compute weights, outermost axis first.
        main_gradient: Placements of main gradients after a sync; empty where frozen.
        main_weight: Placements of main weights.
        compute_bytes: Bytes of compute weights while they are sharded.
        main_bytes: Bytes of main weights that have memory of their own.
        gradient_bytes: Bytes of main gradients.
    """

    parameters: int
    numel: int
    padding_numel: int
    shard_numel: int
    granularity: tuple[str, ...]
    is_trainable: bool
    is_expert: bool
    tensor_parallel: int
    storage: str
    compute: str
    gather: str | None
    reduce: str | None
    accumulate: str | None
    main: str
    optimizer_state: tuple[str, ...]
    compute_weight: tuple[str, ...]
    main_gradient: tuple[str, ...]
    main_weight: tuple[str, ...]
    compute_bytes: int
    main_bytes: int
    gradient_bytes: int

    @property
    def padding_fraction(self) -> float:
        """Padding divided by the elements of the parameters."""
        return self.padding_numel / max(1, self.numel)


@dataclass(frozen=True)
class UnitDescription:
    """Parameters that are gathered and reduced together.

    Attributes:
        index: 0 is the root.
        label: Its name, "(root)" for the root.
        class_name: Class of its module, or what else it is.
        numel: Elements of its parameters.
        groups: Its parameter groups.
    """

    index: int
    label: str
    class_name: str
    numel: int
    groups: tuple[GroupDescription, ...]


@dataclass(frozen=True)
class MemoryDescription:
    """Memory of this rank, in bytes, and how it is borrowed.

    Attributes:
        allocator: Allocator of gathered weights.
        slots: How many units besides the root are gathered at a time, where weights are sharded; else 0.
        slot_bytes: Bytes of each slot.
        buckets: How many units besides the root fill a bucket or have one in reduction at a time.
        bucket_bytes: Bytes of each bucket.
        forward_prefetch: Units gathered ahead in forward.
        backward_prefetch: Units gathered ahead in backward.
        persistent_bytes: Weights and gradients between steps.
        optimizer_bytes: State of connected optimizers.
        gathered_bytes: What gathered weights take now.
        transient_peak_bytes: The most that gathered weights, buckets and scratch have taken so far.
    """

    allocator: str
    slots: int
    slot_bytes: int
    buckets: int
    bucket_bytes: int
    forward_prefetch: int
    backward_prefetch: int
    persistent_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    transient_peak_bytes: int


@dataclass(frozen=True)
class OptimizerDescription:
    """A connected optimizer.

    Attributes:
        class_name: Its class.
        param_groups: Number of its groups.
        parameters: Number of its parameters that are the model's.
        steps_locally: Whether it takes the fast step on plain local tensors.
    """

    class_name: str
    param_groups: int
    parameters: int
    steps_locally: bool


@dataclass(frozen=True)
class Description:
    """A wrapped model as this rank holds it.

    Attributes:
        wrapper: Class of the wrapper.
        model: Class of the model.
        rank: Global rank.
        world_size: All ranks of the job.
        device: Where the buffers live.
        strategy: On the sharding axis.
        outer_strategy: On the outer axis; None where there is none.
        axes: Data-parallel axes of dense parameters, outermost first, then of experts, then tensor parallel.
        own_groups: Whether the engine communicates over process groups of its own.
        unit_source: How the units were found.
        units: The root first.
        tied: (further name, first name) of tied parameters.
        frozen_numel: Elements of parameters that are not trained.
        unused: Trainable parameters that no rank had a gradient for; None: not known before a backward.
        memory: Bytes, slots and buckets.
        optimizers: Those that are connected.
        options: What was chosen and is not the default, by name of the argument or configuration field.
        notices: What was adjusted or derived, in words.
    """

    wrapper: str
    model: str
    rank: int
    world_size: int
    device: str
    strategy: str
    outer_strategy: str | None
    axes: tuple[AxisDescription, ...]
    own_groups: bool
    unit_source: str
    units: tuple[UnitDescription, ...]
    tied: tuple[tuple[str, str], ...]
    frozen_numel: int
    unused: tuple[str, ...] | None
    memory: MemoryDescription
    optimizers: tuple[OptimizerDescription, ...]
    options: dict[str, str]
    notices: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters, on this tensor-parallel rank."""
        return sum(unit.numel for unit in self.units)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        plain = _plain(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return plain

    def __str__(self) -> str:
        """Format for people."""
        return "\n".join(lines_of(self))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
