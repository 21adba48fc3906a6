"""Shards of any uneven DTensor: read from its description, else gathered from the local shapes of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.dtensor.chunks import describe_chunks, gather_padded
from megatron_fsdp.dtensor.frame import ShardFrame, contiguous_stride
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.sharding.shards import (
    Box,
    ShardDescription,
    elements_before,
    kept_in_part,
    narrow_description,
    split_ranges,
)


def check_dtensor(tensor: object) -> DTensor:
    """Return the argument, if it is a DTensor.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a {type(tensor).__name__} was given where a DTensor is wanted; wrap it by DTensor.from_local")
    return tensor


def boxes_here(tensor: DTensor) -> tuple[Box, ...]:
    """Return this rank's boxes, in the order of the local elements; collective for tensors without a description.

    Raises:
        ValueError: A placement is none of `Shard`, torch's strided shard and `Replicate`, or two are strided.
    """
    if isinstance(tensor, UnevenDTensor):
        return tensor.shard_frame.description.boxes()
    local = tensor._local_tensor
    if hasattr(local, "__create_chunk_list__"):
        return tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in local.__create_chunk_list__())
    chunk = _asked_chunk(tensor)
    return (Box(tuple(chunk.offsets), tuple(chunk.sizes)),)


def single_chunk(tensor: DTensor) -> ChunkStorageMetadata:
    """Return this rank's elements as one chunk; an empty one where it holds nothing.

    Raises:
        ValueError: They are several boxes, or a placement is not supported.
    """
    if not isinstance(tensor, UnevenDTensor):
        return _asked_chunk(tensor)
    description = tensor.shard_frame.description
    boxes = description.boxes()
    if len(boxes) > 1:
        raise ValueError(
            f"this rank's shard of a tensor of shape {tuple(tensor.shape)} begins or ends inside a row and is "
            f"{len(boxes)} chunks, not one; save the tensor as it is (torch.distributed.checkpoint asks for all its "
            "chunks), or gather it by uneven_dtensor_to_full_tensor"
        )
    box = boxes[0] if boxes else _empty_box(description)
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))


def _empty_box(description: ShardDescription) -> Box:
    """Return an empty box where this rank's elements would be, between those of the neighbours."""
    shape, offset = description.part_shape(), description.part_offset()
    if not shape:
        return Box((), ())
    row_numel = max(torch.Size(shape[1:]).numel(), 1)
    row = min(description.local_range[0] // row_numel, shape[0])
    return Box((offset[0] + row, *offset[1:]), (0, *shape[1:]))


def sharded_dims(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh dimensions that a foreign DTensor is sharded over, the one that was split last first.

    Raises:
        ValueError: A placement is none of `Shard`, torch's strided shard and `Replicate`, or two are strided.
    """
    strided = []
    for dim, placement in enumerate(tensor.placements):
        if _is_strided(placement):
            strided.append(dim)
        elif not isinstance(placement, Shard) and not placement.is_replicate():
            raise ValueError(
                f"a DTensor placed as {tensor.placements} has no shards to describe; use Shard or Replicate"
            )
    if len(strided) > 1:
        raise ValueError(f"a DTensor placed as {tensor.placements} has several strided shards; only one is offered")
    given = getattr(tensor.device_mesh, "_shard_order", None)
    if given is not None:
        order = list(reversed(given))
    else:
        order = [*strided, *(dim for dim in reversed(range(tensor.device_mesh.ndim)) if dim not in strided)]
    return tuple(dim for dim in order if not tensor.placements[dim].is_replicate())


def _is_strided(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"  # private, and a subclass of Shard in some versions only


def _asked_chunk(tensor: DTensor) -> ChunkStorageMetadata:
    """Compute one chunk from the local shapes of all ranks: one small collective per sharded mesh dimension."""
    sizes = list(tensor._local_tensor.shape)
    if len(sizes) != tensor.ndim:
        raise ValueError(
            f"the local tensor of shape {tuple(sizes)} says nothing about its place in a DTensor of shape "
            f"{tuple(tensor.shape)}; give it as many dimensions, or attach __create_chunk_list__ to it"
        )
    offsets = [0] * len(sizes)
    running = list(sizes)
    for mesh_dim in sharded_dims(tensor):
        dim = tensor.placements[mesh_dim].dim  # type: ignore[attr-defined]
        lengths = _lengths(tensor, mesh_dim, running[dim])
        offsets[dim] += sum(lengths[: tensor.device_mesh.get_local_rank(mesh_dim)])
        running[dim] = sum(lengths)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _lengths(tensor: DTensor, mesh_dim: int, length: int) -> list[int]:
    group = tensor.device_mesh.get_group(mesh_dim)
    found: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(found, length, group=group)
    return found


def foreign_full(tensor: DTensor) -> torch.Tensor:
    """All-gather the whole tensor of a foreign DTensor; collective over the dims it is sharded along."""
    dims = sharded_dims(tensor)
    boxes, local = boxes_here(tensor), tensor._local_tensor.detach()
    full = local.new_zeros(tensor.shape)
    groups = [tensor.device_mesh.get_group(dim) for dim in dims]
    everyone: list[tuple[Box, ...]] = [boxes]
    for group in groups:
        found: list[list[tuple[Box, ...]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(found, everyone, group=group)
        everyone = [each for rank in found for each in rank]
    largest = max(sum(box.numel for box in each) for each in everyone)
    if largest:
        for held, row in zip(everyone, gather_padded(local.reshape(-1), largest, groups), strict=True):
            place(full, held, row)
    return full


def place(full: torch.Tensor, boxes: Sequence[Box], elements: torch.Tensor) -> None:
    """Copy flat elements into boxes of a whole tensor, box after box."""
    first = 0
    for box in boxes:
        view = full
        for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        view.copy_(elements[first : first + box.numel].view(box.lengths))
        first += box.numel


def split_tensor(
    tensor: DTensor, size_or_sections: int | Sequence[int], dim: int, describes: bool
) -> Iterator[DTensor]:
    """Split as `torch.split` splits the global tensor; each rank keeps what it has of the pieces, as views.

    Args:
        tensor: Any DTensor of `Shard` and `Replicate` placements.
        size_or_sections: As for `torch.split`.
        dim: The dimension, counted from the end if negative.
        describes: Attach the description of its chunks to the local tensor of each piece.

    Raises:
        TypeError: It is no DTensor.
        ValueError: The sizes do not fit, or shards that are cut inside rows would be split along another dimension
            than the first.
    """
    tensor = check_dtensor(tensor)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim} to split")
    dim %= tensor.ndim
    ranges = split_ranges(tensor.shape[dim], size_or_sections)
    if isinstance(tensor, UnevenDTensor):
        for start, stop in ranges:
            yield _own_piece(tensor, dim, start, stop, describes)
        return
    chunk = single_chunk(tensor)
    for start, stop in ranges:
        piece = _foreign_piece(tensor, dim, start, stop, chunk.offsets[dim])
        if describes:
            describe_chunks(piece, boxes_here(piece))
        yield piece


def _own_piece(tensor: UnevenDTensor, dim: int, start: int, stop: int, describes: bool) -> DTensor:
    old = tensor.shard_frame.description
    new = narrow_description(old, dim, start, stop)
    first, last = kept_in_part(old, dim, (start, stop))
    local = tensor._local_tensor
    if dim and old.is_cut_inside_rows:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} whose shards are cut inside rows can be split along dim 0 only, "
            f"not along dim {dim}; gather it by uneven_dtensor_to_full_tensor and split that"
        )
    if dim or old.num_shards == 1:
        piece = local.narrow(dim, first, last - first)
    else:
        begin, before = old.local_range[0], elements_before(old.local_range[0], old.part_shape(), 0, (first, last))
        skipped = max(first * torch.Size(old.part_shape()[1:]).numel() - begin, 0)
        piece = local.reshape(-1).narrow(0, skipped if new.local_range[1] > before else 0, new.local_range[1] - before)
    made = UnevenDTensor.wrap(piece.view(new.local_shape), ShardFrame(tensor.device_mesh, new))
    return describe_chunks(made, new.boxes()) if describes else made


def _foreign_piece(tensor: DTensor, dim: int, start: int, stop: int, offset: int) -> DTensor:
    local = tensor._local_tensor
    first = min(max(start - offset, 0), local.shape[dim])
    last = min(max(stop - offset, first), local.shape[dim])
    shape = torch.Size(stop - start if axis == dim else n for axis, n in enumerate(tensor.shape))
    return DTensor.from_local(
        local.narrow(dim, first, last - first),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=contiguous_stride(shape),
    )
