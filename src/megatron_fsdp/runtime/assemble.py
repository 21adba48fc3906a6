"""Everything that happens at wrap time: check the model, find units, shard, connect the hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, NotSupportedYetError
from megatron_fsdp.fine_grained import refine_units
from megatron_fsdp.memory_options import MemoryOptions
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.notices import warn_caller
from megatron_fsdp.placement import Placement, ShardingStrategy, placements_for
from megatron_fsdp.runtime.agreement import agree
from megatron_fsdp.runtime.build import build_units
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.finite_check import FiniteCheck
from megatron_fsdp.runtime.hooks import register_hooks, register_load_hooks, register_state_dict_hooks
from megatron_fsdp.runtime.match_ranks import match_ranks
from megatron_fsdp.runtime.memory_plan import plan_memory
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.runtime.sync import SyncMode
from megatron_fsdp.runtime.usage import UsageAgreement
from megatron_fsdp.unit.unit import Unit
from megatron_fsdp.units import UnitPlan, find_units, plan_lines


@dataclass(frozen=True)
class Switches:
    """What the caller chose for one model, checked.

    Attributes:
        strategy: On the sharding axis.
        policy: Dtypes.
        unit_modules: What to look for as units.
        overlap_grad_reduce: Reduce during backward; strategies 2 and 3 always do.
        overlap_param_gather: Gather ahead; strategy 3 always does.
        average_in_collective: Let the collective average.
        calculate_per_token_loss: Sum gradients, without a factor.
        check_finite: Look for NaN and infinity in every gradient.
        memory: How memory is borrowed and how far to gather ahead.
    """

    strategy: ShardingStrategy
    policy: MixedPrecisionPolicy
    unit_modules: Sequence[type[nn.Module] | str] | str | None
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    average_in_collective: bool
    calculate_per_token_loss: bool
    check_finite: bool
    memory: MemoryOptions


@dataclass(frozen=True)
class Assembly:
    """A sharded model.

    Attributes:
        engine: Runs it.
        plan: Its units.
        plan_lines: The units, for people.
        handles: The hooks on modules and parameters.
        state_dict_handles: The hooks that describe shards in state dicts.
        device: Where the shards live.
    """

    engine: Engine
    plan: UnitPlan
    plan_lines: tuple[str, ...]
    handles: tuple[RemovableHandle, ...]
    state_dict_handles: tuple[RemovableHandle, ...]
    device: torch.device


def assemble(
    module: nn.Module,
    switches: Switches,
    mesh: DeviceMesh,
    device: torch.device,
    mode: SyncMode,
    backward_finished: Callable[[], None],
) -> Assembly:
    """Shard a model in place.

    Args:
        module: The model.
        switches: What the caller chose.
        mesh: The one-dimensional mesh of the sharding axis.
        device: Where the shards are to live.
        mode: When gradients are reduced; shared with the caller.
        backward_finished: Called at the end of each backward.

    Raises:
        ConfigurationError: The model cannot be sharded as it is.
    """
    num_ranks = mesh.size()
    axis = Axis(mesh.get_group() if num_ranks > 1 else None, mesh.get_local_rank(), num_ranks)
    plan = _plan_together(module, switches, axis)
    _move_buffers(module, device)
    differing = match_ranks(module, axis.group, device)
    if differing:
        warn_caller(
            f"{len(differing)} parameters or buffers differed between ranks at wrap time (first: {differing[0]}); all "
            "ranks now have those of the first rank of the group; seed every rank alike before building the model",
        )
    lines = tuple(plan_lines(plan, {name: param.numel() for name, param in module.named_parameters()}))
    sharding = Sharding(
        switches.strategy,
        switches.policy,
        axis,
        mesh,
        device,
        switches.average_in_collective,
        switches.calculate_per_token_loss,
    )
    units = build_units(module, plan, sharding, switches.memory.bucket_numel_on(num_ranks))
    _warn_of_narrowing(units)
    engine = Engine(
        units,
        plan_memory(
            switches.memory,
            switches.strategy,
            num_ranks,
            switches.overlap_grad_reduce or switches.strategy >= ShardingStrategy.optim_grads,
            units,
        ),
        mode,
        UsageAgreement(axis.group, device),
        device,
        pending_is_sharded=placements_for(switches.strategy).pending_grad[-1] is Placement.SHARD,
        backward_finished=backward_finished,
    )
    if switches.check_finite:
        names = [name for group in engine.groups() if group.gradients is not None for name in group.names]
        engine.finite_check = FiniteCheck(names, axis.group, device)
    modules = {index: module.get_submodule(spec.name) for index, spec in enumerate(plan.units)}
    return Assembly(
        engine,
        plan,
        lines,
        (*register_hooks(engine, modules), *register_load_hooks(engine, module)),
        tuple(register_state_dict_hooks(engine, module)),
        device,
    )


def _plan_together(module: nn.Module, switches: Switches, axis: Axis) -> UnitPlan:
    """Check the model and find its units; every rank gets the same answer or the same error."""
    plan, problem = None, None
    try:
        check_module(module)
        plan = find_units(module, switches.unit_modules)
        switches.memory.check_plan(len(plan.units) - 1)
        if switches.memory.fine_grained:
            plan = refine_units(module, plan, switches.memory.whole_types)
    except (MegatronFSDPError, TypeError) as error:
        problem = error
    agree(axis.group, problem, _facts(module, plan, switches) if problem is None else ())
    assert plan is not None
    return plan


def _warn_of_narrowing(units: Sequence[Unit]) -> None:
    narrowed = [
        group for unit in units for group in unit.groups if group.gradients is not None and group.plan.precision.narrows
    ]
    if narrowed:
        precision = narrowed[0].plan.precision
        warn_caller(
            f"{len(narrowed)} parameter groups compute in {precision.compute} and are optimised in "
            f"{precision.main_params}, which is narrower (first: {narrowed[0].names[0]}); set "
            "MixedPrecisionPolicy(main_params_dtype=None) to "
            "optimise them as they are",
        )


def check_module(module: nn.Module) -> None:
    """Refuse models that cannot be sharded; no communication.

    Raises:
        ConfigurationError: No parameters, parameters without memory or on several devices, or already sharded.
        NotSupportedYetError: Parameters that are DTensors already.
    """
    params = dict(module.named_parameters())
    if not params:
        raise ConfigurationError(f"{type(module).__name__} has no parameters; there is nothing to shard")
    sharded = [name for name, param in params.items() if hasattr(param, "_megatron_fsdp_model")]
    if sharded:
        raise ConfigurationError(
            f"the model is sharded already ({len(sharded)} of {len(params)} parameters, such as {sharded[0]}); wrap a "
            "model once"
        )
    lazy = [name for name, param in params.items() if isinstance(param, UninitializedParameter)]
    if lazy:
        raise ConfigurationError(
            f"{len(lazy)} parameters are not initialised yet (such as {lazy[0]}); run one forward before sharding, so "
            "that lazy modules know their shapes"
        )
    hooked = [name for name, param in params.items() if param._post_accumulate_grad_hooks]
    if hooked:
        raise ConfigurationError(
            f"{len(hooked)} parameters have post-accumulate-grad hooks (such as {hooked[0]}), which would see "
            "gradients before they are reduced; remove them, and act on .grad after backward"
        )
    tensor_parallel = [name for name, param in params.items() if isinstance(param, DTensor)]
    if tensor_parallel:
        raise NotSupportedYetError(
            f"{len(tensor_parallel)} parameters are DTensors already (such as {tensor_parallel[0]}); not supported "
            "yet: shard a model of plain tensors"
        )
    meta = [name for name, param in params.items() if param.is_meta]
    if meta:
        raise ConfigurationError(
            f"{len(meta)} of {len(params)} parameters are on the meta device (such as {meta[0]}) and "
            "init_model_with_meta_device is False; materialise the model first"
        )
    devices = sorted({str(param.device) for param in params.values()})
    if len(devices) > 1:
        examples = ", ".join(
            f"{next(name for name, param in params.items() if str(param.device) == device)} on {device}"
            for device in devices
        )
        raise ConfigurationError(
            f"parameters lie on {len(devices)} devices ({examples}); move the model to one device first"
        )


def _facts(module: nn.Module, plan: UnitPlan | None, switches: Switches) -> list[str]:
    """What every rank must have in common."""
    chosen = [f"{name}={value}" for name, value in vars(switches).items() if name != "unit_modules"]
    units = [f"unit {spec.name!r} of {spec.class_name}" for spec in plan.units] if plan is not None else []
    params = [
        f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in module.named_parameters()
    ]
    buffers = [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in module.named_buffers()]
    return [*chosen, *params, *buffers, *units]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Module buffers are not sharded; they follow the parameters to their device."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device:
                owner._buffers[name] = buffer.to(device)
