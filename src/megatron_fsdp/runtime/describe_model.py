"""Putting a description of a whole model together: live engine, options and their effects. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_fsdp.description import Description, OptionDescription
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.option_facts import Option, OptionFacts
from megatron_fsdp.option_table import FULLY_SHARD
from megatron_fsdp.option_table_config import BUCKETS, EFFECTS, ENGINE_FIELDS
from megatron_fsdp.runtime.assemble import Assembly, Switches
from megatron_fsdp.runtime.describe import (
    axes_of,
    memory_description,
    optimizers_of,
    root_groups_are_cut,
    units_of,
    unused_of,
)
from megatron_fsdp.unit.grad_slot import GRAD

_DDP_NAMES = {"dp_shard_dim": "dp_dim"}


@dataclass(frozen=True)
class Subject:
    """What is described.

    Attributes:
        wrapper: Class of the wrapper.
        module: The model inside.
        assembly: Engine and units.
        switches: What was chosen for the model.
        index: Mesh and process groups.
        config: The configuration whose fields are told.
        policy: Dtypes, as they are now.
        auto_sync: Whether every backward ends with a sync.
        bucket_numel: Where parameters are cut by size; None: never.
        unit_modules: What was given as units.
        gathers_at_once: Whether a parameter sync only starts gathers.
        is_ddp: Whether the wrapper takes the configuration from its caller.
        gather_mode: When changed weights are gathered into buckets; None for units.
        notices: What was adjusted or derived.
    """

    wrapper: str
    module: nn.Module
    assembly: Assembly
    switches: Switches
    index: FSDPDistributedIndex
    config: DistributedDataParallelConfig
    policy: MixedPrecisionPolicy
    auto_sync: bool
    bucket_numel: int | None
    unit_modules: Sequence[type[nn.Module] | str] | str | None
    gathers_at_once: bool
    is_ddp: bool = False
    gather_mode: str | None = None
    notices: tuple[str, ...] = ()


def describe_model(subject: Subject) -> Description:
    """Describe a wrapped model as this rank holds it now."""
    engine, plan, switches = subject.assembly.engine, subject.assembly.plan, subject.switches
    units = units_of(engine, plan)
    ready = dist.is_initialized()
    return Description(
        wrapper=subject.wrapper,
        model=type(subject.module).__name__,
        rank=dist.get_rank() if ready else 0,
        world_size=dist.get_world_size() if ready else 1,
        device=str(subject.assembly.device),
        strategy=switches.strategy.name,
        outer_strategy=switches.outer_strategy.name if subject.index.dp_outer_dim is not None else None,
        axes=axes_of(engine),
        own_groups=engine.own_groups is not None,
        unit_source=plan.source,
        units=units,
        tied=plan.aliases,
        frozen_numel=sum(group.numel for unit in units for group in unit.groups if not group.is_trainable),
        unused=unused_of(engine),
        memory=memory_description(engine),
        optimizers=optimizers_of(engine),
        options=_options(subject, _facts(subject)),
        notices=subject.notices,
    )


def _options(subject: Subject, facts: OptionFacts) -> tuple[OptionDescription, ...]:
    config = subject.config
    table = BUCKETS if subject.is_ddp else FULLY_SHARD
    told = [_option(option, facts) for option in table]
    names = [field.name for field in fields(config)] if subject.is_ddp else ENGINE_FIELDS
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        value, effect = getattr(config, name), EFFECTS[name](facts)
        is_default = value == defaults[name]
        told.append(OptionDescription(name, _text(value), is_default, effect.is_there, effect.told))
    if subject.is_ddp:
        told = [replace(option, name=_DDP_NAMES.get(option.name, option.name)) for option in told]
    return tuple(told)


def _option(option: Option, facts: OptionFacts) -> OptionDescription:
    value, effect = option.read(facts), option.judge(facts)
    is_default = value == option.default_in(facts)
    return OptionDescription(option.name, _text(value), is_default, effect.is_there, effect.told)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).removeprefix("torch.")


def _facts(subject: Subject) -> OptionFacts:
    return OptionFacts(**_facts_of_ranks(subject), **_facts_of_schedule(subject))


def _facts_of_ranks(subject: Subject) -> dict[str, Any]:
    """Who shares the model, how it is cut and in which dtypes."""
    engine, index, switches = subject.assembly.engine, subject.index, subject.switches
    groups, dense, experts, given = engine.groups(), engine.dense, engine.experts, subject.unit_modules
    trainable = [group for group in groups if group.gradients is not None]
    outer = dense.axes[0].num_ranks if index.dp_outer_dim is not None else 0
    return {
        "num_ranks": dense.num_ranks,
        "outer_ranks": outer,
        "mesh_dims": tuple(index.device_mesh.mesh_dim_names or ()),
        "shard_dim": str(index.dp_shard_dim),
        "outer_dim": index.dp_outer_dim,
        "tp_dim": index.tp_dim,
        "tensor_parallel": sum(part is not None and part.is_cut for group in groups for part in group.plan.parts),
        "has_gather_group": _has_second(dense.axes[-1]),
        "has_expert_gather_group": experts is not None and _has_second(experts.axes[-1]),
        "has_expert_mesh": experts is not None,
        "experts": sum(len(group.names) for group in groups if group.plan.spec.key.is_expert),
        "device": str(subject.assembly.device),
        "strategy": int(switches.strategy),
        "outer_strategy": int(switches.outer_strategy),
        "unit_modules": "auto" if given is None or isinstance(given, str) else ", ".join(map(_class_name, given)),
        "unit_source": subject.assembly.plan.source,
        "units": len(engine.units) - 1,
        "uses_buckets": subject.gather_mode is not None,
        "init_meta": switches.init_meta,
        "policy": subject.policy,
        "narrow": any(
            min(group.plan.precision.grad_comm.itemsize, group.plan.precision.main_grads.itemsize) < 4
            for group in trainable
        ),
        "has_main_copy": any(not group.weights.shares_memory for group in groups),
    }


def _facts_of_schedule(subject: Subject) -> dict[str, Any]:
    """What is done when, in which memory, and what is checked."""
    engine, switches = subject.assembly.engine, subject.switches
    groups, schedule = engine.groups(), engine.scheduler.config
    cut = len(engine.units) > 2 if subject.gather_mode is not None else root_groups_are_cut(engine.units)
    return {
        "overlap_grad_reduce": switches.overlap_grad_reduce,
        "overlap_param_gather": switches.overlap_param_gather,
        "reduces_early": schedule.reduces_early,
        "gathers": schedule.gathers,
        "sharded_weights": schedule.shares_slots,
        "auto_sync": subject.auto_sync,
        "describes_state": any(
            handle.id in (handle.hooks_dict_ref() or {}) for handle in subject.assembly.state_dict_handles
        ),
        "checks_finite": engine.finite_check is not None,
        "checks_large": engine.large_check is not None,
        "averages": switches.average_in_collective,
        "exchanges": any(group.exchanges_inside for group in groups),
        "sums_locally": engine.dense.axes[-1].sums_locally,
        "bucket_numel": subject.bucket_numel,
        "cut_groups": cut,
        "per_token": switches.calculate_per_token_loss,
        "decouples": any(group.grad_attribute != GRAD for group in groups),
        "allocator": engine.memory.allocator,
        "idle": switches.memory.idle,
        "slots": schedule.slots,
        "may_grow": engine.memory.may_grow,
        "forward_depth": schedule.prefetch_forward,
        "backward_depth": schedule.prefetch_backward,
        "buckets": engine.executor.bucket_count,
        "communication_numel": switches.memory.communication_unit_numel,
        "fine_grained": switches.memory.fine_grained,
        "verify_ranks_s": switches.verify_ranks_s,
        "asks_usage": switches.find_unused_parameters,
        "scales_first": switches.scales_first,
        "fp32_patterns": switches.fp32_patterns,
        "gathers_at_once": subject.gathers_at_once,
        "gather_mode": subject.gather_mode,
        "numel_multiple": switches.numel_multiple,
        "delays_weights": engine.delayed is not None,
        "fuses": switches.fuses_weight_gradients,
        "fused_linears": subject.assembly.fused_linears,
    }


def _has_second(axis: object) -> bool:
    second = getattr(axis, "gather_group", None)
    return second is not None and second is not getattr(axis, "group", None)


def _class_name(entry: type[nn.Module] | str) -> str:
    return entry if isinstance(entry, str) else entry.__name__
