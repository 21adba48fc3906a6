"""The boxes of any DTensor on this rank: from its description, else from the local shapes of all ranks."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.sharding.shards import Box


def boxes_here(tensor: DTensor) -> tuple[Box, ...]:
    """Return this rank's boxes, in the order of the local elements; collective for tensors without a description."""
    if isinstance(tensor, UnevenDTensor):
        return tensor.shard_spec.description.boxes()
    local = tensor._local_tensor
    if hasattr(local, "__create_chunk_list__"):
        return tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in local.__create_chunk_list__())
    chunk = asked_chunk(tensor)
    return (Box(tuple(chunk.offsets), tuple(chunk.sizes)),)


def sharded_dims(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh dimensions that a foreign DTensor is sharded over, the last split first."""
    strided = []
    for dim, placement in enumerate(tensor.placements):
        if type(placement).__name__ == "_StridedShard":  # private, and a subclass of Shard in some versions only
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


def asked_chunk(tensor: DTensor) -> ChunkStorageMetadata:
    """Compute the local chunk from the local shapes of all ranks: one small collective per sharded mesh dimension."""
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
        group = tensor.device_mesh.get_group(mesh_dim)
        lengths = gather_objects(running[dim], group)
        offsets[dim] += sum(lengths[: tensor.device_mesh.get_local_rank(mesh_dim)])
        running[dim] = sum(lengths)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
