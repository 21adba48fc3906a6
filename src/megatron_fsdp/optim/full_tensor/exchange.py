"""Send whole tensors between the ranks that hold shards of them and one owner each, in packed messages.

    every rank, its shards    -- to_owners, one all-to-all -->    the owner, the whole tensor
    every rank, its shards    <-- to_shards, one all-to-all --    the owner, a whole tensor

Of replicas (the outer axis of HSDP, all ranks where nothing is sharded) only the owner's sends, and all receive.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.agreement import Problem, ask
from megatron_fsdp.comm.groups import group_over
from megatron_fsdp.dtensor.shard_spec import ShardSpec, cut_up
from megatron_fsdp.errors import MegatronFSDPError, RankError, text_of
from megatron_fsdp.sharding.shards import Box, MeshUse

# ---- who computes what (pure) ----------------------------------------------------------------------------------------


def assign_owners(flops: Sequence[int], loads: list[int], holders: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Assign an owner rank to every matrix, greedily: the most expensive matrix to the least loaded rank.

    A rank that holds a matrix whole comes first, where no rank then has more than 1.05 of the mean, or than it would
    have otherwise: nothing has to be sent.

    `loads` is what each rank has to do already, to which the costs are added; `holders` has the ranks that hold each
    matrix whole, where they are known.

    Returns:
        The owner of each matrix; the same on every rank. Without loads at the begin, the busiest rank has at most 4/3
        of the least possible (R. Graham, "Bounds on multiprocessing timing anomalies", 1969), or 1.05 of the mean.
    """
    owners, after = _assigned(flops, loads)
    if any(holders):
        limit = max(*after, 1.05 * sum(after) / len(after))
        near, near_after = _assigned(flops, loads, holders, limit)
        if max(near_after) <= limit:
            owners, after = near, near_after
    loads[:] = after
    return tuple(owners)


def _assigned(
    flops: Sequence[int], loads: Sequence[int], holders: Sequence[Sequence[int]] = (), limit: float = 0.0
) -> tuple[list[int], list[int]]:
    """Return the owners, and the load of each rank; holders come first, and get no more than the limit."""
    owners, after, holders = [0] * len(flops), list(loads), holders or [()] * len(flops)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in sorted(range(len(flops)), key=lambda index: (not holders[index], -flops[index], index)):
        rank = min(holders[index], key=after.__getitem__, default=None)
        if rank is None or after[rank] + flops[index] > limit:
            while heap[0][0] != after[heap[0][1]]:  # has more to do by now
                heapq.heappop(heap)
            rank = heap[0][1]
        owners[index] = rank
        after[rank] += flops[index]
        heapq.heappush(heap, (after[rank], rank))
    return owners, after


@functools.cache
def _places(use: MeshUse) -> dict[int, list[int]]:
    """Return the places in the mesh that hold each shard."""
    found: dict[int, list[int]] = {}
    for place, coordinate in enumerate(itertools.product(*map(range, use.sizes))):
        found.setdefault(use.shard_at(coordinate), []).append(place)
    return found


def holders_of(spec: ShardSpec) -> Sequence[int]:
    """Return the places in the mesh that hold a full tensor, if all others hold no element of it."""
    description = spec.description
    shard = description.cut.whole_shard
    return () if shard is None or description.tensor_cut is not None else _places(description.use)[shard]


def replicas_of(spec: ShardSpec) -> int:
    """Return the number of replicas of a tensor on a mesh."""
    description = spec.description
    return math.prod(n for dim, n in enumerate(description.use.sizes) if dim not in description.spread_dims)


def balanced_owners(
    meshes: Sequence[DeviceMesh], costs: Sequence[int], holders: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Assign an owner rank of its mesh to every tensor, balancing the load of ranks over all meshes.

    `meshes` and `costs` are those of each tensor; `holders`, as of `assign_owners`, and the result are places in these
    meshes, the same on every rank of a mesh. The largest meshes come first, and what they leave to do counts in meshes
    of some of their ranks, which all know it.
    """
    owners, loads = [0] * len(meshes), list[dict[int, int]]()
    for mesh in sorted(dict.fromkeys(meshes), key=lambda mesh: -mesh.size()):
        members = [place for place, other in enumerate(meshes) if other == mesh]
        ranks = mesh.mesh.flatten().tolist()
        known = [load for load in loads if load.keys() >= set(ranks)]
        had = [sum(load[rank] for load in known) for rank in ranks]
        have, near = list(had), [holders[place] for place in members] if holders else ()
        for place, owner in zip(members, assign_owners([costs[place] for place in members], have, near), strict=True):
            owners[place] = owner
        loads.append({rank: now - before for rank, now, before in zip(ranks, have, had, strict=True)})
    return owners


def waves_of(owners: Sequence[int], nbytes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Split matrices into waves in which no owner has more than `limit` bytes, or a single matrix.

    `nbytes`: of each matrix, in the messages of its owner. Returns the indices of the matrices of each wave, rising.
    """
    waves: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}  # by owner: its last wave, and the bytes in there
    for index, (owner, size) in enumerate(zip(owners, nbytes, strict=True)):
        wave, held = filled.get(owner, (0, 0))
        if held and held + size > limit:
            wave, held = wave + 1, 0
        filled[owner] = wave, held + size
        while len(waves) <= wave:
            waves.append([])
        waves[wave].append(index)
    return tuple(map(tuple, waves))


# ---- packed messages -------------------------------------------------------------------------------------------------


class Ranks:
    """The ranks of a mesh in one process group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Use the mesh's group, or make one of all its ranks if it has several dimensions; then collective."""
        self.coordinates = tuple(itertools.product(*map(range, mesh.shape)))  # of each rank, in group order
        self.group = group_over(mesh, self)  # None for a single rank
        self.rank = 0 if self.group is None else dist.get_rank(self.group)  # this rank's place in the group


def agreed(told: Mapping[Ranks, Mapping[int, Any]], error: BaseException | None) -> dict[Ranks, dict[int, Any]]:
    """All-gather ranks' reports over all meshes before results are used; raise on all if a rank failed. Collective.

    Each report has a number. If a rank has an `error`, all raise the same RankError; unless all have the same error of
    this library, which each raises itself.
    """
    met = Met.of(error)
    reports = [(ranks.group, (met, dict(here))) for ranks, here in told.items()]
    found = ask(reports, lambda everyone: judge_met([each for each, _ in everyone]), error)
    return {
        ranks: {number: value for _, part in everyone for number, value in part.items()}
        for ranks, everyone in zip(told, found, strict=True)
    }


@dataclass(frozen=True)
class Met:
    """The error that a rank has met in a step."""

    text: str | None = None
    is_ours: bool = False

    @classmethod
    def of(cls, error: BaseException | None) -> Met:
        """Describe an error for the other ranks."""
        return cls() if error is None else cls(text_of(error), isinstance(error, MegatronFSDPError))


def judge_met(everyone: Sequence[Met]) -> Problem | None:
    """Return the problem of a group's errors, in rank order; None if all may go on, or raise the same error."""
    failed = [f"rank {rank}: {met.text}" for rank, met in enumerate(everyone) if met.text is not None]
    if not failed or (everyone[0].is_ours and set(everyone) == {everyone[0]}):
        return None
    return RankError, f"the optimizer's step failed ({'; '.join(failed)}); no weights were changed on any rank"


class Exchange:
    """Routes of some matrices between their shards on the ranks of a mesh and their owners.

    `specs` say how each matrix is cut, and `owners` are places in the group.
    """

    def __init__(self, specs: Sequence[ShardSpec], owners: Sequence[int], ranks: Ranks) -> None:
        self.specs, self.ranks, self._owners = specs, ranks, owners
        self.places = range(len(ranks.coordinates))
        self.of: list[list[int]] = [[] for _ in self.places]  # each owner's matrices
        for index, owner in enumerate(owners):
            self.of[owner].append(index)
        self._found: dict[tuple[int, int], tuple[Box, ...]] = {}

    def sends(self, index: int, place: int) -> bool:
        """Return True if a rank sends its shard to the owner: those that hold one copy of the matrix between them."""
        spread = self.specs[index].description.spread_dims
        own, other = self.ranks.coordinates[self._owners[index]], self.ranks.coordinates[place]
        return all(a == b for dim, (a, b) in enumerate(zip(own, other, strict=True)) if dim not in spread)

    def boxes(self, index: int, place: int) -> tuple[Box, ...]:
        """Return a rank's shard of a matrix, as boxes."""
        if (index, place) not in self._found:
            coordinate = self.ranks.coordinates[place]
            self._found[index, place] = self.specs[index].description.boxes_at(coordinate)
        return self._found[index, place]

    def numel(self, index: int, place: int) -> int:
        """Return the number of elements in a rank's shard of a matrix."""
        return sum(box.numel for box in self.boxes(index, place))

    @functools.cached_property
    def to_owners(self) -> tuple[list[list[int]], list[list[int]]]:
        """Elements of each matrix that this rank sends to, and receives from, each rank on the way to owners."""
        here, mine = self.ranks.rank, self.of[self.ranks.rank]
        sent = [[self.numel(index, here) for index in own if self.sends(index, here)] for own in self.of]
        came = [[self.numel(index, place) for index in mine if self.sends(index, place)] for place in self.places]
        return sent, came

    @functools.cached_property
    def to_shards(self) -> tuple[list[list[int]], list[list[int]]]:
        """The same on the way back."""
        here, mine = self.ranks.rank, self.of[self.ranks.rank]
        sent = [[self.numel(index, place) for index in mine] for place in self.places]
        return sent, [[self.numel(index, here) for index in own] for own in self.of]

    @property
    def here_numel(self) -> int:
        """Elements of this rank's shards of all matrices."""
        return sum(map(sum, self.to_shards[1]))

    @property
    def own_numel(self) -> int:
        """Elements that this rank, as an owner, sends back: at least as many as it receives."""
        return sum(map(sum, self.to_shards[0]))


class Messages:
    """An exchange's message to the owners, the one back, or both; no memory is allocated once a message is sent.

    So ranks can agree that all have room before the first of them sends, which leaves none waiting for another.

    `here` is memory of `here_numel` elements, for shards by owner, `own` of `own_numel`, for this rank's own matrices,
    cut up by rank; both are flat, in the dtype of the exchange.
    """

    def __init__(self, exchange: Exchange, here: Tensor, own: Tensor) -> None:
        self.exchange, self._here, self._own = exchange, here, own
        self._work: dist.Work | None = None
        self._parts: list[list[Tensor]] = []

    def pack_shards(self, shards: Sequence[Tensor]) -> None:
        """Pack this rank's shard of each matrix, to be sent by `to_owners`."""
        exchange, here = self.exchange, self.exchange.ranks.rank
        places = [index for own in exchange.of for index in own if exchange.sends(index, here)]
        _pack([shards[index].reshape(-1) for index in places], self._here)

    def to_owners(self) -> None:
        """Start to send shards."""
        self._send(self._here, self._own, *self.exchange.to_owners)

    def whole(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's own matrices, assembled from the received shards: index and full tensor."""
        exchange = self.exchange
        shards = [iter(parts) for parts in self._parts]
        for index in exchange.of[exchange.ranks.rank]:
            whole: Tensor | None = None
            for place in exchange.places:
                if not exchange.sends(index, place):
                    continue
                shard = next(shards[place])
                whole = shard.new_empty(exchange.specs[index].shape) if whole is None else whole
                for part, box in cut_up(shard, exchange.boxes(index, place)):
                    whole[box.indices].copy_(part)
            assert whole is not None, "somebody holds each matrix"
            yield index, whole

    def pack_results(self, results: Mapping[int, Tensor]) -> None:
        """Pack the results of this rank's own matrices by index, to be sent by `to_shards`."""
        exchange = self.exchange
        own = [(index, place) for place in exchange.places for index in exchange.of[exchange.ranks.rank]]
        boxes = [(index, box) for index, place in own for box in exchange.boxes(index, place)]
        _pack([results[index][box.indices].reshape(-1) for index, box in boxes], self._own)

    def to_shards(self) -> None:
        """Start to send every rank its shard of the results."""
        self._send(self._own, self._here, *self.exchange.to_shards)

    def shards(self) -> Iterator[tuple[int, Tensor]]:
        """Yield received shards: index, and this rank's shard as `spec.description.local_shape`."""
        for own, parts in zip(self.exchange.of, self._parts, strict=True):
            for index, part in zip(own, parts, strict=True):
                yield index, part.view(self.exchange.specs[index].description.local_shape)

    def wait(self, is_last: bool = False) -> None:
        """Wait for the message in flight; after the last one keep only received data."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if is_last:
            del self._here, self._own

    def _send(self, source: Tensor, target: Tensor, sent: list[list[int]], came: list[list[int]]) -> None:
        """Start an all-to-all of the parts that go to each rank and come from each, with these lengths."""
        to, of = list(map(sum, sent)), list(map(sum, came))
        source, target = source[: sum(to)], target[: sum(of)]
        if self.exchange.ranks.group is None:
            target.copy_(source)
        else:
            self._work = dist.all_to_all_single(
                target.view(torch.uint8),
                source.view(torch.uint8),
                [numel * target.itemsize for numel in of],
                [numel * source.itemsize for numel in to],
                group=self.exchange.ranks.group,
                async_op=True,
            )
        self._parts = [list(part.split(lengths)) for part, lengths in zip(target.split(of), came, strict=True)]


def _pack(parts: Sequence[Tensor], memory: Tensor) -> None:
    if parts:
        torch.cat(list(parts), out=memory[: sum(part.numel() for part in parts)])
