"""The two steps of sharding: `shard_unit` shards the parameters of a unit, `finish` makes an engine of sharded units.

Every public way to shard is a policy about these two: which modules are a unit, by which `Sharding`, and when all units
are there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp.comm.agreement import raise_together
from megatron_fsdp.comm.axis import backend_of, is_simulated
from megatron_fsdp.comm.registration import UserBuffers
from megatron_fsdp.config.engine_options import EngineOptions, resolve_check_lifetimes, resolve_hang_log
from megatron_fsdp.debug.gradient_checks import make_checks
from megatron_fsdp.debug.lifetimes import check_lifetimes
from megatron_fsdp.debug.verify_ranks import RankVerifier
from megatron_fsdp.dtensor.expert_names import TRIVIAL_NAMES, ExpertNames
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.executor import DelayedGradients, Executor, GradientCheck
from megatron_fsdp.engine.group_plan import GroupPlan, Ranks
from megatron_fsdp.engine.hooks import answer_for_sharded_parameters, register_hooks
from megatron_fsdp.engine.matched_passes import MEETING, MatchedPasses, ordered_scheduler
from megatron_fsdp.engine.memory import CommunicationPool
from megatron_fsdp.engine.memory_plan import MemoryPlan, plan_memory
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.schedule import ScheduleConfig, Scheduler, SyncMode
from megatron_fsdp.engine.unit import ParameterPlace, StructureCheck, Unit
from megatron_fsdp.engine.weight_quantizer import WeightQuantizer
from megatron_fsdp.errors import WRAPPER_REMEDIES, ConfigurationError, Remedies, warn_caller
from megatron_fsdp.formats.fp8_linear import Fp8Quantizer, emulation_note
from megatron_fsdp.formats.quantized import STORED_DTYPE, stored_note
from megatron_fsdp.formats.tensor_extensions import ExtensionQuantizer, tensor_extension_of
from megatron_fsdp.hang.watch import start_logging
from megatron_fsdp.optim.watch import watch_optimizers
from megatron_fsdp.sharding.units import ParameterOwners, UnitPlan
from megatron_fsdp.state.state_dict import convert_expert_names, describe_in_state_dicts

DOING = "sharding the model"
"""In messages, where a rank cannot go on."""

KnownSpecs = dict[int, tuple[ShardSpec, ...]]
"""The shard specs of groups by the id of their layout: groups with one layout are cut alike."""


def shard_unit(
    name: str,
    modules: Mapping[str, nn.Module],
    plans: Sequence[GroupPlan],
    parameters: dict[str, nn.Parameter],
    owners: dict[int, ParameterOwners],
    mode: SyncMode,
    known: KnownSpecs,
    index: int = 0,
    objects: Mapping[int, nn.Parameter] = MappingProxyType({}),
) -> Unit:
    """Shard the parameters of one unit in place: at once, on this rank alone, without communication.

    If it fails, the modules hold what they held, and `objects` are as they were.

    Args:
        name: For messages: the path of its module.
        modules: By path; none where parameters were grouped in another way.
        plans: Of its parameter groups.
        parameters: The original parameters by canonical name; those of the unit are taken out, and freed.
        owners: Modules and attributes that hold each original, by its id; those of the unit are taken out.
        mode: When its gradients are reduced.
        known: Shard specs of groups that were sharded before; added to.
        index: Its position among the units, where that is known already.
        objects: By the id of an original the parameter, of an optimizer say, that becomes the sharded one; new ones
            are made for the others.
    """
    groups, held_by, of_groups = [], [], []
    for plan in plans:
        specs = tuple(spec.for_another() for spec in known.get(id(plan.layout), ()))
        if not specs:
            specs = known[id(plan.layout)] = tuple(map(plan.shard_spec, range(len(plan.spec.parameters))))
        originals = [parameters.pop(info.name) for info in plan.spec.parameters]
        held_by.append([owners.pop(id(original)) for original in originals])
        groups.append(ParameterGroup(plan, originals, specs, _quantizer(plan, originals, held_by[-1])))
        of_groups.append(originals)
    for group, originals in zip(groups, of_groups, strict=True):  # all memory is there, so nothing can fail
        group.take_over(originals, objects)
    by_owner = [[[ParameterPlace.of(*place) for place in places] for places in of_group] for of_group in held_by]
    unit = Unit(index, name, groups, by_owner, modules, mode)
    unit.to_sharded()
    describe_in_state_dicts(unit, modules.values())
    for module in modules.values():
        refuse_torch(module)
    return unit


class AppliedInterfaces(dict[Any, object]):
    """The composable interfaces of torch that were applied to a sharded module, which torch asks before the next one.

    Its `fully_shard` would take sharded parameters for tensor-parallel ones.
    """

    def __contains__(self, interface: object) -> bool:
        """Raise if torch's `fully_shard` asks."""
        if getattr(interface, "__name__", interface) == "fully_shard":
            raise ConfigurationError(
                "this module is sharded by megatron_fsdp already; leave torch's fully_shard out, or call it instead"
            )
        return super().__contains__(interface)


def check_not_wrapped(module: object) -> None:
    """Raise for a model that is no module, or that torch or this package has wrapped even partly. No communication."""
    if not isinstance(module, nn.Module):
        given = f"the class {module.__name__}" if isinstance(module, type) else f"an object of {type(module).__name__}"
        raise TypeError(f"{given} was given where a model is wanted; give a torch.nn.Module")
    for name, inner in module.named_modules():
        at = f" at {name}" if name else ""
        if isinstance(inner, DistributedDataParallel):
            raise ConfigurationError(
                f"the model{at} is in torch's DistributedDataParallel, which replicates what is to be sharded here; "
                "give the module inside it (.module)"
            )
        if isinstance(inner, FSDPModule | FullyShardedDataParallel):
            by = "FSDP2 (torch's fully_shard)" if isinstance(inner, FSDPModule) else "FullyShardedDataParallel (FSDP1)"
            raise ConfigurationError(
                f"the model{at} is sharded by {by} already; leave that out and give the plain model"
            )


def has_tensor_classes(module: nn.Module) -> bool:
    """Return True if a parameter that is not sharded yet is of a class of its own, as quantised weights are."""
    return any(type(p) is not nn.Parameter and not isinstance(p, UnevenDTensor) for p in module.parameters())


def compiled_in_place(module: nn.Module) -> nn.Module:
    """Return the module in the `OptimizedModule` of `torch.compile(module)`, compiled in place; any other as it is."""
    if "torch._dynamo" not in sys.modules:
        return module  # nothing can have been compiled
    module = _unboxed(module)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = _unboxed(child)
    return module


def _unboxed(module: nn.Module) -> nn.Module:
    if not isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
        return module
    inner, context = module._orig_mod, getattr(module, "dynamo_ctx", None)
    if context is None:
        raise ConfigurationError(
            f"the options with which a {type(inner).__name__} was compiled cannot be read; compile it in place by "
            "module.compile(...) instead of torch.compile(module, ...)"
        )
    inner._compiled_call_impl = context(inner._call_impl)
    return inner


def refuse_torch(module: nn.Module) -> None:
    """Have torch's `fully_shard` of a sharded module, and of those inside, raise before it changes anything."""
    for inner in module.modules():
        inner.__dict__.setdefault(REGISTRY_KEY, AppliedInterfaces())


def _quantizer(
    plan: GroupPlan, params: Sequence[nn.Parameter], owners: Sequence[ParameterOwners]
) -> WeightQuantizer | None:
    """Make the quantizer of a group's weight format; None for a plain dtype."""
    if plan.weight_format is None:
        return None
    if not plan.stays_encoded:
        return WeightQuantizer(plan.weight_format, plan.layout, plan.device)
    named = zip(plan.spec.parameters, params, owners, strict=True)
    found = [tensor_extension_of(info.name, param, places[0][0]) for info, param, places in named]
    extensions = [extension for extension in found if extension is not None]
    return ExtensionQuantizer(plan, extensions) if extensions else Fp8Quantizer(plan)


class ModuleEvents:
    """The source of the engine's events: hooks on the modules of units."""

    engine_type: ClassVar[type[Engine]] = Engine

    def make_scheduler(self, config: ScheduleConfig, units: Sequence[Unit]) -> Scheduler:  # noqa: ARG002
        """Make the scheduler of sharded units."""
        return Scheduler(config)

    def connect(self, engine: Engine, root: nn.Module | None) -> None:
        """Register the hooks on the model and its modules."""
        register_hooks(engine, root)


def finish(
    units: tuple[Unit, ...],
    unit_plan: UnitPlan,
    roots: Mapping[str, nn.Module],
    ranks: Ranks,
    options: EngineOptions,
    *,
    events: ModuleEvents,
    expert_names: ExpertNames = TRIVIAL_NAMES,
    delayed: DelayedGradients | None = None,
    remedies: Remedies = WRAPPER_REMEDIES,
) -> Engine:
    """Make the engine of sharded units: memory, scheduler, executor, hooks and observers. Collective.

    The root is the first of `units`; it is empty where several modules have no unit above them. `roots` are the
    outermost sharded modules, by their path; the root alone has the empty one.
    """
    if options.skip_order is not None:
        remedies = replace(remedies, join=MEETING)
    kept = [unit.index for unit in units if not unit.reshard_after_forward]
    plan = plan_memory(options.memory, options.reduces_early, [unit.group_plans for unit in units], kept)
    user_buffers = _user_buffers(plan, ranks, options)
    pool = CommunicationPool(ranks.device, plan.pool, None if user_buffers is None else user_buffers.allocate)
    for number, group in enumerate(group for unit in units for group in unit.groups):
        sent = group.plan.sent_dtype
        memory = pool.shard(number, group.plan.shard_bytes // sent.itemsize, sent)
        if memory is not None:
            group.move_into(memory)
    for unit in units:
        unit.find_gathered()
    _warn_of_dtypes(units, ranks, options)
    groups = [group for unit in units for group in unit.groups]
    notes, encoded = [], [group for group in groups if group.weights.quantizer is not None]
    if encoded:
        notes.append(emulation_note(encoded, ranks.device))
    if any(group.plan.precision.compute is STORED_DTYPE for group in groups):
        notes.append(stored_note(roots.values()))
    checks_gradients = options.report_nan_in_param_grad or options.check_for_large_grads
    checks: Sequence[GradientCheck] = ()
    if checks_gradients or ranks.meshes[0].tensor_parallel_group is not None:
        checks = make_checks(units, ranks.meshes, ranks.reaching_all, ranks.device, options)
    engine = events.engine_type(
        units=units,
        unit_plan=unit_plan,
        memory_plan=plan,
        scheduler=events.make_scheduler(plan.schedule, units)
        if options.skip_order is None
        else ordered_scheduler(plan.schedule, units, options.skip_order),
        executor=Executor(units, ranks.device, plan, pool),
        options=options,
        device=ranks.device,
        rank_meshes=ranks.meshes,
        reaching_all=ranks.reaching_all,
        structure=StructureCheck(roots, units),
        remedies=remedies,
        expert_names=expert_names,
        delayed=delayed,
        gradient_checks=checks,
        own_groups=ranks.own_groups,
        user_buffers=user_buffers,
        format_note="; ".join(filter(None, notes)),
        no_capture_reason=_no_capture_reason(ranks) if options.megatron_fsdp_cuda_graph_mode else "",
    )
    if engine.no_capture_reason:
        warn_caller(engine.notes[-1], is_first=ranks.is_first)
    if user_buffers is not None:
        if options.memory.user_buffers is not None and not options.memory.user_buffers.manual:
            user_buffers.register()
        if user_buffers.unsupported_reason:
            warn_caller(user_buffers.note, is_first=ranks.is_first)
    events.connect(engine, roots.get(""))
    if options.skip_order is not None:
        engine.on_pass = MatchedPasses(engine).begin
    for root in roots.values():
        units[0].state_dict_handles += convert_expert_names(engine, root)
    watch_optimizers(engine)
    answer_for_sharded_parameters(engine)
    if (log := resolve_hang_log()) is not None:  # ranks have agreed on that before
        start_logging(engine, log.folder, log.timeout_s)
    everyone = engine.rank_meshes[0].group
    if options.verify_ranks_s and everyone is not None:
        in_order = engine.reduces_in_fixed_order
        engine.observers.add(RankVerifier(everyone, units, options.verify_ranks_s, in_order, remedies.join))
    if resolve_check_lifetimes():
        check_lifetimes(engine)
    return engine


def _user_buffers(plan: MemoryPlan, ranks: Ranks, options: EngineOptions) -> UserBuffers | None:
    """Prepare the registration of communication memory, if asked for; ranks agree on the offsets of blocks."""
    asked = options.memory.user_buffers
    if asked is None or plan.pool is None:
        return None
    blocks = (f"a {block.use.value} of {block.num_bytes} bytes at {block.offset}" for block in plan.pool.blocks)
    facts = {f"block {number} of communication memory": block for number, block in enumerate(blocks)}
    raise_together(None, DOING, ranks.reaching_all, facts)
    axes = tuple(axis for rank_mesh in ranks.meshes for axis in rank_mesh.axes)
    return UserBuffers(axes, ranks.reaching_all, ranks.device, asked.symmetric)


def _no_capture_reason(ranks: Ranks) -> str:
    """Return the reason why no step of a model can be captured into a CUDA graph; empty if one can."""
    if ranks.device.type != "cuda":
        return f"the model is on {ranks.device.type}"
    if any(rank_mesh.foreign_groups for rank_mesh in ranks.meshes):
        return "ranks with different experts agree in every step, on the host, on which were used"
    groups = [axis.group for rank_mesh in ranks.meshes for axis in rank_mesh.axes]
    waiting = {backend_of(group) for group in groups if group is not None and not is_simulated(group)} - {"nccl"}
    return f"ranks communicate by {', '.join(sorted(waiting))}, which waits on the host" if waiting else ""


def _warn_of_dtypes(units: Sequence[Unit], ranks: Ranks, options: EngineOptions) -> None:
    trained = [group for unit in units for group in unit.groups if group.gradients is not None]
    narrowed = [group for group in trained if group.plan.precision.narrows]
    if narrowed:
        precision = narrowed[0].plan.precision
        warn_caller(
            f"{len(narrowed)} parameter groups compute in {precision.compute} and are optimised in "
            f"{precision.main_params}, which is narrower (first: {narrowed[0].names[0]}); set "
            "MixedPrecisionPolicy(main_params_dtype=None) to optimise them as they are",
            is_first=ranks.is_first,
        )
    if options.reduce_scatter_with_fp32_accumulation and ranks.meshes[0].num_ranks > 1:
        travelling = {group.plan.precision.grad_comm for group in trained}
        if travelling and all(dtype.itemsize > 2 for dtype in travelling):
            warn_caller(
                "reduce_scatter_with_fp32_accumulation=True changes no sum here, since gradients are communicated in "
                f"{', '.join(sorted(map(str, travelling)))} and are added in it; set grad_comm_dtype=torch.bfloat16 to "
                "halve what is sent, or leave the switch out",
                is_first=ranks.is_first,
            )
