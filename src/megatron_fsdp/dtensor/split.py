"""Splitting an uneven DTensor along a dimension, without moving an element between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.chunks import describe_chunks
from megatron_fsdp.dtensor.foreign import boxes_here, check_dtensor, single_chunk
from megatron_fsdp.dtensor.frame import ShardFrame, contiguous_stride
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.shard_split import elements_before, kept_in_part, narrow_description, split_ranges


def split_tensor(
    tensor: DTensor, size_or_sections: int | Sequence[int], dim: int, describes: bool
) -> Iterator[DTensor]:
    """The pieces that `torch.split` makes of the global tensor; each rank keeps what it has of them, as views.

    Args:
        tensor: Any DTensor of `Shard` and `Replicate` placements.
        size_or_sections: As of `torch.split`.
        dim: The dimension, counted from the end if negative.
        describes: Attach the description of its chunks to the local tensor of each piece.

    Raises:
        TypeError: No DTensor.
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
