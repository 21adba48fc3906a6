"""How a model is written: which file holds what, which rank writes it, and which elements travel when. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.checkpoint.hf.catalog import Held
from megatron_fsdp.checkpoint.hf.parts import FileTensor
from megatron_fsdp.checkpoint.hf.safetensors_format import FileLayout, StoredTensor, lay_out_file
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box, boxes_of_range

FILE_METADATA = {"format": "pt"}
"""What transformers wants to find in a header."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of a file tensor that are put together and written at once.

    Attributes:
        stored: The tensor.
        first: First element, of the flattened tensor.
        count: Number of elements.
    """

    stored: StoredTensor
    first: int
    count: int

    @property
    def start(self) -> int:
        """First byte in the file."""
        return self.stored.start + self.first * self.stored.dtype.itemsize


@dataclass(frozen=True)
class Move:
    """Elements that a rank gives to a stretch.

    Attributes:
        source: The rank.
        name: Of the model tensor.
        held: The box that the rank holds.
        box: What is taken of it, in the model tensor.
        target: A box of the file tensor that is contiguous in the stretch.
        target_first: Where `target` begins in the stretch, in elements.
        place: What is filled of the target, in coordinates of the target.
    """

    source: int
    name: str
    held: Box
    box: Box
    target: Box
    target_first: int
    place: Box


def split_into_files(sizes: Mapping[str, int], max_bytes: int, single_name: str) -> list[tuple[str, list[str]]]:
    """Put tensors into files in their order, as many into each as fit.

    Args:
        sizes: Bytes of each tensor, by key.
        max_bytes: Of the tensors of one file; a larger tensor has a file of its own.
        single_name: The name if there is one file; several are numbered.

    Returns:
        (name of the file, its keys), at least one.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(key)
        filled += size
    if len(files) == 1:
        return [(single_name, files[0])]
    stem = single_name.removesuffix(".safetensors")
    return [(f"{stem}-{i:05d}-of-{len(files):05d}.safetensors", keys) for i, keys in enumerate(files, start=1)]


def lay_out_files(
    tensors: Mapping[str, FileTensor], catalog: Mapping[str, Held], dtype: torch.dtype | None, max_bytes: int, name: str
) -> list[FileLayout]:
    """All files of a model, as they will be written.

    Args:
        tensors: What is in files, by key.
        catalog: The model's tensors, by name.
        dtype: Of all floating-point tensors; None: as they are.
        max_bytes: As of `split_into_files`.
        name: As of `split_into_files`.

    Raises:
        CheckpointError: A file tensor would be made of tensors of several dtypes, or of a dtype that cannot be stored.
    """
    dtypes = {key: _stored_dtype(key, tensor, catalog, dtype) for key, tensor in tensors.items()}
    sizes = {key: math.prod(tensor.shape) * dtypes[key].itemsize for key, tensor in tensors.items()}
    return [
        lay_out_file(file, [(key, dtypes[key], tensors[key].shape) for key in keys], FILE_METADATA)
        for file, keys in split_into_files(sizes, max_bytes, name)
    ]


def _stored_dtype(key: str, tensor: FileTensor, catalog: Mapping[str, Held], dtype: torch.dtype | None) -> torch.dtype:
    found = {catalog[name].dtype for name in tensor.names}
    if len(found) != 1:
        raise CheckpointError(f"{key} would be made of tensors of several dtypes: {sorted(map(str, found))}")
    own = found.pop()
    return dtype if dtype is not None and own.is_floating_point else own


def share_out_files(files: Sequence[FileLayout], num_ranks: int) -> list[list[FileLayout]]:
    """Which files each rank writes: the largest first, each to the rank with the fewest bytes so far."""
    shared: list[list[FileLayout]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file in sorted(files, key=lambda file: -file.nbytes):
        rank = loads.index(min(loads))
        shared[rank].append(file)
        loads[rank] += file.nbytes
    return shared


def stretches_of(files: Sequence[FileLayout], max_bytes: int) -> Iterator[Stretch]:
    """All elements of files in order, at most `max_bytes` (or one element) at once."""
    for file in files:
        for stored in file.tensors:
            numel, step = math.prod(stored.shape), max(max_bytes // stored.dtype.itemsize, 1)
            for first in range(0, numel, step):
                yield Stretch(stored, first, min(step, numel - first))


def moves_of(stretch: Stretch, tensor: FileTensor, catalog: Mapping[str, Held], writer: int) -> Iterator[Move]:
    """Everything that is put into a stretch, in an order that all ranks agree on.

    Args:
        stretch: What is written.
        tensor: Of which parts its file tensor is made.
        catalog: Who holds what.
        writer: The rank that writes it.
    """
    running = 0
    for target in boxes_of_range(stretch.stored.shape, stretch.first, stretch.first + stretch.count):
        for part in tensor.parts:
            wanted = target.meet(part.file_box)
            if wanted is None:
                continue
            held = catalog[part.name]
            in_model = part.to_model(wanted)
            for box in held.near(in_model):
                common = in_model.meet(box)
                if common is not None:
                    place = part.to_file(common).inside(target)
                    yield Move(held.source_of(box, writer), part.name, box, common, target, running, place)
        running += target.numel
