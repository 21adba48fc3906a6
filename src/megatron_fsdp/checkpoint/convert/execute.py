"""Carry out moves: read one box, write it, forget it. Each rank does its share; DCP writes the metadata."""

from __future__ import annotations

import hashlib
import heapq
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_fsdp.checkpoint.checksum import checksum_box
from megatron_fsdp.checkpoint.convert.entries import Move, Value
from megatron_fsdp.checkpoint.ranks import world_size_of
from megatron_fsdp.checkpoint.save_alone import save_alone
from megatron_fsdp.checkpoint.sealing import _SEAL, Seal, SealingWriter
from megatron_fsdp.checkpoint.settle import failures_in_words
from megatron_fsdp.errors import CheckpointError

ReadMove = Callable[[Move], Tensor]
"""Reads the box of a move, in the move's shape, contiguous."""

Progress = Callable[[int, int], None]
"""(bytes written by this rank, bytes that it will have written)"""


def share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal items to ranks so that their bytes balance: the largest first, each to who has least.

    Returns:
        For each rank the indices of its items, in order.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + sizes[index], rank))
    return [sorted(share) for share in shares]


def write_moves(
    folder: Path,
    moves: Sequence[Move],
    values: Sequence[Value],
    read: ReadMove,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's moves and values, and with those of the other ranks a DCP checkpoint. Collective.

    Args:
        folder: To write to; the same on every rank.
        moves: This rank's; no other rank has them.
        values: This rank's; no other rank has them.
        read: Reads a move.
        progress: Called after each move.
        group: The ranks.

    Raises:
        CheckpointError: Reading or writing failed on some rank; the same on every rank.
    """
    writer = _StreamingWriter(folder, sum(move.nbytes for move in moves), progress)
    planner = _MovePlanner(moves, values, read)
    try:
        if world_size_of(group) == 1:
            save_alone({}, storage_writer=writer, planner=planner)
        else:
            save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"writing {folder} failed ({failures_in_words(error)})") from error


class _MovePlanner(DefaultSavePlanner):
    """Offers moves to DCP as tensors that it does not have yet."""

    def __init__(self, moves: Sequence[Move], values: Sequence[Value], read: ReadMove) -> None:
        super().__init__()
        self.seal = Seal()
        self._saved: dict[int, tuple[bytes, str]] = {}
        self._moves = {move.target: move for move in moves}
        self._values = {value.target: value for value in values}
        self._read = read

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002  # torch's signature
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self.mappings = {target: thing.path for target, thing in (self._moves | self._values).items()}

    def create_local_plan(self) -> SavePlan:
        items = [_tensor_item(m.target, m.shape, TensorProperties(dtype=m.dtype)) for m in self._moves.values()]
        for target, value in self._values.items():
            if isinstance(value.value, Tensor):
                made = TensorProperties.create_from_tensor(value.value)
                items.append(_tensor_item(target, tuple(value.value.shape), made))
            else:
                items.append(WriteItem(MetadataIndex(target), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        target = write_item.index.fqn
        data = self._read(self._moves[target]) if target in self._moves else self._values[target].value
        if isinstance(data, Tensor):
            self.seal.tensors[target] = checksum_box(data, (0,) * data.ndim, data.shape)
            return data
        raw, self.seal.objects[target] = self._serialised(data)
        return io.BytesIO(raw)

    def _serialised(self, value: object) -> tuple[bytes, str]:
        """Bytes and their hash. Parameters of a group share its values: each is serialised once."""
        if id(value) not in self._saved:  # ids stay valid: the plan holds the values
            raw = saved_bytes(value)
            self._saved[id(value)] = raw, hashlib.sha256(raw).hexdigest()
        return self._saved[id(value)]


def saved_bytes(value: object) -> bytes:
    """What `torch.save` makes of an object."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _tensor_item(target: str, shape: tuple[int, ...], properties: TensorProperties) -> WriteItem:
    size, origin = torch.Size(shape), torch.Size([0] * len(shape))
    data = TensorWriteData(ChunkStorageMetadata(origin, size), properties, size)
    return WriteItem(MetadataIndex(target, origin), WriteItemType.TENSOR, tensor_data=data)


class _StreamingWriter(SealingWriter):
    """DCP's files and our manifest, one item at a time: torch's own writer keeps every tensor until a file is whole."""

    def __init__(self, folder: Path, total_bytes: int, progress: Progress | None) -> None:
        super().__init__(folder, overwrite=False)
        self._total_bytes = total_bytes
        self._progress = progress

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if it has anything to write, and hand over its checksums."""
        assert isinstance(planner, _MovePlanner), "made together by write_moves"
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                results = self._write_all(stream, name, plan, planner)
                stream.flush()
                os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(_SEAL, 0, planner.seal)])
        return future

    def _write_all(self, stream: Any, name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results, done = [], 0
        for item in plan.items:
            start = stream.tell()
            data = planner.resolve_data(item)
            if isinstance(data, Tensor):
                torch.save(_compact(data), stream)
                done += data.nbytes
            else:
                stream.write(data.getbuffer())
            del data
            length = stream.tell() - start
            results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            if self._progress is not None:
                self._progress(min(done, self._total_bytes), self._total_bytes)
        return results


def _compact(tensor: Tensor) -> Tensor:
    """With a storage of its own size: `torch.save` writes the whole storage."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
