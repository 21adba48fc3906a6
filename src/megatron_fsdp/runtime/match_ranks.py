"""Ranks that were seeded differently start from the weights of the first one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.buffer.real_values import has_values
from megatron_fsdp.runtime.fingerprint import fingerprints, lowest_and_highest
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.unit.tensor_parallel import local_part, part_of


def match_ranks(module: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """Give every data-parallel rank the weights of the first one, and report what had to be sent.

    Ranks that were seeded differently would otherwise each contribute their own shard to a model that nobody
    initialised. A hash of each tensor is compared first, so that nothing but the hashes is sent where ranks agree.
    Tensor-parallel ranks hold different parts, and experts differ between expert-parallel ranks; these are left alone.

    Args:
        module: The model with its full parameters and buffers; those without values are left out.
        sharding: Says which ranks share which parameters.

    Returns:
        Names of parameters and buffers that differed, in model order.
    """
    held: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    experts = {name: tensor for name, tensor in held.items() if sharding.is_expert(name, tensor)}
    dense = {name: tensor for name, tensor in held.items() if name not in experts}
    differing: set[str] = set()
    for tensors, domain in ((dense, sharding.dense), (experts, sharding.experts)):
        # Over the inner ranks first: then the first of each inner group stands for its group.
        for axis in reversed(domain.axes if domain is not None else ()):
            if axis.group is not None:
                differing.update(_match(_plain(tensors), axis.group, sharding.device))
    return tuple(name for name in held if name in differing)


def differing_duplicates(module: nn.Module, sharding: Sharding) -> tuple[str, ...]:
    """Names of parameters that tensor-parallel ranks hold whole, and hold different values of. Nothing is changed."""
    group, mesh = sharding.dense.tensor_parallel_group, sharding.dense.tensor_parallel
    if group is None:
        return ()
    parts = {name: part_of(name, param, mesh) for name, param in module.named_parameters()}
    whole = {
        name: param
        for name, param in module.named_parameters()
        if (part := parts[name]) is not None and not part.is_cut and not sharding.is_expert(name, param)
    }
    return differing_tensors(_plain(whole), group, sharding.device)


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    local = {name: local_part(tensor.detach()) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in local.items() if tensor.numel() and has_values(tensor)}


def _match(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> tuple[str, ...]:
    differing = differing_tensors(tensors, group, device)
    for name in differing:
        value = tensors[name].to(device).contiguous()
        dist.broadcast(value, group_src=0, group=group)
        with torch.inference_mode(tensors[name].is_inference()):  # the only place where such a tensor may be written
            tensors[name].copy_(value)
    return differing


def differing_tensors(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> tuple[str, ...]:
    """Names of the tensors that are not the same bits on every rank; sends two numbers per tensor.

    Args:
        tensors: The same names in the same order on every rank, none of them empty.
        group: The ranks.
        device: Where the hashes travel.
    """
    if not tensors:
        return ()
    hashes = fingerprints(list(tensors.values())).to(device)
    lowest, highest = lowest_and_highest(hashes, group)
    return tuple(name for name, same in zip(tensors, (lowest == highest).tolist(), strict=True) if not same)
