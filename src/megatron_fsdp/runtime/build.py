"""From a model and its unit plan to units: groups, buffers, and the sharded parameters in their places."""

from __future__ import annotations

from torch import nn

from megatron_fsdp.grouping import ParameterInfo, group_parameters
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.unit.param_group import ParameterGroup
from megatron_fsdp.unit.tensor_parallel import local_part
from megatron_fsdp.unit.unit import ParameterSites, Unit
from megatron_fsdp.units import UnitPlan


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
        infos = [_info(name, originals[name], sharding) for name in spec.parameters]
        groups = []
        group_sites = []
        for group_spec in group_parameters(infos):
            params = [originals.pop(info.name) for info in group_spec.parameters]
            group_sites.append([sites.pop(id(param)) for param in params])
            groups.append(ParameterGroup(sharding.plan_group(group_spec, params), params))
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


def _info(name: str, param: nn.Parameter, sharding: Sharding) -> ParameterInfo:
    return ParameterInfo(
        name,
        tuple(local_part(param).shape),
        param.dtype,
        param.requires_grad,
        is_expert=sharding.is_expert(name, param),
    )
