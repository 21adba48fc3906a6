"""Send whole tensors between the ranks that hold shards of them and one owner each, in packed messages.

    every rank, its shards    -- to_owners, one all-to-all -->    the owner, the whole tensor
    every rank, its shards    <-- to_shards, one all-to-all --    the owner, a whole tensor

Of replicas (the outer axis of HSDP, all ranks where nothing is sharded) only the owner's sends, and all receive.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.agreement import Problem, ask
from megatron_fsdp.comm.groups import group_over
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.errors import RankError
from megatron_fsdp.sharding.shards import Box

# ---- who computes what (pure) ----------------------------------------------------------------------------------------


def assign_owners(flops: Sequence[int], loads: list[int]) -> tuple[int, ...]:
    """Give every matrix an owner, the costliest first, each to the rank that has least to do.

    Args:
        flops: Cost of each matrix.
        loads: What each rank has to do already, to which the costs are added.

    Returns:
        The owner of each matrix; the same on every rank. Without loads at the begin, the busiest rank has at most 4/3
        of the least possible (R. Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(flops)
    for index in sorted(range(len(flops)), key=lambda index: (-flops[index], index)):
        load, rank = heap[0]
        owners[index], loads[rank] = rank, load + flops[index]
        heapq.heapreplace(heap, (loads[rank], rank))
    return tuple(owners)


def balanced_owners(meshes: Sequence[DeviceMesh], costs: Sequence[int]) -> list[int]:
    """Give every tensor an owner among the ranks of its mesh, so that ranks have about the same to do over all meshes.

    Args:
        meshes: Of each tensor.
        costs: Of each tensor.

    Returns:
        Places in the meshes; the same on every rank of a mesh. The largest meshes come first, and what they leave to do
        counts in meshes of some of their ranks, which all know it.
    """
    owners, loads = [0] * len(meshes), list[dict[int, int]]()
    for mesh in sorted(dict.fromkeys(meshes), key=lambda mesh: -mesh.size()):
        members = [place for place, other in enumerate(meshes) if other == mesh]
        ranks = mesh.mesh.flatten().tolist()
        known = [load for load in loads if load.keys() >= set(ranks)]
        had = [sum(load[rank] for load in known) for rank in ranks]
        have = list(had)
        for place, owner in zip(members, assign_owners([costs[place] for place in members], have), strict=True):
            owners[place] = owner
        loads.append({rank: now - before for rank, now, before in zip(ranks, have, had, strict=True)})
    return owners


def waves_of(owners: Sequence[int], nbytes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Split matrices into waves in which no owner receives more than `limit` bytes, or a single matrix.

    Args:
        owners: Of each matrix.
        nbytes: Of each operand.
        limit: In bytes.

    Returns:
        Indices of the matrices of each wave, rising.
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
    """The ranks of a mesh in one process group.

    Attributes:
        coordinates: Of each rank on the mesh, in the order of the group.
        rank: This rank's place in the group.
        group: None for a single rank.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Use the mesh's group, or make one of all its ranks where it has several dimensions; then collective."""
        self.coordinates = tuple(itertools.product(*map(range, mesh.mesh.shape)))
        self.group = group_over(mesh, self)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)


def agreed(told: Mapping[Ranks, Mapping[int, Any]], error: Exception | None) -> dict[Ranks, dict[int, Any]]:
    """Gather what ranks tell each other before a step's results are taken, over all meshes; collective.

    Args:
        told: By mesh; what each rank tells, by number.
        error: Why the step has failed here.

    Raises:
        RankError: On every rank, with the same message, where a rank has failed.
    """
    met = None if error is None else f"{type(error).__name__}: {error}"
    found = ask([(ranks.group, (met, dict(here))) for ranks, here in told.items()], _judge_step, error)
    return {
        ranks: {number: value for _, part in everyone for number, value in part.items()}
        for ranks, everyone in zip(told, found, strict=True)
    }


def _judge_step(reports: Sequence[tuple[str | None, Any]]) -> Problem | None:
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text is not None]
    text = f"the optimizer's step failed ({'; '.join(failed)}); no weights were changed on any rank"
    return (RankError, text) if failed else None


class Exchange:
    """The messages of some matrices between the ranks that hold shards of them and their owners.

    Args:
        frames: How each matrix is cut.
        owners: Of each matrix, as places in the group.
        ranks: The ranks of their mesh.
    """

    def __init__(self, frames: Sequence[ShardFrame], owners: Sequence[int], ranks: Ranks) -> None:
        self._frames, self._owners, self._ranks = frames, owners, ranks
        self._places = range(len(ranks.coordinates))
        self._of: list[list[int]] = [[] for _ in self._places]
        for index, owner in enumerate(owners):
            self._of[owner].append(index)
        self._found: dict[tuple[int, int], tuple[Box, ...]] = {}

    @property
    def own(self) -> list[int]:
        """This rank's own matrices, by index."""
        return self._of[self._ranks.rank]

    def to_owners(self, shards: Sequence[Tensor]) -> _Sent:
        """Start to send the operands' shards.

        Args:
            shards: This rank's shard of each matrix; one dtype.
        """
        here = self._ranks.rank
        sent = [
            [shards[index].reshape(-1) for index in self._of[place] if self._sends(index, here)]
            for place in self._places
        ]
        expected = [
            [self._numel(index, place) for index in self._of[here] if self._sends(index, place)]
            for place in self._places
        ]
        return _Sent(self._ranks.group, sent, expected, shards[0])

    def whole(self, received: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's own matrices, put together from what `to_owners` has brought: index and whole tensor."""
        here = self._ranks.rank
        pieces = [iter(parts) for parts in received]
        for index in self._of[here]:
            whole: Tensor | None = None
            for place in self._places:
                if not self._sends(index, place):
                    continue
                piece = next(pieces[place])
                whole = piece.new_empty(self._frames[index].shape) if whole is None else whole
                for part, box in _cut_up(piece, self._boxes(index, place)):
                    whole[box.indices].copy_(part)
            assert whole is not None, "somebody holds each matrix"
            yield index, whole

    def to_shards(self, results: Mapping[int, Tensor], like: Tensor) -> _Sent:
        """Start to send the results of this rank's own matrices to all ranks, each its shard.

        Args:
            results: By index.
            like: A tensor of their dtype and device.
        """
        here = self._ranks.rank
        sent = [
            [results[index][box.indices].reshape(-1) for index in self._of[here] for box in self._boxes(index, place)]
            for place in self._places
        ]
        expected = [[self._numel(index, here) for index in self._of[place]] for place in self._places]
        return _Sent(self._ranks.group, sent, expected, like)

    def shards(self, received: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield what `to_shards` has brought: index, and this rank's shard as `frame.description.local_shape`."""
        for place in self._places:
            for index, piece in zip(self._of[place], received[place], strict=True):
                yield index, piece.view(self._frames[index].description.local_shape)

    def _sends(self, index: int, place: int) -> bool:
        """Return whether a rank sends its shard to the owner: those that hold one copy of the matrix between them."""
        spread = self._frames[index].description.spread_dims
        own, other = self._ranks.coordinates[self._owners[index]], self._ranks.coordinates[place]
        return all(a == b for dim, (a, b) in enumerate(zip(own, other, strict=True)) if dim not in spread)

    def _boxes(self, index: int, place: int) -> tuple[Box, ...]:
        if (index, place) not in self._found:
            coordinate = self._ranks.coordinates[place]
            self._found[index, place] = self._frames[index].description.boxes_at(coordinate)
        return self._found[index, place]

    def _numel(self, index: int, place: int) -> int:
        return sum(box.numel for box in self._boxes(index, place))


class _Sent:
    """A packed all-to-all under way."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sent: Sequence[Sequence[Tensor]],
        expected: Sequence[Sequence[int]],
        like: Tensor,
    ) -> None:
        self._expected, self._work = expected, None
        packed = torch.cat([like.new_empty(0), *(part for parts in sent for part in parts)])
        if group is None:
            self._received = packed
            return
        self._received = like.new_empty(sum(map(sum, expected)))
        self._kept = packed  # until it is sent
        self._work = dist.all_to_all_single(
            self._received.view(torch.uint8),
            packed.view(torch.uint8),
            [sum(lengths) * like.itemsize for lengths in expected],
            [sum(part.numel() for part in parts) * like.itemsize for parts in sent],
            group=group,
            async_op=True,
        )

    def wait(self) -> list[list[Tensor]]:
        """Return the pieces that came from each rank, in the order of the matrices."""
        if self._work is not None:
            self._work.wait()
            del self._kept
        found, start = [], 0
        for lengths in self._expected:
            total = sum(lengths)
            found.append(list(self._received[start : start + total].split(list(lengths))) if lengths else [])
            start += total
        return found


def _cut_up(piece: Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Tensor, Box]]:
    start = 0
    for box in boxes:
        yield piece[start : start + box.numel].view(box.lengths), box
        start += box.numel
