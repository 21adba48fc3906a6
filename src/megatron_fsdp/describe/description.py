"""The description of a wrapped model: plain data, for people (`str`) and for programs (`to_dict`). Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_fsdp.describe.text import WIDTH, folded, in_bytes

_SHOWN = 8


@dataclass(frozen=True)
class AxisDescription:
    """One mesh axis as seen from this rank."""

    name: str  # name of its mesh dimension
    role: str  # "shard", "outer", "tensor parallel", "expert shard" or "expert outer"
    size: int  # ranks on it
    position: int  # this rank's, from 0
    ranks: tuple[int, ...]  # global ranks of its group, in order; just this one where it never communicates
    backend: str | None  # back end of its group; None for a single rank
    has_gather_group: bool = False  # whether gathers run over a second group of the same ranks


@dataclass(frozen=True)
class GroupDescription:
    """Parameters of one unit that share their buffers."""

    parameters: int  # number of parameters
    numel: int  # their elements, on this tensor-parallel rank
    padding_numel: int  # further elements of the buffer
    shard_numel: int  # elements of main weights, and of optimizer state, on this rank, padding included
    is_trainable: bool  # whether they take gradients
    is_expert: bool  # whether they belong to experts
    tensor_parallel: int  # how many of them tensor parallelism has cut before
    storage: str  # dtype, or weight format, of compute weights while they are sharded
    compute: str  # dtype of forward and backward
    gather: str | None  # dtype, or weight format, in which weights travel; None where they do not
    reduce: str | None  # dtype in which gradients travel; None where they do not
    accumulate: str | None  # dtype of main gradients; None where frozen
    main: str  # dtype of main weights
    optimizer_state: tuple[str, ...]  # dtypes of the optimizer's state, as far as there is any
    compute_weight: tuple[str, ...]  # placements of compute weights, outermost axis first
    main_gradient: tuple[str, ...]  # placements of main gradients after a sync; empty where frozen
    main_weight: tuple[str, ...]  # placements of main weights
    compute_bytes: int  # bytes of compute weights while they are sharded
    main_bytes: int  # bytes of main weights that have memory of their own
    gradient_bytes: int  # bytes of main gradients
    weight_format: str | None = None  # weight format by which weights are rounded
    saved_bytes: int | None = None  # bytes that it saves of each gather of all shards; None without one

    @property
    def padding_fraction(self) -> float:
        """Padding divided by the elements of the parameters."""
        return self.padding_numel / max(1, self.numel)


@dataclass(frozen=True)
class UnitDescription:
    """Parameters that are gathered and reduced together."""

    index: int  # 0 is the root
    label: str  # its name, "(root)" for the root
    class_name: str  # class of its module, or another description
    numel: int  # elements of its parameters
    groups: tuple[GroupDescription, ...]  # its parameter groups


@dataclass(frozen=True)
class MemoryDescription:
    """Memory of this rank, in bytes: states, and blocks that are borrowed."""

    allocator: str  # allocator of gathered weights
    slots: int  # how many units besides the root are gathered at a time, where weights are sharded; else 0
    slot_bytes: int  # bytes of a slot for the largest unit
    buckets: int  # how many units besides the root fill a bucket or have one in reduction at a time
    bucket_bytes: int  # bytes of a bucket for the largest unit
    forward_prefetch: int  # units gathered ahead in forward
    backward_prefetch: int  # units gathered ahead in backward
    persistent_bytes: int  # weights and gradients between steps
    optimizer_bytes: int  # state of connected optimizers
    gathered_bytes: int  # of gathered weights now
    transient_peak_bytes: int  # the most that gathered weights, buckets and scratch have taken so far
    offload: tuple[str, ...] = ()  # offloaded state, and its bytes, which are not counted above
    pool_bytes: int | None = None  # communication memory that was taken at wrap time; None: it is taken as needed
    pool: tuple[str, ...] = ()  # its blocks, each with its offset in bytes


@dataclass(frozen=True)
class OptimizerDescription:
    """An optimizer that is connected to the model."""

    class_name: str  # its class
    param_groups: int  # number of its groups
    parameters: int  # number of its parameters that are the model's
    # the operands of its step: "on local tensors", "on shards and whole matrices (Muon)", "on whole tensors, one owner
    # each", "on whole tensors, the same on every rank" or "on DTensors"
    step: str
    parts: tuple[str, ...]  # the kinds of its parameters, the most first: "norms 65", "embeddings 1", "head 1"


@dataclass(frozen=True)
class Description:
    """A wrapped model as this rank holds it."""

    wrapper: str  # class of the wrapper
    model: str  # class of the model
    rank: int  # global rank
    world_size: int  # all ranks of the job
    device: str  # where the buffers live
    strategy: str  # on the sharding axis
    outer_strategy: str | None  # on the outer axis; None where there is none
    # data-parallel axes of dense parameters, outermost first, then of experts, then tensor parallel
    axes: tuple[AxisDescription, ...]
    own_groups: bool  # whether the engine communicates over process groups of its own
    unit_source: str  # how the units were found
    units: tuple[UnitDescription, ...]  # the root first
    tied: tuple[tuple[str, str], ...]  # (further name, first name) of tied parameters
    frozen_numel: int  # elements of parameters that are not trained
    # trainable parameters that no rank had a gradient for; None: not known before a backward
    unused: tuple[str, ...] | None
    memory: MemoryDescription  # bytes, slots and buckets
    optimizers: tuple[OptimizerDescription, ...]  # those that are connected
    options: dict[str, str]  # settings that are not the default, by name of the argument or configuration field
    notes: tuple[str, ...]  # adjustments and derived settings

    @property
    def numel(self) -> int:
        """The elements of all parameters on this tensor-parallel rank."""
        return sum(unit.numel for unit in self.units)

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON-compatible values."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def __str__(self) -> str:
        """Format for people: fields with a value, and equal consecutive units as one."""
        return self.text(WIDTH)

    def text(self, width: int) -> str:
        """Format for people, with lines of at most `width` columns."""
        return "\n".join(folded(line, width) for line in _lines(self, width))


def _lines(description: Description, width: int) -> Iterator[str]:
    yield from _wrapped(description, "", width, numel=description.numel)
    for axis in description.axes:
        yield from _wrapped(axis, "axis ", width)
    for _, run in groupby(description.units, key=_pattern):
        units = list(run)
        names = units[0].label if len(units) == 1 else f"{units[0].label} ... {units[-1].label} ({len(units)} units)"
        yield f"unit {names}: {units[0].class_name}, {units[0].numel:,} parameters{' each' * (len(units) > 1)}"
        for group in units[0].groups:
            yield from _wrapped(group, "  group ", width, padding_fraction=f"{group.padding_fraction:.4f}")
    yield from _wrapped(description.memory, "memory ", width)
    for optimizer in description.optimizers:
        yield from _wrapped(optimizer, "optimizer ", width)
    yield from (f"option {name}={value}" for name, value in description.options.items())
    yield from (f"{further} is tied to {first}" for further, first in description.tied)
    yield from (f"note: {note}" for note in description.notes)


_OWN_LINES = ("axes", "units", "memory", "optimizers", "options", "tied", "notes")


def _wrapped(part: Any, title: str, width: int, **more: object) -> list[str]:
    """Format the fields that have a value as wrapped lines."""
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)} | more
    shown = [
        (name, value)
        for name, value in values.items()
        if name not in _OWN_LINES and value is not None and value is not False and value != ()
    ]
    words = [name if value is True else f"{name} {_word(name, value)}" for name, value in shown]
    unbreakable = ", ".join(word.replace(" ", "\0") for word in words)
    found = textwrap.wrap(title + unbreakable, width, subsequent_indent=" " * len(title), break_long_words=False)
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
    """Format evenly spaced ranks as a range."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step or 1)):
        return f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step != 1 else "")
    return " ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def _pattern(unit: UnitDescription) -> tuple[object, ...]:
    """Return the properties by which consecutive units are grouped."""
    return (unit.index == 0, re.sub(r"\d+", "#", unit.label), unit.class_name, unit.numel, unit.groups)
