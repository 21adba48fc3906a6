"""Ranks that were seeded differently start from the weights of the first one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.runtime.fingerprint import fingerprint


def match_ranks(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> tuple[str, ...]:
    """Give every rank the weights of the group's first rank, and report what had to be sent.

    Ranks that were seeded differently would otherwise each contribute their own shard to a model that nobody
    initialised. A hash of each tensor is compared first, so that nothing but the hashes is sent where ranks agree.

    Args:
        module: The model with its full parameters and buffers; those on the meta device are left out.
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
        if tensor.numel() and not tensor.is_meta
    }
    if not tensors:
        return ()
    hashes = torch.stack([fingerprint(tensor).to(device) for tensor in tensors.values()])
    lowest, highest = hashes.clone(), hashes.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    differing = tuple(name for name, same in zip(tensors, (lowest == highest).tolist(), strict=True) if not same)
    for name in differing:
        value = tensors[name].to(device).contiguous()
        dist.broadcast(value, group_src=0, group=group)
        tensors[name].copy_(value)
    return differing
