"""Sharding in place, one call per unit: which parameters a call takes, and the engine of all calls together.

A module that was sharded in place owns its unit and, from `finish_in_place` on, the engine; both refer to modules
weakly, so that deleting a model frees its memory at once. Unlike a wrapper nothing here compares the weights of ranks,
or communicates before `finish_in_place`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import nn
from torch.nn.parameter import UninitializedParameter

from megatron_fsdp.comm.agreement import all_agree, default_if_all
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.engine.engine import ENGINE_ATTRIBUTE, Engine
from megatron_fsdp.engine.group_plan import GroupPlan, ModelSharding, Ranks, Sharding, plan_unit, with_offload
from megatron_fsdp.engine.param_group import replaced_name
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import WRAPPER_REMEDIES, ConfigurationError, Remedies, check_keys
from megatron_fsdp.sharding.mesh import RankMesh, groups_reaching_all, make_group_of_all_ranks
from megatron_fsdp.sharding.units import UnitPlan, UnitSpec, aliases_in, looked_up, parameter_owners
from megatron_fsdp.sharding.weight_formats import WeightFormat
from megatron_fsdp.wrap.shard_unit import KnownSpecs, ModuleEvents, finish, shard_unit

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


@dataclass
class KnownPlans:
    """Plans and shard specs that further calls share: equal blocks have one layout."""

    plans: dict[object, GroupPlan] = field(default_factory=dict)
    specs: KnownSpecs = field(default_factory=dict)


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
        sharding: Of all parameters but those in `apart`.
        mode: When gradients are reduced.
        known: Plans of the calls before; added to.
        ignored: Ids of parameters that stay as they are.
        objects: As of `shard_unit`.
        formats: By the id of an original the weight format in which it is gathered.
        apart: By the id of an original its sharding.

    Raises:
        ConfigurationError: A parameter belongs to another unit, too, or is lazy.
    """
    label = type(modules[0]).__name__
    tree = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    paths = {"": modules[0]} if len(modules) == 1 else {str(index): each for index, each in enumerate(modules)}
    owned = _owned_parameters(tree, ignored)
    _check_parameters(owned, label)
    formats_here = {name: formats[id(param)] for name, param in owned.items() if id(param) in formats}
    apart_here = {name: apart[id(param)] for name, param in owned.items() if id(param) in apart}
    model = ModelSharding(sharding, weight_formats=formats_here, lookups=looked_up(tree), apart=apart_here)
    plans = with_offload([plan_unit(owned, tuple(paths), model, known.plans)], sharding.options.offload)[0]
    unit = shard_unit(label, paths, plans, owned, parameter_owners(tree), mode, known.specs, objects=objects)
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
        if (taken := replaced_name(param)) is not None:
            raise ConfigurationError(
                f"{name} of {label} is tied to {taken}, which another unit owns already, and would be two parameters "
                "from now on; shard the modules that share it by one call"
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
