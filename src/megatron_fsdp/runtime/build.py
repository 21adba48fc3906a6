"""From a model and its unit plan to units: groups, layouts, buffers, and the sharded parameters in their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.gradient_scaling import gradient_reduction
from megatron_fsdp.grouping import ParameterGroupSpec, ParameterInfo, group_parameters
from megatron_fsdp.layout import plan_layout
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy, ResolvedPrecision, resolve_precision
from megatron_fsdp.placement import ShardingStrategy, placements_for
from megatron_fsdp.unit.param_group import GroupPlan, ParameterGroup
from megatron_fsdp.unit.unit import ParameterSites, Unit
from megatron_fsdp.units import UnitPlan

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Sharding:
    """How parameters are sharded, decided by the caller once for the whole model.

    Attributes:
        strategy: On the sharding axis.
        policy: Dtypes.
        axis: The sharding axis.
        mesh: The one-dimensional mesh of that axis.
        device: Where the buffers live.
        average_in_collective: Let the collective average.
        calculate_per_token_loss: Sum gradients, without a factor.
    """

    strategy: ShardingStrategy
    policy: MixedPrecisionPolicy
    axis: Axis
    mesh: DeviceMesh
    device: torch.device
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False

    def plan_group(self, spec: ParameterGroupSpec) -> GroupPlan:
        """Decide layout, dtypes, placements and factors of one group."""
        strategy = self.strategy
        if spec.key.is_scalar or (not spec.key.requires_grad and strategy < ShardingStrategy.optim_grads_params):
            strategy = ShardingStrategy.no_shard  # nothing to cut, or nothing to optimise: whole and never gathered
        placements = placements_for(strategy)
        if spec.key.requires_grad:
            precision = resolve_precision(self.policy, spec.key.dtype)
        else:
            precision = ResolvedPrecision(*(spec.key.dtype,) * 4, has_main_copy=False)
        layout = plan_layout(
            [info.shape for info in spec.parameters],
            1 if strategy == ShardingStrategy.no_shard else self.axis.num_ranks,
            alignment_numel=max(1, _ALIGNMENT_BYTES // spec.key.dtype.itemsize),
            granularity=[info.granularity for info in spec.parameters],
        )
        reduction = gradient_reduction(
            self.axis.num_ranks,
            self.axis.num_ranks,
            average_in_collective=self.average_in_collective,
            calculate_per_token_loss=self.calculate_per_token_loss,
            comm_dtype=precision.grad_comm,
        )
        return GroupPlan(spec, layout, precision, reduction, placements, self.axis, self.mesh, self.device)


def build_units(module: nn.Module, plan: UnitPlan, sharding: Sharding) -> tuple[Unit, ...]:
    """Shard a model in place, unit by unit, so that at most one unit exists twice.

    Args:
        module: The model; afterwards its parameters are the sharded ones.
        plan: Its units.
        sharding: How to shard.

    Returns:
        The units, root first.
    """
    originals = dict(module.named_parameters())
    sites = parameter_sites(module)
    units = []
    for index, spec in enumerate(plan.units):
        infos = [_info(name, originals[name]) for name in spec.parameters]
        groups = []
        group_sites = []
        for group_spec in group_parameters(infos):
            params = [originals.pop(info.name) for info in group_spec.parameters]
            group_sites.append([sites.pop(id(param)) for param in params])
            groups.append(ParameterGroup(sharding.plan_group(group_spec), params))
            del params
        unit = Unit(index, spec.name, groups, group_sites)
        unit.install_sharded()
        units.append(unit)
    return tuple(units)


def parameter_sites(module: nn.Module) -> dict[int, ParameterSites]:
    """Where each parameter hangs: for its id, the modules and attribute names; several for a tied one."""
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                sites.setdefault(id(param), []).append((owner, attribute))
    return {key: tuple(places) for key, places in sites.items()}


def _info(name: str, param: nn.Parameter) -> ParameterInfo:
    return ParameterInfo(name, tuple(param.shape), param.dtype, param.requires_grad)


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
    hashes = torch.stack([_hash(tensor).to(device) for tensor in tensors.values()])
    lowest, highest = hashes.clone(), hashes.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    differing = tuple(name for name, same in zip(tensors, (lowest == highest).tolist(), strict=True) if not same)
    for name in differing:
        value = tensors[name].to(device).contiguous()
        dist.broadcast(value, group_src=0, group=group)
        tensors[name].copy_(value)
    return differing


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with the bits of a tensor, as an int64 scalar."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.hash_tensor(real).view(torch.int64)
