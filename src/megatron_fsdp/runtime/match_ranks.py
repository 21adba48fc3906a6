"""Ranks that were seeded differently start from the weights of the first one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HASHED_AT_ONCE = 2**20
_MULTIPLIER = 0x1E3779B97F4A7C15  # odd, with its bits well mixed


def match_ranks(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> tuple[str, ...]:
    """Give every rank the weights of the group's first rank, and report what had to be sent.

    Ranks that were seeded differently would otherwise each contribute their own shard to a model that nobody
    initialised. A hash of each tensor is compared first, so that nothing but the hashes is sent where ranks agree.

    Args:
        module: The model with its full parameters and buffers.
        group: The data-parallel ranks; None for a single one.
        device: Where the hashes travel.

    Returns:
        Names of parameters and buffers that differed.
    """
    if group is None:
        return ()
    tensors: Mapping[str, torch.Tensor] = {
        name: tensor.detach()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.numel()
    }
    if not tensors:
        return ()
    differing = differing_tensors(tensors, group, device)
    for name in differing:
        value = tensors[name].to(device).contiguous()
        dist.broadcast(value, group_src=0, group=group)
        tensors[name].copy_(value)
    return differing


def differing_tensors(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> tuple[str, ...]:
    """Names of the tensors that are not the same bits on every rank; sends one number per tensor, twice.

    Args:
        tensors: The same names in the same order on every rank; at least one, none of them empty.
        group: The ranks.
        device: Where the hashes travel.
    """
    hashes = torch.stack([_hash(tensor).to(device) for tensor in tensors.values()])
    lowest, highest = hashes.clone(), hashes.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return tuple(name for name, same in zip(tensors, (lowest == highest).tolist(), strict=True) if not same)


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with the bits of a tensor and with their order, as an int64 scalar.

    The sum, modulo 2^64, of all elements' bits times pseudo-random odd weights: one changed element always shows, and
    so do equal numbers of equal elements, which an exclusive or of all elements (`torch.hash_tensor`) takes for alike.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(_SAME_SIZE[real.element_size()]).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _HASHED_AT_ONCE):
        part = bits[start : start + _HASHED_AT_ONCE].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=bits.device) * _MULTIPLIER
        weights = (weights ^ (weights >> 29)) * _MULTIPLIER | 1
        total += (part * weights).sum()
    return total
