"""Whole tensors out of uneven shards: padded to one length, gathered along each mesh dimension, put in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.dtensor.frame import ShardFrame

# torch 2.13 renames the flat-tensor collectives; the older names warn there and the newer do not exist in 2.11.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_padded(flat: torch.Tensor, padded_numel: int, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """Gather differing numbers of elements by one padded collective per group.

    Args:
        flat: (n,) this rank's elements, n <= padded_numel.
        padded_numel: The same on every rank of all groups.
        groups: Gathered over one after another; the last one is the most significant in the result.

    Returns:
        (product of group sizes, padded_numel), rows in the order of ranks; what lies behind a rank's elements is
        undefined.
    """
    sent = flat
    if flat.numel() != padded_numel:
        sent = flat.new_empty(padded_numel)
        sent[: flat.numel()].copy_(flat)
    sent = sent.contiguous().view(torch.uint8)  # every back end moves bytes, not every one each dtype
    for group in groups:
        received = sent.new_empty(sent.numel() * dist.get_world_size(group))
        if sent.numel():
            _all_gather_flat(received, sent, group=group)
        sent = received
    return sent.view(flat.dtype).view(-1, padded_numel) if padded_numel else flat.new_empty(1, 0)


def gather_full(local: torch.Tensor, frame: ShardFrame) -> torch.Tensor:
    """The whole tensor from every rank's elements; a new tensor on every rank, collective over `frame.groups`.

    Args:
        local: This rank's elements, of shape `frame.description.local_shape`.
        frame: How the tensor is cut.
    """
    with torch.no_grad():
        return _gather_parts(_gather_shards(local.detach(), frame), frame)


def _gather_shards(local: torch.Tensor, frame: ShardFrame) -> torch.Tensor:
    description = frame.description
    shape, cut = description.part_shape(), description.cut
    if cut.num_shards == 1:
        return local.reshape(shape)
    groups = [frame.mesh.get_group(dim) for dim in reversed(description.use.shard_dims)]
    rows = gather_padded(local.reshape(-1), cut.largest_numel, groups)
    part = local.new_empty(cut.numel)
    if cut.numel:
        for shard, row in enumerate(rows):
            start, stop = cut.range_of(shard)
            part[start:stop].copy_(row[: stop - start])
    return part.view(shape)


def _gather_parts(part: torch.Tensor, frame: ShardFrame) -> torch.Tensor:
    description = frame.description
    tensor_cut, use = description.tensor_cut, description.use
    if tensor_cut is None or use.tensor_dim is None:
        return part.clone() if description.num_shards == 1 else part
    shapes = [description.part_shape(index) for index in range(use.num_parts)]
    largest = max(torch.Size(shape).numel() for shape in shapes)
    rows = gather_padded(part.contiguous().view(-1), largest, [frame.mesh.get_group(use.tensor_dim)])
    full = part.new_empty(frame.shape)
    if largest:
        for index, (shape, row) in enumerate(zip(shapes, rows, strict=True)):
            start, stop = description.part_range(index)
            full.narrow(tensor_cut.dim, start, stop - start).copy_(row[: torch.Size(shape).numel()].view(shape))
    return full
