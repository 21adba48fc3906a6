"""The description of a wrapped model: plain data, for people (`str`) and for programs (`to_dict`). Pure."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_WIDTH = 118
_SHOWN = 8


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
        step: What its step works on: "on local tensors", "on shards and whole matrices (Muon)", "on whole tensors, one
            owner each" or "on DTensors".
    """

    class_name: str
    param_groups: int
    parameters: int
    step: str


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
        """Format for people: fields that say something, and runs of equal units together."""
        return "\n".join(_lines(self))


def _lines(told: Description) -> Iterator[str]:
    yield from _wrapped(told, "", numel=told.numel)
    for axis in told.axes:
        yield from _wrapped(axis, "axis ")
    for _, run in groupby(told.units, key=_pattern):
        units = list(run)
        names = units[0].label if len(units) == 1 else f"{units[0].label} ... {units[-1].label} ({len(units)} units)"
        yield f"unit {names}: {units[0].class_name}, {units[0].numel:,} parameters{' each' * (len(units) > 1)}"
        for group in units[0].groups:
            yield from _wrapped(group, "  group ", padding_fraction=f"{group.padding_fraction:.4f}")
    yield from _wrapped(told.memory, "memory ")
    for optimizer in told.optimizers:
        yield from _wrapped(optimizer, "optimizer ")
    yield from (f"option {name}={value}" for name, value in told.options.items())
    yield from (f"{further} is tied to {first}" for further, first in told.tied)
    yield from (f"note: {notice}" for notice in told.notices)


_OWN_LINES = ("axes", "units", "memory", "optimizers", "options", "tied", "notices")


def _wrapped(part: Any, title: str, **more: object) -> list[str]:
    """List the names and values of the fields that say something, as wrapped lines."""
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)} | more
    shown = [
        (name, value)
        for name, value in values.items()
        if name not in _OWN_LINES and value is not None and value is not False and value != ()
    ]
    words = [name if value is True else f"{name} {_word(name, value)}" for name, value in shown]
    unbreakable = ", ".join(word.replace(" ", "\0") for word in words)
    found = textwrap.wrap(title + unbreakable, _WIDTH, subsequent_indent=" " * len(title), break_long_words=False)
    return [line.replace("\0", " ") for line in found]


def _word(name: str, value: Any) -> str:
    if name == "ranks":
        return _ranks(value)
    if name.endswith("_bytes"):
        return in_bytes(value)
    if isinstance(value, tuple):
        return "/".join(value[:_SHOWN]) + f" and {len(value) - _SHOWN} more" * (len(value) > _SHOWN)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks that are equally far apart by their ends."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step or 1)):
        return f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step != 1 else "")
    return " ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def _pattern(unit: UnitDescription) -> tuple[object, ...]:
    """Return what consecutive units that are described together have in common."""
    return (unit.index == 0, re.sub(r"\d+", "#", unit.label), unit.class_name, unit.numel, unit.groups)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
