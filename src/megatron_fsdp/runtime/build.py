"""From a model and its unit plan to units: groups, buffers, and the sharded parameters in their places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.grouping import ParameterInfo, cut_groups, group_parameters
from megatron_fsdp.runtime.agreement import agree_over
from megatron_fsdp.runtime.blueprint import Blueprint, draw_blueprint, has_meta
from megatron_fsdp.runtime.group_plans import GroupPlans
from megatron_fsdp.runtime.materialise import materialise
from megatron_fsdp.runtime.random_state import same_random_numbers
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.unit.param_group import ParameterGroup
from megatron_fsdp.unit.tensor_parallel import local_part
from megatron_fsdp.unit.unit import ParameterSites, Unit
from megatron_fsdp.units import UnitPlan


def build_units(
    module: nn.Module,
    plan: UnitPlan,
    sharding: Sharding,
    bucket_numel: int | None = None,
    *,
    leaves_empty: bool = False,
) -> tuple[Unit, ...]:
    """Shard a model in place, unit by unit, so that at most one unit exists twice.

    Args:
        module: The model; afterwards its parameters are the sharded ones.
        plan: Its units.
        sharding: How to shard.
        bucket_numel: Where to cut the root's parameters into groups, in elements; None: never.
        leaves_empty: Give parameters on the meta device memory and no values, and leave buffers there.

    Returns:
        The units, root first.

    Raises:
        ConfigurationError: What was on the meta device cannot be initialised; on every rank alike.
    """
    blueprint = None if leaves_empty or not any(map(has_meta, module.modules())) else draw_blueprint(module)
    originals = dict(module.named_parameters())
    sites = parameter_sites(module)
    plans = GroupPlans(sharding)
    units = []
    for index, spec in enumerate(plan.units):
        infos = [parameter_info(name, originals[name], sharding) for name in spec.parameters]
        groups = []
        group_sites = []
        specs = group_parameters(infos)
        for group_spec in specs if index else cut_groups(specs, bucket_numel):
            params = [originals.pop(info.name) for info in group_spec.parameters]
            group_sites.append([sites.pop(id(param)) for param in params])
            group_plan, frames = plans.plan(group_spec, params)
            groups.append(ParameterGroup(group_plan, params, frames))
            del params
        unit = Unit(index, spec.name, groups, group_sites, spec.is_module)
        unit.install_sharded()
        if index:  # the root is whole wherever a forward can read its weights
            unit.say_who_owns(plan.remedy(spec))
        units.append(unit)
    if blueprint is not None:
        _initialise(module, blueprint, units, sharding)
    return tuple(units)


def _initialise(module: nn.Module, blueprint: Blueprint, units: Sequence[Unit], sharding: Sharding) -> None:
    inner_first = [axis.group for axis in reversed(sharding.dense.axes)]
    groups = [group for group in (*inner_first, sharding.dense.tensor_parallel_group) if group is not None]
    problem = None
    try:
        with same_random_numbers(groups, sharding.device):
            materialise(module, blueprint, units, sharding.device)
    except ConfigurationError as error:
        problem = error
    agree_over(sharding.reaching_all, problem)


def parameter_sites(module: nn.Module) -> dict[int, ParameterSites]:
    """Where each parameter hangs: for its id, the modules and attribute names; several for a tied one."""
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                sites.setdefault(id(param), []).append((owner, attribute))
    return {key: tuple(places) for key, places in sites.items()}


def parameter_info(name: str, param: nn.Parameter, sharding: Sharding) -> ParameterInfo:
    """What grouping needs to know of a parameter; only its description is read."""
    return ParameterInfo(
        name,
        tuple(local_part(param).shape),
        param.dtype,
        param.requires_grad,
        is_expert=sharding.is_expert(name, param),
        sums_in_fp32=sharding.sums_in_fp32(name),
    )
