"""Storage reader and planner for `torch.distributed.checkpoint.load` that run no code from the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.objects import load_object


class SafeReader(FileSystemReader):
    """Reads a checked folder; each chunk once, however many pieces of it are wanted, so at most one is held.

    Args:
        folder: Opened, and so checked.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        super().__init__(folder.path)
        self._folder = folder
        self._chunk_of = {
            (key, chunk.box.offsets): which
            for key, entry in folder.tensors.items()
            for which, chunk in enumerate(entry.chunks)
            if chunk.box.numel or not entry.numel
        }

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
        wanted: dict[tuple[str, int, str], tuple[int, list[ReadItem]]] = {}
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                place, which = self._folder.objects[key].span, 0
            else:
                which = self._chunk_of[key, tuple(item.storage_index.offset or ())]
                place = self._folder.tensors[key].chunks[which].span
            wanted.setdefault((place.file, place.offset, key), (which, []))[1].append(item)
        with self._folder.kept_open():
            for _, (which, items) in sorted(wanted.items()):
                self._read_one(which, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_one(self, which: int, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        key = items[0].storage_index.fqn
        if items[0].type is LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, io.BytesIO(self._folder.read_bytes(key)))
            return
        chunk = self._folder.read_chunk(key, which)  # checks shape and dtype
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(_narrowed(chunk, item.storage_offsets, item.lengths))
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
