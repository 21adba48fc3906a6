"""Open the output again and compare it with the source, move by move."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fsdp.checkpoint.convert.entries import Move, Value, listed
from megatron_fsdp.checkpoint.convert.execute import ReadMove, saved_bytes
from megatron_fsdp.checkpoint.folder import CheckpointFolder


def content_hash(tensor: Tensor) -> str:
    """SHA-256 of a tensor's elements, in order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def differing_keys(output: CheckpointFolder, targets: Sequence[str]) -> list[str]:
    """What is in the output and should not be, or the other way round, one line each."""
    there, wanted = {*output.tensors, *output.objects}, set(targets)
    lines = [f"missing: {listed(sorted(wanted - there))}"] if wanted - there else []
    return lines + ([f"unexpected: {listed(sorted(there - wanted))}"] if there - wanted else [])


def differing_moves(output: CheckpointFolder, moves: Sequence[Move], read: ReadMove) -> list[str]:
    """The moves whose elements, shape or dtype are not the source's; holds one tensor at a time."""
    return [f"{move.target} (from {move.source})" for move in moves if not _is_same(output, move, read)]


def differing_values(output: CheckpointFolder, values: Sequence[Value]) -> list[str]:
    """The values that are not what was to be written."""
    return [value.target for value in values if not _is_same_value(output, value)]


def _is_same(output: CheckpointFolder, move: Move, read: ReadMove) -> bool:
    entry = output.tensors.get(move.target)
    if entry is None or tuple(entry.shape) != move.shape or entry.dtype != move.dtype:
        return False
    wanted = content_hash(read(move))
    return content_hash(output.read_tensor(move.target)) == wanted


def _is_same_value(output: CheckpointFolder, value: Value) -> bool:
    if isinstance(value.value, Tensor):
        found = output.read_tensor(value.target) if value.target in output.tensors else None
        return (
            found is not None and found.dtype == value.value.dtype and content_hash(found) == content_hash(value.value)
        )
    return value.target in output.objects and output.read_bytes(value.target) == saved_bytes(value.value)
