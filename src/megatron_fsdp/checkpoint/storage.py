"""Storage reader and planner for `torch.distributed.checkpoint.load` that run no code from the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_fsdp.checkpoint.entries import Span
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.objects import load_object, load_tensor


class SafeReader(FileSystemReader):
    """Reads a checked folder; each chunk once, however many pieces of it are wanted, so at most one is held.

    Args:
        folder: Opened, and so checked.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        super().__init__(folder.path)
        self._folder = folder

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What the folder has read and checked already."""
        found = self._folder.metadata
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan wants, file after file in the order of bytes.

        Raises:
            CheckpointError: Bytes are damaged or ask for code; names key and file.
        """
        wanted: dict[tuple[str, int], tuple[_StorageInfo, list[ReadItem]]] = {}
        for item in plan.items:
            info: _StorageInfo = self.storage_data[item.storage_index]
            wanted.setdefault((info.relative_path, info.offset), (info, []))[1].append(item)
        with self._folder.kept_open():
            for place in sorted(wanted):
                self._read_chunk(*wanted[place], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, info: _StorageInfo, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        where = f"{items[0].storage_index.fqn} in {self._folder.path}/{info.relative_path}"
        span = Span(info.relative_path, info.offset, info.length)
        raw = self._folder.read_span(span, tuple(info.transform_descriptors or ()), where)
        if items[0].type is LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, io.BytesIO(raw))
            return
        chunk = load_tensor(io.BytesIO(raw), where)
        for item in items:
            piece = _narrowed(chunk, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner, reading objects as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object where it belongs.

        Raises:
            CheckpointError: It is damaged or asks for code.
        """
        key = read_item.dest_index.fqn
        found = load_object(value, key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found


def _narrowed(chunk: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """A box of a chunk, with an error that `copy_` would hide by broadcasting."""
    for dim, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
        chunk = chunk.narrow(dim, first, length)
    return chunk
