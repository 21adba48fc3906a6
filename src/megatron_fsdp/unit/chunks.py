"""Tell torch.distributed.checkpoint which part of a global tensor a local shard holds, by arithmetic on the layout.

torch asks a DTensor for its chunks, and the DTensor asks its local tensor (`__create_chunk_list__`,
`__create_write_items__`, `__get_tensor_shard__`) before it assumes an even split along dim 0. Ours are not even, and
may be cut inside a row, so each local tensor gets these three as attributes. No rank has to be asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megatron_fsdp.boxes import Box, boxes_of_range


class _LocalChunks:
    """The chunks of one local tensor; holds no reference to the tensor, which holds this."""

    def __init__(self, shape: torch.Size, boxes: Sequence[Box], properties: TensorProperties) -> None:
        self._shape = shape
        self._boxes = tuple(boxes)
        self._properties = properties

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in self._boxes]

    def write_items(self, fqn: str, _tensor: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, self._properties, self._shape),
            )
            for chunk in self.chunk_list()
        ]

    def shard_at(self, local: torch.Tensor | None, index: MetadataIndex) -> torch.Tensor:
        if local is None:
            raise ValueError(
                f"{index.fqn} was unpickled, and only sharded tensors of a live model can be read by chunk"
            )
        first = 0
        for box in self._boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return local.view(-1)[first : first + box.numel].view(box.lengths)
            first += box.numel
        raise ValueError(f"{index.fqn} has no chunk at {index.offset} on this rank; it has {self.chunk_list()}")


class _ShardReader:
    """Finds a chunk in one local tensor, held weakly; a pickled copy keeps the description only."""

    def __init__(self, chunks: _LocalChunks, local: torch.Tensor | None) -> None:
        self._chunks = chunks
        self._local = None if local is None else weakref.ref(local)

    def __call__(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks.shard_at(self._local() if self._local is not None else None, index)

    def __reduce__(self) -> tuple[type[_ShardReader], tuple[_LocalChunks, None]]:
        return _ShardReader, (self._chunks, None)


def describe_chunks(tensor: DTensor, start: int, stop: int) -> DTensor:
    """Attach the description of elements [start, stop) of the flattened global tensor to a DTensor's local tensor.

    Args:
        tensor: Its local tensor holds just these elements, in order.
        start: First element.
        stop: One past the last.

    Returns:
        The same DTensor.
    """
    local = tensor._local_tensor
    chunks = _LocalChunks(
        tensor.shape, boxes_of_range(tensor.shape, start, stop), TensorProperties.create_from_tensor(local)
    )
    local.__create_chunk_list__ = chunks.chunk_list  # type: ignore[attr-defined]
    local.__create_write_items__ = chunks.write_items  # type: ignore[attr-defined]
    local.__get_tensor_shard__ = _ShardReader(chunks, local)  # type: ignore[attr-defined]
    return tensor
