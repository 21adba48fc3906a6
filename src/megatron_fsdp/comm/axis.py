"""Collectives over one process group, in terms of flat buffers, with exact counts of what they move.

Bytes are what one rank sends in a ring (or pairwise) algorithm: `(N - 1) / N` of the full buffer for a gather or a
reduce-scatter, twice that for an all-reduce (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

# What ranks agree on has values, also in a simulated rank, whose tensors are fake: shapes and dtypes without memory.
#
# A simulated rank (`plan/simulate.py`) is one process that takes part in collectives which move nothing. Its groups
# have back ends of these names, which say what they stand in for.

SIMULATED = "simulated_"
"""What the names of simulated back ends begin with."""

real_values = unset_fake_temporarily
"""A context, or decorator, in which new tensors have values, whatever goes on outside; torch's own."""


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor can be read: it is neither fake nor on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def address_of(tensor: Tensor) -> int:
    """Where its first element lies; for a fake tensor a number that no other place has while its storage lives."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def addresses_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The same of several; a fraction of the time where none is fake."""
    return tuple(map(address_of if FakeTensor in map(type, tensors) else Tensor.data_ptr, tensors))


def backend_of(group: dist.ProcessGroup) -> str:
    """The name of the back end of a group, or of the one that it stands in for."""
    return dist.get_backend(group).removeprefix(SIMULATED)


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether the collectives of a group move nothing."""
    name = dist.get_backend(group)
    return name == dist.Backend.FAKE or name.startswith(SIMULATED)


# torch 2.13 renames the flat-tensor collectives; the older names warn there and the newer do not exist in 2.11.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Traffic:
    """What this rank sent since the counters were made; take differences for one step."""

    gathers: int = 0
    reductions: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0

    def copy(self) -> Traffic:
        """A snapshot that later traffic does not change."""
        return Traffic(self.gathers, self.reductions, self.gather_bytes, self.reduce_bytes)

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.gathers + other.gathers,
            self.reductions + other.reductions,
            self.gather_bytes + other.gather_bytes,
            self.reduce_bytes + other.reduce_bytes,
        )

    def since(self, earlier: Traffic) -> Traffic:
        """What was sent after `earlier` was taken."""
        return Traffic(
            self.gathers - earlier.gathers,
            self.reductions - earlier.reductions,
            self.gather_bytes - earlier.gather_bytes,
            self.reduce_bytes - earlier.reduce_bytes,
        )


@dataclass(frozen=True)
class Axis:
    """One data-parallel mesh axis as seen by this rank.

    Attributes:
        group: The process group; None stands for a single rank, which never communicates.
        rank: This rank's position, 0 <= rank < num_ranks.
        num_ranks: Ranks on the axis.
        traffic: Counters, shared by everything that communicates along this axis on behalf of one model.
        gather_group: A second group of the same ranks for gathers, which then need not queue behind reductions.
        sums_locally: Reduce-scatter by an all-to-all and a local sum in float32 on any back end.
    """

    group: dist.ProcessGroup | None
    rank: int
    num_ranks: int
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    gather_group: dist.ProcessGroup | None = None
    sums_locally: bool = False

    @property
    def exchanges_pairwise(self) -> bool:
        """Whether reductions are built from an all-to-all and a local sum.

        gloo's own reduce-scatter moves all-reduce bytes, and its sum of bf16 values rounds at every hop; an
        all-to-all moves the minimum and leaves the sum, in float32 and in rank order, to us. Other back ends do so
        where `sums_locally` asks for it.
        """
        return self.group is not None and (self.sums_locally or backend_of(self.group) == "gloo")

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> dist.Work | None:
        """Start gathering `shard` (shard_numel,) of every rank into `full` (num_ranks * shard_numel,).

        `shard` may be this rank's own slice of `full`.
        """
        if self.num_ranks == 1:
            if address_of(full) != address_of(shard):
                full.copy_(shard)
            return None
        self.traffic.gathers += 1
        self.traffic.gather_bytes += full.nbytes - shard.nbytes
        work: dist.Work = _all_gather_flat(full, shard, group=self.gather_group or self.group, async_op=True)
        return work

    def all_reduce(self, full: torch.Tensor, average: bool = False) -> dist.Work | None:
        """Start summing (or averaging) `full` over the ranks, in place."""
        if self.num_ranks == 1:
            return None
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += 2 * (full.nbytes - full.nbytes // self.num_ranks)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return dist.all_reduce(full, op=op, group=self.group, async_op=True)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, average: bool = False) -> dist.Work | None:
        """Start reducing `full` over the ranks; this rank's part lands in `shard` (native collective)."""
        self._count_reduce_scatter(full)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work: dist.Work = _reduce_scatter_flat(shard, full, op=op, group=self.group, async_op=True)
        return work

    def exchange(self, received: torch.Tensor, full: torch.Tensor) -> dist.Work | None:
        """Start the pairwise half of a reduce-scatter: part r of `full` goes to rank r; what r sent is row r."""
        self._count_reduce_scatter(full)
        return dist.all_to_all_single(received, full, group=self.group, async_op=True)

    def _count_reduce_scatter(self, full: torch.Tensor) -> None:
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += full.nbytes - full.nbytes // self.num_ranks
