"""Collectives over one process group on flat buffers, with exact counts of the bytes sent.

Bytes are what one rank sends in a ring (or pairwise) algorithm: `(N - 1) / N` of the full buffer for an all-gather or
a reduce-scatter, twice that for an all-reduce (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

# A simulated rank (`plan/simulate.py`) is one process with fake tensors (shapes and dtypes without memory), whose
# collectives move nothing. The tensors by which ranks agree need values even there.

SIMULATED = "simulated_"
"""Prefix of the names of simulated back ends; the back end that they stand in for follows."""

real_values = unset_fake_temporarily
"""Context manager and decorator that leaves torch's FakeTensorMode: new tensors have values."""


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor is neither fake nor on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def address_of(tensor: Tensor) -> int:
    """Return the address of the first element; for a fake tensor, an id of its storage plus the offset."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def addresses_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the addresses of several tensors; faster than one by one if none is fake."""
    return tuple(map(address_of if FakeTensor in map(type, tensors) else Tensor.data_ptr, tensors))


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the name of a group's back end; for a simulated group, of the simulated one."""
    return dist.get_backend(group).removeprefix(SIMULATED)


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Return True if the collectives of a group are simulated: they move nothing."""
    name = dist.get_backend(group)
    return name == dist.Backend.FAKE or name.startswith(SIMULATED)


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor for communication: float8 as bytes, since gloo has no such dtype."""
    is_float8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if is_float8 else tensor


def broadcast(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, source: int = 0, async_op: bool = False
) -> dist.Work | None:
    """Broadcast a tensor from a rank of the group, in place; with `async_op`, return its work."""
    work: dist.Work | None = dist.broadcast(as_sent(tensor), group_src=source, group=group, async_op=async_op)
    return work


# torch 2.13 renames the flat-tensor collectives; the older names warn there and the newer do not exist in 2.11.
all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_BROADCASTING_RANKS = 4
"""gloo's all-gather receives into memory of its own, as large as the result, and copies that. Broadcasts of the shards
receive in place, in about half the CPU time on 2 ranks and two thirds on 4, but their number grows with the ranks."""


@dataclass
class Traffic:
    """Counters of the collectives and bytes that this rank has sent; take differences for one step."""

    gathers: int = 0
    reductions: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0

    def copy(self) -> Traffic:
        """Return a snapshot."""
        return replace(self)

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of both counts."""
        return Traffic(*map(operator.add, astuple(self), astuple(other)))

    def since(self, earlier: Traffic) -> Traffic:
        """Return the traffic since the snapshot `earlier`."""
        return Traffic(*map(operator.sub, astuple(self), astuple(earlier)))


@dataclass(frozen=True)
class Axis:
    """One data-parallel mesh axis as seen by this rank."""

    group: dist.ProcessGroup | None  # None stands for a single rank, which never communicates
    rank: int  # this rank's position, 0 <= rank < num_ranks
    num_ranks: int
    # counters, shared by everything that communicates along this axis on behalf of one model
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    gather_group: dist.ProcessGroup | None = None  # the same ranks again: gathers need not queue behind reductions
    sums_locally: bool = False  # reduce-scatter by an all-to-all and a local sum in float32 on any back end

    @property
    def exchanges_pairwise(self) -> bool:
        """True if a reduce-scatter is an all-to-all and a local sum.

        gloo's own reduce-scatter moves all-reduce bytes, and its sum of bf16 values rounds at every hop; an
        all-to-all moves the minimum and leaves the sum, in float32 and in rank order, to us. Other back ends do so
        where `sums_locally` asks for it.
        """
        if self.num_ranks == 1:
            return False
        return self.sums_locally or (self.group is not None and backend_of(self.group) == "gloo")

    # With `async_op` a collective returns a handle to wait on. Without, it is over when the method returns, or on CUDA
    # queued on the current stream.

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, async_op: bool = True) -> dist.Work | None:
        """All-gather `shard` (shard_numel,) of every rank into `full` (num_ranks * shard_numel,).

        `shard` may be this rank's own slice of `full`.
        """
        if self.num_ranks == 1:
            if address_of(full) != address_of(shard):
                full.copy_(shard)
            return None
        self.traffic.gathers += 1
        self.traffic.gather_bytes += full.nbytes - shard.nbytes
        group = self.gather_group or self.group
        if self._broadcasts_shards and full.device.type == "cpu":
            return _gather_by_broadcasts(as_sent(full), as_sent(shard), self.rank, group, async_op)
        work: dist.Work | None = all_gather_flat(as_sent(full), as_sent(shard), group=group, async_op=async_op)
        return work

    @cached_property
    def _broadcasts_shards(self) -> bool:
        """True if an all-gather is a broadcast by each rank: on few ranks, over gloo."""
        return self.num_ranks <= _BROADCASTING_RANKS and self.group is not None and backend_of(self.group) == "gloo"

    def all_reduce(self, full: torch.Tensor, average: bool = False, async_op: bool = True) -> dist.Work | None:
        """Sum (or average) `full` over the ranks, in place."""
        if self.num_ranks == 1:
            return None
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += 2 * (full.nbytes - full.nbytes // self.num_ranks)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return dist.all_reduce(full, op=op, group=self.group, async_op=async_op)

    def gather_rows(self, received: torch.Tensor, full: torch.Tensor, async_op: bool = True) -> dist.Work | None:
        """All-gather `full` of every rank into `received` (num_ranks * numel,), for a sum of the rows in rank order."""
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += received.nbytes - full.nbytes
        work: dist.Work | None = all_gather_flat(received, full, group=self.group, async_op=async_op)
        return work

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, average: bool = False, async_op: bool = True
    ) -> dist.Work | None:
        """Reduce-scatter `full` into `shard` with the native collective."""
        self._count_reduce_scatter(full)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work: dist.Work | None = _reduce_scatter_flat(shard, full, op=op, group=self.group, async_op=async_op)
        return work

    def exchange(self, received: torch.Tensor, full: torch.Tensor, async_op: bool = True) -> dist.Work | None:
        """Run the all-to-all of a reduce-scatter: send part r of `full` to rank r; receive row r from rank r.

        Between two ranks `received` may be the other's row alone; then no rank copies its own.
        """
        self._count_reduce_scatter(full)
        sizes = None
        if (numel := received.numel()) < full.numel():
            sizes = [0, numel] if self.rank == 0 else [numel, 0]
            full = full.narrow(0, (1 - self.rank) * numel, numel)
        return dist.all_to_all_single(received, full, sizes, sizes, group=self.group, async_op=async_op)

    def _count_reduce_scatter(self, full: torch.Tensor) -> None:
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += full.nbytes - full.nbytes // self.num_ranks


class _Broadcasts:
    """The work handles of an all-gather that is made of broadcasts."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all have ended."""
        for work in self._works:
            work.wait()

    def get_future(self) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
        """Return a future of the end of all."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _gather_by_broadcasts(
    full: torch.Tensor, shard: torch.Tensor, rank: int, group: dist.ProcessGroup | None, async_op: bool
) -> Any:
    """All-gather `shard` of every rank into `full`; return the work handles, which are waited for as one."""
    parts = full.view(-1, shard.numel()).unbind() if shard.numel() else ()
    if parts and address_of(parts[rank]) != address_of(shard):
        parts[rank].copy_(shard.reshape(-1))
    works = [broadcast(part, group, source, async_op) for source, part in enumerate(parts)]
    return _Broadcasts([work for work in works if work is not None]) if async_op else None


# ---- sums of what an exchange brings, in rank order ------------------------------------------------------------------

_ADDED_AT_ONCE = 1 << 16
"""Elements per block of a sum, so that partial sums stay in the cache."""


def sum_received(received: Tensor, num_ranks: int) -> Tensor:
    """Sum the rows that `Axis.exchange` received, in rank order; overwrites `received`.

    (num_ranks * shard_numel,) become (shard_numel,), in float32 for 16-bit inputs; else in the same dtype, a view of
    the first row.
    """
    return sum_rows(received.view(num_ranks, -1).unbind())


def sum_rows(rows: Sequence[Tensor]) -> Tensor:
    """Sum rows in their order, as `sum_received` does; overwrites the first.

    Row after row is added in place, which takes less than half the time of a reduction over the rows and no memory.
    """
    total = rows[0].to(sum_dtype(rows[0].dtype))
    for row in rows[1:]:
        total.add_(row)
    return total


def add_up_into(rows: Sequence[Tensor], out: Tensor, factor: float) -> None:
    """Write the sum of two or more rows, times a factor, into `out`, which shares no memory with them.

    The result equals `put_scaled` of the whole sum, bit for bit, and takes no memory where `out` has its dtype.
    """
    is_in_place = sum_dtype(rows[0].dtype) == out.dtype
    for start in range(0, out.numel(), _ADDED_AT_ONCE):
        parts = [row[start : start + _ADDED_AT_ONCE] for row in rows]
        target = out[start : start + _ADDED_AT_ONCE]
        if not is_in_place:
            put_scaled(_sum(parts), factor, target)
            continue
        _sum(parts, target)
        if factor != 1.0:
            target.mul_(factor)


def put_scaled(values: Tensor, factor: float, out: Tensor) -> None:
    """Write values times a factor into a tensor of any floating dtype, rounding once.

    `torch.mul(values, factor, out=out)` alone rounds to the dtype of `values` first, where `out` has a wider one.
    """
    dtype = torch.promote_types(values.dtype, out.dtype)
    if values.dtype == dtype:
        torch.mul(values, factor, out=out)
    elif out.dtype == dtype:
        out.copy_(values).mul_(factor)
    else:
        torch.mul(values.to(dtype), factor, out=out)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float32, or the given one if it is wider or not floating."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _sum(rows: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum two or more rows; into `out`, which has the dtype of the sum, or a new tensor."""
    dtype = sum_dtype(rows[0].dtype)
    if rows[0].dtype == dtype:
        total = torch.add(rows[0], rows[1], out=out)
        rest = rows[2:]
    else:
        total = rows[0].to(dtype) if out is None else out.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        total.add_(row)
    return total
