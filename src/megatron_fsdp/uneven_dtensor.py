"""DTensors with uneven shards: chunk metadata, whole tensors, splitting; any back end.

Every function accepts the tensors of this library, which describe their cut and need no communication for that, and
any other DTensor of `Shard`, strided shard and `Replicate` placements, whose local shapes are gathered from all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp.comm.agreement import Groups, agreed, gather_over
from megatron_fsdp.comm.collectives import is_simulated
from megatron_fsdp.dtensor.shard_spec import ShardSpec, cut_up, describe_chunks, gather_full, gather_padded
from megatron_fsdp.dtensor.tensor import UnevenDTensor, asked_chunk, boxes_here, sharded_dims
from megatron_fsdp.errors import warn_caller
from megatron_fsdp.sharding.mesh import ranks_of
from megatron_fsdp.sharding.shards import (
    Box,
    ShardDescription,
    elements_before,
    kept_in_part,
    narrow_description,
    split_ranges,
)

_CHUNK_METHOD = "__create_chunk_list__"


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Return the chunk metadata of this rank's part of the global tensor.

    No communication for tensors of this library; for others collective over each mesh dimension that they are sharded
    along.

    Args:
        dtensor: Any.

    Returns:
        Offsets and sizes per dimension; a size of 0 where this rank holds nothing.

    Raises:
        TypeError: No DTensor.
        ValueError: A placement is neither shard nor replicate, there are several strided shards, or this rank's shard
            is cut inside rows and so not one chunk.
    """
    tensor = _checked(dtensor)
    if not isinstance(tensor, UnevenDTensor):
        return asked_chunk(tensor)
    description = tensor.shard_spec.description
    boxes = description.boxes()
    if len(boxes) > 1:
        raise ValueError(
            f"this rank's shard of a tensor of shape {tuple(tensor.shape)} begins or ends inside a row and is "
            f"{len(boxes)} chunks, not one; save the tensor as it is (torch.distributed.checkpoint asks for all its "
            "chunks), or gather it by uneven_dtensor_to_full_tensor"
        )
    box = boxes[0] if boxes else _empty_box(description)
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))


def _checked(tensor: object) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a {type(tensor).__name__} was given where a DTensor is wanted; wrap it by DTensor.from_local")
    return tensor


def _empty_box(description: ShardDescription) -> Box:
    """Return an empty box at this rank's position between its neighbours' elements."""
    shape, offset = description.part_shape(), description.part_offset()
    if not shape:
        return Box((), ())
    row_numel = max(torch.Size(shape[1:]).numel(), 1)
    row = min(description.local_range[0] // row_numel, shape[0])
    return Box((offset[0] + row, *offset[1:]), (0, *shape[1:]))


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Attach chunk metadata to the local tensor, for `torch.distributed.checkpoint`.

    Sets `__create_chunk_list__`, `__create_write_items__` and `__get_tensor_shard__` on `dtensor._local_tensor`. A
    shard cut inside rows has several chunks, an empty one none. Collective for DTensors that are not of this library.

    Raises:
        TypeError: No DTensor.
        ValueError: As `gather_and_compute_chunk_metadata`, but several chunks are allowed.
    """
    dtensor = _checked(dtensor)
    local = dtensor._local_tensor
    if not isinstance(dtensor, UnevenDTensor) and hasattr(local, _CHUNK_METHOD) and local.ndim == dtensor.ndim:
        delattr(local, _CHUNK_METHOD)  # may be stale; the shapes are gathered again
    describe_chunks(dtensor, dtensor.shard_spec if isinstance(dtensor, UnevenDTensor) else boxes_here(dtensor))


def _ranks_of(dtensor: object = None, *_: object, **__: object) -> Groups:
    """Return the groups of the ranks of an unchecked argument."""
    mesh = dtensor.device_mesh if isinstance(dtensor, DTensor) else None
    return ranks_of(mesh, *range(0 if mesh is None else mesh.ndim))


@agreed("checking a tensor", _ranks_of)
def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that every chunk lies inside the tensor and that chunks reach all its borders. Collective.

    Raises:
        AssertionError: They do not; on every rank.
    """
    boxes = boxes_here(_checked(dtensor))
    ndim = dtensor.ndim
    outside = any(
        offset < 0 or offset + length > total
        for box in boxes
        for offset, length, total in zip(box.offsets, box.lengths, dtensor.shape, strict=True)
    )
    filled = [box for box in boxes if box.numel]
    wrong_numel = sum(box.numel for box in filled) != dtensor._local_tensor.numel()
    flags = [int(outside), int(wrong_numel)]
    flags += [int(any(box.offsets[dim] == 0 for box in filled)) for dim in range(ndim)]
    flags += [
        int(any(box.offsets[dim] + box.lengths[dim] == dtensor.shape[dim] for box in filled)) for dim in range(ndim)
    ]
    found = torch.tensor(flags, dtype=torch.int64, device=dtensor._local_tensor.device)
    if isinstance(dtensor, UnevenDTensor):
        groups = dtensor.shard_spec.groups
    else:
        groups = tuple(map(dtensor.device_mesh.get_group, sharded_dims(dtensor)))
    for group in groups:
        if is_simulated(group):
            return
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    out, numel, *borders = found.tolist()
    assert not out, f"a rank holds elements outside of the tensor of shape {tuple(dtensor.shape)}"
    assert not numel, (
        f"a rank's local tensor of a tensor of shape {tuple(dtensor.shape)} has not as many elements as its chunks"
    )
    assert not dtensor.numel() or all(borders), f"no rank holds a border of the tensor of shape {tuple(dtensor.shape)}"


def filter_unflattened_state_dict(
    state_dict: Any,
    key_chain: Sequence[Any] | None = None,
    visit_condition: Callable[[Any], bool] = lambda _value: False,
) -> list[list[Any]]:
    """Return the chains of keys to all values of nested dicts that satisfy a condition.

    Args:
        state_dict: Nested dicts; a value that satisfies the condition is not searched further.
        key_chain: Keys that lead to `state_dict`.
        visit_condition: The condition.
    """
    chain = list(key_chain or ())
    if visit_condition(state_dict):
        return [chain]
    if not isinstance(state_dict, dict):
        return []
    found = (filter_unflattened_state_dict(value, [*chain, key], visit_condition) for key, value in state_dict.items())
    return list(itertools.chain.from_iterable(found))


def get_unflattened_state_dict(state_dict: Any, key_chain: Sequence[Any] | None = None) -> Any:
    """Return the value of nested dicts at a chain of keys.

    Raises:
        KeyError: A key is missing; names the whole chain.
    """
    value = state_dict
    for key in key_chain or ():
        if not isinstance(value, dict) or key not in value:
            raise KeyError(f"{key!r} of the chain {list(key_chain or ())} is not in the state dict")
        value = value[key]
    return value


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """Attach chunk metadata to every DTensor in nested dicts, in the sorted order of their keys; return the same dict.

    Collective where DTensors are not of this library: every rank needs the same keys.
    """
    chains = filter_unflattened_state_dict(state_dict, visit_condition=lambda value: isinstance(value, DTensor))
    for chain in sorted(chains, key=lambda keys: [str(key) for key in keys]):
        update_uneven_dtensor_chunk_metadata(get_unflattened_state_dict(state_dict, chain))
    return state_dict


@agreed("gathering a tensor", _ranks_of)
def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """All-gather the whole tensor on every rank, detached; collective, on any back end.

    Raises:
        TypeError: No DTensor.
        ValueError: A placement is neither shard nor replicate, or several are strided.
    """
    dtensor = _checked(dtensor)
    if isinstance(dtensor, UnevenDTensor):
        return gather_full(dtensor._local_tensor, dtensor.shard_spec)
    dims = sharded_dims(dtensor)
    boxes, local = boxes_here(dtensor), dtensor._local_tensor.detach()
    full = local.new_zeros(dtensor.shape)
    groups = [dtensor.device_mesh.get_group(dim) for dim in dims]
    everyone = gather_over(groups, boxes)
    largest = max(sum(box.numel for box in each) for each in everyone)
    if largest:
        for held, row in zip(everyone, gather_padded(local.reshape(-1), largest, groups), strict=True):
            for part, box in cut_up(row, held):
                full[box.indices].copy_(part)
    return full


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """All-gather the whole tensor as a DTensor with only `Replicate` placements; collective.

    Raises:
        TypeError: No DTensor.
        ValueError: As `uneven_dtensor_to_full_tensor`.
    """
    full = uneven_dtensor_to_full_tensor(dtensor)
    mesh = dtensor.device_mesh
    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def gather_uneven_dtensor_to_full_tensor(dtensor: DTensor) -> DTensor:
    """Call `redistribute_uneven_dtensor_to_replicated` by its deprecated name."""
    warn_caller(
        "gather_uneven_dtensor_to_full_tensor is an old name; call redistribute_uneven_dtensor_to_replicated",
        DeprecationWarning,
    )
    return redistribute_uneven_dtensor_to_replicated(dtensor)


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Split like `torch.split` of the global tensor; this rank's parts of the results are views.

    Args:
        dtensor: Any.
        split_size_or_sections: Length of each piece but the last, or all lengths.
        dim: Along which.
        update_uneven_dtensor_chunk_meta: Attach the chunk metadata of each piece for `torch.distributed.checkpoint`.

    Raises:
        TypeError: No DTensor.
        ValueError: A length is negative or they do not add up; or shards that are cut inside rows would be split
            along another dimension than the first.
    """
    tensor = _checked(dtensor)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim} to split")
    dim %= tensor.ndim
    offset = 0 if isinstance(tensor, UnevenDTensor) else asked_chunk(tensor).offsets[dim]
    for start, stop in split_ranges(tensor.shape[dim], split_size_or_sections):
        if isinstance(tensor, UnevenDTensor):
            piece = _own_piece(tensor, dim, start, stop)
        else:
            piece = _stock_piece(tensor, dim, start, stop, offset)
        yield describe_chunks(piece, boxes_here(piece)) if update_uneven_dtensor_chunk_meta else piece


def _own_piece(tensor: UnevenDTensor, dim: int, start: int, stop: int) -> DTensor:
    old = tensor.shard_spec.description
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
    return UnevenDTensor.wrap(piece.view(new.local_shape), ShardSpec(tensor.device_mesh, new))


def _stock_piece(tensor: DTensor, dim: int, start: int, stop: int, offset: int) -> DTensor:
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
        stride=torch.empty(shape, device="meta").stride(),
    )
