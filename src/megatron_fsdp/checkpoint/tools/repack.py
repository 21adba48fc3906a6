"""Writes checkpoint folders from entries that are read on demand: one chunk is in memory at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.save import SealingPlanner, SealingWriter, save_alone
from megatron_fsdp.comm.agreement import in_short
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

KeyPath = tuple[str | int, ...]
"""Where an entry is in the nested state dict: names in dicts and indices in lists (torch's `planner_data`)."""


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write.

    Attributes:
        key: Its name.
        shape: Global.
        dtype: To be written.
        boxes: Chunks; together the whole tensor, each element once.
        read: Gives the values of one of the boxes, in that dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[Box]
    read: Callable[[Box], torch.Tensor]


@dataclass(frozen=True)
class ObjectSource:
    """An object to write.

    Attributes:
        key: Its name.
        read: Gives the bytes of one `torch.save`.
    """

    key: str
    read: Callable[[], bytes]


Source = TensorSource | ObjectSource


def write_folder(folder: Path, sources: Iterable[Source], paths: Mapping[str, KeyPath] | None = None) -> None:
    """Write a data file, the manifest and, last, `.metadata`.

    Args:
        folder: Exists; to be published by the caller.
        sources: What to write, each key once.
        paths: Where each key is in the nested state dict; None where keys are not nested.

    Raises:
        CheckpointError: The disk is full or cannot be written, or reading a source fails.
    """
    try:
        save_alone({}, storage_writer=SealingWriter(folder), planner=_SourcePlanner(sources, paths or {}))
    except CheckpointException as error:
        met = next(iter(error.failures.values()))[0]
        if isinstance(met, CheckpointError):
            raise met from error
        raise in_short(error, f"writing {folder}") from error


class _SourcePlanner(SealingPlanner):
    """A planner with one item for each chunk and object, which are read when they are written."""

    def __init__(self, sources: Iterable[Source], paths: Mapping[str, KeyPath]) -> None:
        super().__init__()
        self._sources = {source.key: source for source in sources}
        self._paths = paths

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings = dict(self._paths)

    def create_local_plan(self) -> SavePlan:
        items = [item for source in self._sources.values() for item in _items(source)]
        self.plan = SavePlan(items, None, self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        source = self._sources[index.fqn]
        if isinstance(source, ObjectSource):
            return io.BytesIO(source.read())
        assert index.index is not None, "given in the plan"
        return source.read(source.boxes[index.index])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002, ARG002 (torch's names)
        return object


def _items(source: Source) -> Iterator[WriteItem]:
    if isinstance(source, ObjectSource):
        yield WriteItem(MetadataIndex(source.key), WriteItemType.BYTE_IO)
        return
    for number, box in enumerate(source.boxes):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.lengths)
        described = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=source.dtype), torch.Size(source.shape)
        )
        yield WriteItem(MetadataIndex(source.key, offsets, number), WriteItemType.SHARD, tensor_data=described)


# ---- how keys nest ---------------------------------------------------------------------------------------------------


def nested_paths(folder: CheckpointFolder) -> dict[str, KeyPath]:
    """Return the path of each key in the nested state dict; keys that are not nested are their own path."""
    found = folder.metadata.planner_data  # its paths were checked when the folder was opened
    told = found if isinstance(found, dict) else {}
    return {key: told.get(key, (key,)) for key in folder.metadata.state_dict_metadata}


def path_conflict(paths: Mapping[str, KeyPath]) -> str | None:
    """Describe a key that would be two things: another entry too, or the group of others; None if none."""
    groups = {path[:depth]: key for key, path in paths.items() for depth in range(1, len(path))}
    entries: dict[KeyPath, str] = {}
    for key, path in paths.items():
        if path in groups:
            return f"{key} would be an entry, and also the group that holds {groups[path]}"
        if path in entries:
            return f"{key} and {entries[path]} would be one entry"
        entries[path] = key
    return None
