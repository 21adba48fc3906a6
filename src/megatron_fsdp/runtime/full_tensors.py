"""Full tensors one after another, put together from the shards in buckets of bounded size.

A group whose flat buffer fits into a bucket is one all-gather. A larger one is cut between tensors, and each bucket is
filled by one broadcast from every rank that owns a part of it: a rank's part of a range is a slice of the bucket, so
every element is sent once and nothing is copied. With B buckets and N ranks a group takes at most B + N - 1 broadcasts.
Tensors that are cut over more than the sharding axis (by the outer axis or by tensor parallelism) come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.runtime.agreement import agree_over
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.observer import Phase
from megatron_fsdp.runtime.schedule import ROOT
from megatron_fsdp.unit.param_group import ParameterGroup

DEFAULT_BUCKET_BYTES = 2**28

_Named = tuple[tuple[str, ...], torch.Tensor]


@dataclass(frozen=True)
class _Entry:
    """One tensor to put together: its label, its place, and this rank's piece of it."""

    label: tuple[str, ...]
    group: ParameterGroup
    index: int
    piece: torch.Tensor


@dataclass(frozen=True)
class _Bucket:
    """Entries of one group and dtype, and the range of the group's flat buffer that holds them all."""

    entries: tuple[_Entry, ...]
    start: int
    stop: int


def iter_parameters(engine: Engine, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Main weights, whole, in their main dtype, by canonical name."""
    entries = _entries(engine, lambda group, index: group.weights.main.piece(index))
    for (name,), full in _watched(engine, _stream(entries, bucket_bytes)):
        yield name, full


def iter_gradients(engine: Engine, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What trainable parameters show as their gradient, whole, by canonical name; those that show none are left out."""
    found = {id(group): group.grads() for group in engine.groups()}
    entries = _entries(engine, lambda group, index: _local(found[id(group)][index]))
    _agree(engine, entries)
    for (name,), full in _watched(engine, _stream(entries, bucket_bytes)):
        yield name, full


def iter_optimizer_state(
    engine: Engine, optimizer: torch.optim.Optimizer, bucket_bytes: int
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """State tensors that are sharded as their parameter, whole, with the parameter's name and the key."""
    states: dict[int, dict[Hashable, Any]] = {id(param): state for param, state in optimizer.state.items()}
    keys = sorted({str(key) for state in states.values() for key in state})
    entries = []
    for key in keys:
        entries += _entries(engine, partial(_state_piece, states, key), key)
    _agree(engine, entries)
    for (name, key), full in _watched(engine, _stream(entries, bucket_bytes)):
        yield name, key, full


def _state_piece(
    states: dict[int, dict[Hashable, Any]], key: str, group: ParameterGroup, index: int
) -> torch.Tensor | None:
    param = group.sharded[index]
    value = states.get(id(param), {}).get(key)
    return _local(value) if isinstance(value, DTensor) and value.shape == param.shape else None


def _local(value: torch.Tensor | None) -> torch.Tensor | None:
    return value.to_local() if isinstance(value, DTensor) else value


def _entries(
    engine: Engine, piece_of: Callable[[ParameterGroup, int], torch.Tensor | None], *more: str
) -> list[_Entry]:
    """All tensors that have a piece, group after group, in the order of the flat buffers."""
    entries = []
    for group in engine.groups():
        layout = group.plan.layout
        for index in sorted(range(len(layout.shapes)), key=layout.tensor_range):
            piece = piece_of(group, index)
            if piece is not None:
                entries.append(_Entry((group.names[index], *more), group, index, piece.detach()))
    return entries


def _agree(engine: Engine, entries: Sequence[_Entry]) -> None:
    """What a rank lacks, the others would wait for."""
    with engine.observers.during(Phase.AGREE, ROOT):
        agree_over(
            engine.reaching_all,
            None,
            [f"{' '.join(entry.label)} in {entry.piece.dtype}" for entry in entries],
        )


def _watched(engine: Engine, stream: Iterator[_Named]) -> Iterator[_Named]:
    """The same, with observers told while the next one is put together, and not while the caller looks at it."""
    while True:
        with engine.observers.during(Phase.WHOLE, ROOT):
            found = next(stream, None)
        if found is None:
            return
        yield found
        del found


def _stream(entries: Iterable[_Entry], bucket_bytes: int) -> Iterator[_Named]:
    """Every tensor as a view of its bucket.

    A caller holds a tensor of the last bucket while the next one is made, so each takes half of what is allowed.
    """
    for bucket in _cut(entries, bucket_bytes // 2):
        if _is_cut_further(bucket.entries[0]):
            for entry in bucket.entries:
                yield entry.label, entry.group.describe_piece(entry.index, entry.piece).full_tensor()
            continue
        full = _fill(bucket)
        for entry in bucket.entries:
            layout = entry.group.plan.layout
            offset = layout.offsets[entry.index] - bucket.start
            flat = full[offset : offset + layout.tensor_numel(entry.index)]
            yield entry.label, flat.view(layout.shapes[entry.index])
            del flat
        del full


def _cut(entries: Iterable[_Entry], limit_bytes: int) -> Iterator[_Bucket]:
    """Gather entries of one group and dtype into buckets that are no larger than the limit, or one tensor."""
    taken: list[_Entry] = []
    for entry in entries:
        if taken and not _fits(taken, entry, limit_bytes):
            yield _bucket(taken, limit_bytes)
            taken = []
        taken.append(entry)
    if taken:
        yield _bucket(taken, limit_bytes)


def _fits(taken: Sequence[_Entry], entry: _Entry, limit_bytes: int) -> bool:
    first = taken[0]
    if entry.group is not first.group or entry.piece.dtype != first.piece.dtype or entry.label[1:] != first.label[1:]:
        return False
    if _is_cut_further(entry) is not _is_cut_further(first):
        return False
    if _whole_fits(entry, limit_bytes):
        return True
    layout = entry.group.plan.layout
    numel = layout.tensor_range(entry.index)[1] - layout.tensor_range(first.index)[0]
    return numel * entry.piece.dtype.itemsize <= limit_bytes


def _whole_fits(entry: _Entry, limit_bytes: int) -> bool:
    return entry.group.plan.layout.numel * entry.piece.dtype.itemsize <= limit_bytes


def _bucket(taken: Sequence[_Entry], limit_bytes: int) -> _Bucket:
    layout = taken[0].group.plan.layout
    if _whole_fits(taken[0], limit_bytes):
        return _Bucket(tuple(taken), 0, layout.numel)
    return _Bucket(tuple(taken), layout.tensor_range(taken[0].index)[0], layout.tensor_range(taken[-1].index)[1])


def _fill(bucket: _Bucket) -> torch.Tensor:
    """The full range (stop - start,): this rank's pieces, and those of the others."""
    group = bucket.entries[0].group
    layout, axis = group.plan.layout, group.plan.axis
    is_sharded = not group.weights.main.is_whole
    dtype = bucket.entries[0].piece.dtype
    full = torch.empty(bucket.stop - bucket.start, dtype=dtype, device=group.plan.device)
    for entry in bucket.entries:
        first = layout.local_range(entry.index, axis.rank)[0] if is_sharded else 0
        offset = layout.offsets[entry.index] - bucket.start + first
        full[offset : offset + entry.piece.numel()].copy_(entry.piece.reshape(-1))
    if is_sharded:
        _gather_range(group, full, bucket.start, bucket.stop)
    return full


def _is_cut_further(entry: _Entry) -> bool:
    """Whether more than the sharding axis cuts the tensor."""
    plan = entry.group.plan
    part = plan.parts[entry.index]
    return plan.num_shards > plan.axis.num_ranks or (part is not None and part.is_cut)


def _gather_range(group: ParameterGroup, full: torch.Tensor, start: int, stop: int) -> None:
    """Give every rank the elements [start, stop) of the group's flat buffer; each holds its own part in `full`."""
    layout, axis = group.plan.layout, group.plan.axis
    if stop - start == layout.numel:
        own_start, own_stop = layout.shard_range(axis.rank)
        work = axis.all_gather(full, full[own_start:own_stop])
        if work is not None:
            work.wait()
        return
    works = []
    for rank in range(axis.num_ranks):
        low, high = layout.shard_range(rank)
        part = full[max(low, start) - start : max(min(high, stop) - start, 0)]
        if part.numel():
            works.append(dist.broadcast(part, group_src=rank, group=axis.group, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Refuse sizes that mean nothing.

    Raises:
        ConfigurationError: It is not a positive number.
    """
    if bucket_bytes < 1:
        raise ConfigurationError(
            f"bucket_bytes={bucket_bytes} leaves no room; give the bytes that may be used, 1 or more"
        )
