"""The two steps of sharding: `shard_unit` shards the parameters of a unit, `finish` makes an engine of sharded units.

Every public way to shard is a policy about these two: which modules are a unit, by which `Sharding`, and when all units
are there. `shard_in_place` and `finish_in_place` are the two for one call per unit: the module owns its unit and then
the engine, which refer to modules weakly, so that deleting a model frees its memory at once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from megatron_fsdp.comm.agreement import all_agree, default_if_all, raise_together
from megatron_fsdp.comm.collectives import backend_of, is_simulated
from megatron_fsdp.comm.registration import UserBuffers
from megatron_fsdp.config.engine_options import EngineOptions, resolve_check_lifetimes, resolve_hang_log
from megatron_fsdp.debug.gradient_checks import make_checks
from megatron_fsdp.debug.lifetimes import check_lifetimes
from megatron_fsdp.debug.verify_ranks import RankVerifier
from megatron_fsdp.dtensor.expert_names import TRIVIAL_NAMES, ExpertNames
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import ENGINE_ATTRIBUTE, Engine
from megatron_fsdp.engine.executor import DelayedGradients, Executor, GradientCheck
from megatron_fsdp.engine.hooks import answer_for_sharded_parameters, register_hooks
from megatron_fsdp.engine.matched_passes import MEETING, MatchedPasses, ordered_scheduler
from megatron_fsdp.engine.memory import CommunicationPool
from megatron_fsdp.engine.param_group import REPLACED, ParameterGroup
from megatron_fsdp.engine.plans import (
    GroupPlan,
    MemoryPlan,
    ModelSharding,
    Ranks,
    Sharding,
    plan_memory,
    plan_unit,
    with_offload,
)
from megatron_fsdp.engine.schedule import ScheduleConfig, Scheduler, SyncMode
from megatron_fsdp.engine.unit import ParameterPlace, StructureCheck, Unit
from megatron_fsdp.engine.weight_quantizer import WeightQuantizer
from megatron_fsdp.errors import WRAPPER_REMEDIES, ConfigurationError, Remedies, check_keys, warn_caller
from megatron_fsdp.formats.fp8_linear import Fp8Quantizer, emulation_note
from megatron_fsdp.formats.quantized import STORED_DTYPE, stored_note
from megatron_fsdp.formats.tensor_extensions import ExtensionQuantizer, tensor_extension_of
from megatron_fsdp.hang.watch import start_logging
from megatron_fsdp.optim.watch import watch_optimizers
from megatron_fsdp.sharding.mesh import RankMesh, groups_reaching_all, make_group_of_all_ranks
from megatron_fsdp.sharding.units import ParameterOwners, UnitPlan, UnitSpec, aliases_in, looked_up, parameter_owners
from megatron_fsdp.sharding.weight_formats import WeightFormat
from megatron_fsdp.state.state_dict import before_load, before_state_dict, convert_expert_names, describe_shards

DOING = "sharding the model"
"""In messages, where a rank cannot go on."""


# ---- modules that others have wrapped, compiled or would shard -------------------------------------------------------


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


def refuse_torch(module: nn.Module) -> None:
    """Have torch's `fully_shard` of a sharded module, and of those inside, raise before it changes anything."""
    for inner in module.modules():
        inner.__dict__.setdefault(REGISTRY_KEY, AppliedInterfaces())


# ---- the two functions -----------------------------------------------------------------------------------------------


@dataclass
class KnownPlans:
    """Plans of groups, and shard specs by the id of their layout, that further units share: equal blocks are alike."""

    plans: dict[object, GroupPlan] = field(default_factory=dict)
    specs: dict[int, tuple[ShardSpec, ...]] = field(default_factory=dict)


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


def shard_unit(
    name: str,
    modules: Mapping[str, nn.Module],
    plans: Sequence[GroupPlan],
    parameters: dict[str, nn.Parameter],
    owners: dict[int, ParameterOwners],
    mode: SyncMode,
    known: KnownPlans,
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
        known: Shard specs of units that were sharded before; added to.
        index: Its position among the units, where that is known already.
        objects: By the id of an original the parameter, of an optimizer say, that becomes the sharded one; new ones
            are made for the others.
    """
    groups, held_by, of_groups = [], [], []
    for plan in plans:
        specs = tuple(spec.for_another() for spec in known.specs.get(id(plan.layout), ()))
        if not specs:
            specs = known.specs[id(plan.layout)] = tuple(map(plan.shard_spec, range(len(plan.spec.parameters))))
        originals = [parameters.pop(info.name) for info in plan.spec.parameters]
        held_by.append([owners.pop(id(original)) for original in originals])
        groups.append(ParameterGroup(plan, originals, specs, _quantizer(plan, originals, held_by[-1])))
        of_groups.append(originals)
    for group, originals in zip(groups, of_groups, strict=True):  # all memory is there, so nothing can fail
        group.take_over(originals, objects)
    by_owner = [[[ParameterPlace.of(*place) for place in places] for places in of_group] for of_group in held_by]
    unit = Unit(index, name, groups, by_owner, modules, mode)
    unit.to_sharded()
    reference = weakref.ref(unit)
    for module in modules.values():
        module.register_state_dict_pre_hook(partial(before_state_dict, reference))
        refuse_torch(module)
    for owner in unit.owning_modules():
        owner.register_load_state_dict_pre_hook(partial(before_load, reference))
        unit.state_dict_handles.append(owner.register_state_dict_post_hook(partial(describe_shards, reference)))
    return unit


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
    groups = [group for unit in units for group in unit.groups]
    for number, group in enumerate(groups):
        sent = group.plan.sent_dtype
        memory = pool.shard(number, group.plan.shard_bytes // sent.itemsize, sent)
        if memory is not None:
            group.move_into(memory)
    for unit in units:
        unit.find_gathered()
    _warn_of_dtypes(groups, ranks, options)
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
    if not engine.expert_names.is_trivial:
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


def _warn_of_dtypes(groups: Sequence[ParameterGroup], ranks: Ranks, options: EngineOptions) -> None:
    trained = [group for group in groups if group.gradients is not None]
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


# ---- one call per unit -----------------------------------------------------------------------------------------------


WITHOUT_JOIN = (
    "every rank has to call the same units in the same order, and one that has nothing to compute with a unit calls it "
    "with any input and adds 0 times the result to its loss, or give ranks_may_skip_units=True where the model is "
    "sharded"
)
"""The remedy for ranks without data, where a model has no method for it."""
_UNIT = "_fsdp_unit"  # in the dictionary of a module that owns it


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of a module that was sharded in place; None for any other."""
    found: Unit | None = module.__dict__.get(_UNIT)
    return found


def shard_in_place(
    modules: Sequence[nn.Module],
    sharding: Sharding,
    mode: SyncMode,
    known: KnownPlans,
    ignored: frozenset[int] = frozenset(),
    objects: Mapping[int, nn.Parameter] = MappingProxyType({}),
    formats: Mapping[int, WeightFormat] = MappingProxyType({}),
    apart: Mapping[int, Sharding] = MappingProxyType({}),
) -> Unit:
    """Shard the parameters that modules own together, as one unit, on this rank alone.

    These are the parameters of the modules and of all modules inside, except those of units inside. If it fails,
    everything is as before.

    Args:
        modules: One module, or several that are gathered with the first of them.
        sharding: Of all parameters but those in `apart`. Of its options these are read here: the dtypes (`policy`),
            those of gradient factors, `deterministic`, `numel_multiple`, `megatron_fsdp_use_decoupled_grad`,
            `megatron_fsdp_cuda_graph_mode` and `offload`; all others by `finish_in_place`.
        mode: When gradients are reduced.
        known: Plans of the calls before; added to.
        ignored: Ids of parameters that stay as they are.
        objects: As of `shard_unit`.
        formats: By the id of an original the weight format in which it is gathered.
        apart: By the id of an original its sharding.

    Raises:
        ConfigurationError: A parameter belongs to another unit, too, or is sharded already, or is lazy.
    """
    label = type(modules[0]).__name__
    tree = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    paths = {"": modules[0]} if len(modules) == 1 else {str(index): each for index, each in enumerate(modules)}
    owned = _owned_parameters(tree, ignored)
    _check_parameters(owned, label)
    originals = dict(owned)
    formats_here = {name: formats[id(param)] for name, param in owned.items() if id(param) in formats}
    apart_here = {name: apart[id(param)] for name, param in owned.items() if id(param) in apart}
    model = ModelSharding(sharding, weight_formats=formats_here, lookups=looked_up(tree), apart=apart_here)
    plans = with_offload([plan_unit(owned, tuple(paths), model, known.plans)], sharding.options.offload)[0]
    unit = shard_unit(label, paths, plans, owned, parameter_owners(tree), mode, known, objects=objects)
    for name, param in originals.items():
        setattr(param, REPLACED, f"{name} of {label}")
    for module in modules:
        module.__dict__[_UNIT] = unit
    return unit


def _owned_parameters(tree: nn.Module, ignored: frozenset[int]) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by name, without those of units inside of it."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in module._parameters.items():
            if param is not None and id(param) not in ignored:
                yield prefix + name, param
        for name, child in module._modules.items():
            if child is not None and unit_of(child) is None:
                yield from walk(child, f"{prefix}{name}.")

    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in walk(tree, ""):
        found.setdefault(id(param), (name, param))
    return dict(found.values())


def _check_parameters(params: Mapping[str, nn.Parameter], label: str) -> None:
    check_keys(params)
    for name, param in params.items():
        if (taken := getattr(param, REPLACED, None)) is not None:
            raise ConfigurationError(
                f"{name} of {label} is tied to {taken}, which another unit owns already, and would be two parameters "
                "from now on; shard the modules that share it by one call"
            )
        if isinstance(param, UnevenDTensor):
            raise ConfigurationError(
                f"{name} of {label} is sharded already; shard a module once, and inner modules before those around them"
            )
        if isinstance(param, UninitializedParameter):
            raise ConfigurationError(
                f"{name} of {label} is not initialised yet; run one forward before sharding, so that lazy modules know "
                "their shapes"
            )


def units_inside(root: nn.Module) -> Iterator[tuple[str, nn.Module, Unit]]:
    """Iterate over the units of a module tree: path, module and unit, outer ones first."""
    for path, module in root.named_modules():
        if (unit := unit_of(module)) is not None:
            yield path, module, unit


def finish_in_place(
    roots: Sequence[nn.Module],
    options: EngineOptions,
    mode: SyncMode,
    remedies: Remedies = WRAPPER_REMEDIES,
    error: BaseException | None = None,
    source: str = "one call per unit",
) -> Engine:
    """Make the engine of modules that were sharded in place, and hand it to them. Collective.

    `options`: of memory and schedule, checks and observers; those that shaped the groups were in their `Sharding`.
    `roots` are the outermost sharded modules, in the order in which a forward calls them; where there are several,
    `mode` has the switches of the empty root unit. `error` is this rank's, with which it cannot go on: raised on all.
    `source` says how the units were found.

    Raises:
        ConfigurationError: Ranks have sharded different units, or in different ways.
    """
    by_path = {"": roots[0]} if len(roots) == 1 else {str(number): root for number, root in enumerate(roots)}
    units, specs = _located(by_path, mode)
    meshes = tuple({id(plan.rank_mesh): plan.rank_mesh for unit in units for plan in unit.group_plans}.values())
    for rank_mesh in meshes:
        make_group_of_all_ranks(rank_mesh)
        with all_agree("sharding modules", default_if_all((rank_mesh.group,)) or (None,)) as facts:
            if error is not None:
                raise error
            facts |= _facts(units, rank_mesh) | {"ranks_may_skip_units": str(options.skip_order)}
    device = next(plan.device for unit in units for plan in unit.group_plans)
    ranks = Ranks(device=device, meshes=meshes, reaching_all=groups_reaching_all(meshes))
    memory = replace(options.memory, slots=options.memory.slots + _depth(by_path) - 1)
    named = (each for path, root in by_path.items() for each in root.named_parameters(path, remove_duplicate=False))
    unit_plan, options = UnitPlan(specs, source, aliases_in(named)), replace(options, memory=memory)
    engine = finish(units, unit_plan, by_path, ranks, options, events=ModuleEvents(), remedies=remedies)
    for root in roots:
        for _, module, _ in units_inside(root):
            module.__dict__[ENGINE_ATTRIBUTE] = engine
    return engine


def _located(roots: Mapping[str, nn.Module], mode: SyncMode) -> tuple[tuple[Unit, ...], tuple[UnitSpec, ...]]:
    """Name and number the units of all roots, and return them with their specifications, the root first."""
    paths: dict[int, list[str]] = {}
    found: dict[int, tuple[Unit, list[str], str]] = {}
    for prefix, root in roots.items():
        for path, module in root.named_modules(prefix=prefix):
            paths.setdefault(id(module), []).append(path)
            if (unit := unit_of(module)) is not None:
                found.setdefault(id(unit), (unit, [], unit.name))[1].append(path)
    units, specs = [], []
    if "" not in roots:  # nothing surrounds all forwards
        units.append(Unit(0, "", (), (), {}, mode))
        specs.append(UnitSpec("", (), "", ()))
    for unit, at, class_name in found.values():
        unit.locate(len(units), at, {key: of_module[0] for key, of_module in paths.items()})
        specs.append(
            UnitSpec(unit.name, tuple(name for group in unit.groups for name in group.names), class_name, tuple(at))
        )
        units.append(unit)
    return tuple(units), tuple(specs)


def _depth(roots: Mapping[str, nn.Module]) -> int:
    """Count the units, besides the root, that are inside one another at most: all of them are gathered at a time."""

    def depth(module: nn.Module, around: int) -> int:
        around += unit_of(module) is not None
        return max([around, *(depth(child, around) for child in module.children())])

    return max(1, *(depth(root, -1 if path == "" else 0) for path, root in roots.items()))


def _facts(units: Sequence[Unit], rank_mesh: RankMesh) -> dict[str, str]:
    """List the facts that all ranks of a rank mesh must have in common."""
    return {
        f"parameter {info.name}": f"{info.shape} {info.key.dtype} requires_grad={info.key.requires_grad}, "
        f"{group.plan.placements}, {group.plan.precision}, in unit {unit.label}"
        for unit in units
        for group in unit.groups
        if group.plan.rank_mesh is rank_mesh
        for info in group.plan.spec.parameters
    }
