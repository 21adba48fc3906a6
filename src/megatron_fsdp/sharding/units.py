"""The units of a model: the modules whose parameters are gathered and released together.

Nothing here changes the model. A unit is the outermost module that matches, so units never lie inside one another;
parameters outside of units belong to the root. So does a parameter that is reachable through two units, or through a
unit and the root, since it is needed outside any one unit.
"""

import dis
import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from types import CodeType
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from megatron_fsdp.config.engine_options import MemoryOptions
from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.weight_formats import WeightFormat

READ_INNER_PARAMETERS: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Torch's classes that read parameters of submodules without calling these."""

_END_TYPES = (nn.Embedding, nn.Linear)
_ALTERNATIVES = (nn.ModuleDict, nn.ModuleList)
"""Containers whose owner may choose a module by key or index, so that ranks may call different modules."""

_LEAST_SHARE = 1 / 4
_LEAST_SHARE_BESIDE_NAMED = 1 / 2
"""An embedding or head with a smaller share of the parameters of the largest block stays in the root. Beside units that
were named it has to save more memory."""


def large_ends(
    module: nn.Module, blocks: Mapping[str, nn.Module], least_share: float = _LEAST_SHARE
) -> dict[str, nn.Module]:
    """Find the embeddings and linear layers outside of blocks that are large enough to be units.

    In the root they would stay gathered from the beginning of forward to the end of backward, and share its bucket. An
    end is an `nn.Embedding` or `nn.Linear` (or of a subclass)

    * without modules inside, and outside of every block;
    * whose parameters belong to it alone: tied weights are needed in two places;
    * with at least `least_share` of the parameters of the largest block. A smaller one would add a collective and save
      next to nothing beside a slot and a bucket;
    * that every rank calls: not inside a `ModuleDict` or `ModuleList`, nor anything named after experts; and that is
      called rather than read: not inside torch's attention and encoder layers, nor read by a forward outside of it,
      such as `self.head.weight` (as far as its code shows).
    """
    if not blocks:
        return {}
    inside = {id(block) for block in blocks.values()}
    read = {
        ".".join(filter(None, (path, *attributes)))
        for path, owner in (("", module), *_outside(module, inside))
        for attributes in _attributes_read(type(owner))
    }
    least_numel = max(_numel(block) for block in blocks.values()) * least_share
    owners = parameter_owners(module)
    return {
        name: candidate
        for name, candidate in _outside(module, inside)
        if isinstance(candidate, _END_TYPES)
        and next(candidate.children(), None) is None
        and all(owner is candidate for param in candidate.parameters() for owner, _ in owners[id(param)])
        and _numel(candidate) >= least_numel
        and read.isdisjoint(f"{name}.{attribute}" for attribute in candidate._parameters)
    }


def ends_of_vocabulary(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Find the large ends beside units that were named: an embedding, and a linear layer to its vocabulary.

    Every rank calls these two. Other layers outside of the units may be called on some ranks only, which the root
    allows and a unit does not.
    """
    ends = large_ends(module, blocks, _LEAST_SHARE_BESIDE_NAMED)
    rows = {end.num_embeddings for end in ends.values() if isinstance(end, nn.Embedding)}
    outputs = {end.out_features for end in ends.values() if isinstance(end, nn.Linear)}
    sizes = {
        name: end.num_embeddings if isinstance(end, nn.Embedding) else end.out_features for name, end in ends.items()
    }
    return {name: end for name, end in ends.items() if sizes[name] in rows & outputs}


_METADATA = frozenset(("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad"))
"""Attributes of a parameter that are the same while it is sharded."""


def _attributes_read(kind: type[nn.Module]) -> Iterator[tuple[str, ...]]:
    """Yield ("head", "weight") for each `self.head.weight` in a forward, or in a method that it names."""
    names = ["forward"]
    for name in names:  # which grows
        methods = [vars(base)[name] for base in kind.__mro__ if base is not nn.Module and name in vars(base)]
        functions = [inspect.unwrap(getattr(method, "fget", None) or method) for method in methods]
        codes = [function.__code__ for function in functions if inspect.isfunction(function)]
        for code in codes:  # which grows
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            names += [used for used in code.co_names if not (used in names or hasattr(nn.Module, used))]
            chain: list[str] | None = None
            for instruction in dis.get_instructions(code):
                if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain is not None:
                    chain.append(instruction.argval)
                    continue
                if chain and _METADATA.isdisjoint(chain):
                    yield from (tuple(chain[:length]) for length in range(2, len(chain) + 1))
                # One instruction may load two names, "x, self".
                is_self = "LOAD" in instruction.opname and instruction.argrepr.rpartition(", ")[2] == "self"
                chain = [] if is_self else None


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the named modules, but the model itself, that lie outside of blocks and that every rank calls."""
    inside = {id(part) for block in module.modules() if id(block) in blocks for part in block.modules()}
    seen: set[int] = set()

    def walk(name: str, owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child_name, child in owner.named_children():
            if "expert" in child_name or id(child) in inside | seen:
                continue
            seen.add(id(child))
            path = f"{name}.{child_name}" if name else child_name
            yield path, child
            if not isinstance(child, (*_ALTERNATIVES, *READ_INNER_PARAMETERS)):
                yield from walk(path, child)

    if not isinstance(module, (*_ALTERNATIVES, *READ_INNER_PARAMETERS)):
        yield from walk("", module)


ParameterOwners = tuple[tuple[nn.Module, str], ...]
"""The modules that hold a parameter, and the attribute of each, in module order; several for a tied one."""


def parameter_owners(module: nn.Module) -> dict[int, ParameterOwners]:
    """Return the owners of each parameter, by its id."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((owner, attribute))
    return {key: tuple(found) for key, found in owners.items()}


def looked_up(module: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters that only `nn.Embedding` modules without hooks hold.

    Their gradient is made of indices and of the gradient of what was looked up: the backward of a unit that is such a
    module needs no weights. Hooks may compute with the weights, and are counted where they are there before wrapping:
    later ones see sharded parameters.
    """
    owners, looking = parameter_owners(module), set()
    for inner in module.modules():
        if type(inner) is nn.Embedding and not any(getattr(inner, name) for name in _HOOKS):
            looking.add(inner)
    return frozenset(
        name for name, param in module.named_parameters() if looking.issuperset(owner for owner, _ in owners[id(param)])
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _numel(module: nn.Module) -> int:
    """Count the elements of a module's parameters; lazy ones count as none."""
    return sum(param.numel() for param in module.parameters() if not isinstance(param, UninitializedParameter))


ROOT_UNIT = 0
"""Index of the root among the units of a model."""

_CLASSES_LISTED = 10


@dataclass(frozen=True)
class UnitSpec:
    """One unit."""

    name: str  # for messages: the path of its module, "" for the root, layers.0..3 for neighbours
    parameters: tuple[str, ...]  # canonical names of those that it owns, in model order
    class_name: str  # of its modules
    # Paths of its modules, in model order: one, or several small neighbours; none where parameters were grouped
    # in another way, under a made-up name.
    modules: tuple[str, ...]
    is_end: bool = False  # an embedding or a linear layer that was found beside the blocks

    @classmethod
    def of_module(cls, path: str, parameters: Sequence[str], class_name: str, is_end: bool = False) -> "UnitSpec":
        """Return the unit of one module."""
        return cls(path, tuple(parameters), class_name, (path,), is_end)


@dataclass(frozen=True)
class UnitPlan:
    """All units of a model."""

    units: tuple[UnitSpec, ...]  # the root first (also where it owns nothing), then the others in module order
    source: str  # how the units were found, in words
    # (further name, canonical name) of tied parameters; the canonical name is the first in model order
    aliases: tuple[tuple[str, str], ...]
    block_classes: tuple[str, ...] = ()  # class names of the units that are no ends, where there are ends

    def remedy(self, unit: UnitSpec) -> str:
        """Return the advice for a forward that reads a unit's weight without calling it."""
        classes = self.block_classes or {each.class_name: None for each in self.units[ROOT_UNIT + 1 :]}
        others = [name for name in classes if unit.is_end or name != unit.class_name]
        without = " and disable_bucketing=True" if unit.is_end else f", without {unit.class_name}"
        return (
            f"call the module, or give fsdp_unit_modules=[{', '.join(others)}]{without}, so that the weight stays with "
            "the root, which is whole during the whole forward"
        )


def find_units(
    module: nn.Module,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | Literal["auto"] | None,
    *,
    adds_ends: bool = False,
    least_end_bytes: int = 0,
) -> UnitPlan:
    """Find the units of a model.

    * Classes or import paths (``"package.module.Class"`` or ``"package.module:Class"``): every outermost instance, and
      with `adds_ends` large ends as below. Where the model itself is an instance, it is the root and there are no other
      units. An empty sequence: no units.
    * None or ``"auto"``: the classes that the model names in ``_no_split_modules``, as Hugging Face models do; else
      repeated blocks, which are the children of a ``ModuleList`` or ``Sequential`` of which at least two share a class.
      Beside them, embeddings and linear layers that are large (`large_ends` has the rule).

    Ends below `least_end_bytes` stay in the root.

    Modules without parameters are never units, nor is a module that owns none of its parameters because all are tied to
    others outside.
    """
    if fsdp_unit_modules is None or fsdp_unit_modules == "auto":
        found, source = _find_blocks(module)
        ends = large_ends(module, found)
    else:
        classes = _resolve_classes(module, fsdp_unit_modules)
        found = _outermost(module, lambda candidate: isinstance(candidate, classes))
        _check_matches(module, classes, found)
        names = ", ".join(cls.__name__ for cls in classes)
        source = f"given classes {names}" if classes else "no classes given"
        ends = ends_of_vocabulary(module, found) if adds_ends and "" not in found else {}
    ends = {
        name: end for name, end in ends.items() if sum(param.nbytes for param in end.parameters()) >= least_end_bytes
    }
    if ends:
        ids = {id(unit) for unit in (*found.values(), *ends.values())}
        found = _outermost(module, lambda candidate: id(candidate) in ids)
        source = f"{source}; large ends {', '.join(ends)}"
    return _plan(module, found, ends, source)


def _resolve_classes(module: nn.Module, given: object) -> tuple[type[nn.Module], ...]:
    if not isinstance(given, Sequence | AbstractSet) or isinstance(given, str):
        shown = given.__name__ if isinstance(given, type) else repr(given)
        raise TypeError(
            f"fsdp_unit_modules={shown} is not a list of classes or import paths; write fsdp_unit_modules=[...], "
            'or "auto" to look for repeated blocks.'
        )
    in_model = tuple(dict.fromkeys(f"{type(m).__module__}.{type(m).__qualname__}" for m in module.modules()))
    classes = []
    for entry in given:
        cls = import_by_path(entry, "fsdp_unit_modules", suggestions=in_model) if isinstance(entry, str) else entry
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"fsdp_unit_modules has the entry {entry!r}, which is not a subclass of torch.nn.Module; give classes."
            )
        classes.append(cls)
    if isinstance(given, AbstractSet):  # whose order differs from run to run
        classes.sort(key=lambda cls: (cls.__module__, cls.__qualname__))
    return tuple(dict.fromkeys(classes))


def _check_matches(module: nn.Module, classes: tuple[type[nn.Module], ...], found: Mapping[str, nn.Module]) -> None:
    occurring = [candidate for candidate in module.modules() if _holds_parameters(candidate)]
    for cls in classes:
        if not any(isinstance(candidate, cls) for candidate in occurring):
            counts = Counter(type(candidate).__name__ for candidate in occurring).most_common(_CLASSES_LISTED)
            listed = ", ".join(f"{name} ({count} x)" for name, count in counts) or "none"
            raise ConfigurationError(
                f"fsdp_unit_modules names {cls.__name__}, but no module of that class holds parameters in this model; "
                f"classes that do: {listed}."
            )
    for name, candidate in found.items():
        if name and not has_forward(candidate):
            raise ConfigurationError(
                f"fsdp_unit_modules names {type(candidate).__name__}, but {name!r} of that class has no forward of its "
                "own, so nothing says when its parameters are needed; name the class of the modules inside it."
            )


def _find_blocks(module: nn.Module) -> tuple[dict[str, nn.Module], str]:
    declared = [getattr(candidate, "_no_split_modules", None) for candidate in module.modules()]
    lists = [names for names in declared if isinstance(names, (list, tuple, set, frozenset))]
    class_names = {name for names in lists for name in names if isinstance(name, str)}
    found = _outermost(module, lambda candidate: type(candidate).__name__ in class_names and has_forward(candidate))
    if found:
        occurring = dict.fromkeys(type(candidate).__name__ for candidate in found.values())
        return found, f"_no_split_modules {', '.join(occurring)}"
    blocks = _repeated_blocks(module)
    found = _outermost(module, lambda candidate: id(candidate) in blocks)
    return (found, "repeated blocks") if found else ({}, "none found")


def outside_of_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules outside of all blocks, by name."""
    listed = [child for each in module.modules() if isinstance(each, nn.ModuleList) for child in each.children()]
    blocks = [block for block in (*_find_blocks(module)[0].values(), *listed) if next(block.children(), None)]
    inside = {id(part) for block in blocks for part in block.modules()}
    return {name: each for name, each in module.named_modules() if id(each) not in inside}


def _repeated_blocks(module: nn.Module) -> set[int]:
    """Return the ids of blocks: items of a list that have parameters, a forward and a sibling of their class."""
    blocks: set[int] = set()
    for name, container in module.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        if "expert" in name.rpartition(".")[2]:
            continue  # chosen by data: ranks would call different ones, and all must call the same units
        # children() yields a child that was put in twice once: one block called twice repeats nothing.
        children = [child for child in container.children() if _holds_parameters(child) and has_forward(child)]
        counts = Counter(type(child) for child in children)
        blocks.update(id(child) for child in children if counts[type(child)] > 1)
    return blocks


def _outermost(module: nn.Module, is_unit: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the outermost matching modules with parameters, by path."""

    def walk(name: str, candidate: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if _holds_parameters(candidate) and is_unit(candidate):
            yield name, candidate
            return
        for child_name, child in candidate._modules.items():  # named_children() leaves out second names
            if child is not None:
                yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return dict(walk("", module))


def _plan(module: nn.Module, found: Mapping[str, nn.Module], ends: Mapping[str, nn.Module], source: str) -> UnitPlan:
    """Build the plan: assign every parameter to its unit."""
    first_paths: dict[int, str] = {}
    for path, unit_module in found.items():
        if path:  # a match at the root is the root
            first_paths.setdefault(id(unit_module), path)
    owner_of_path = {path: first_paths[id(unit_module)] for path, unit_module in found.items() if path}

    aliases = aliases_in(module.named_parameters(remove_duplicate=False))
    canonical = dict(aliases)
    owners: dict[str, set[str]] = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        owners.setdefault(canonical.get(name, name), set()).add(_owner(name, owner_of_path))

    owned: dict[str, list[str]] = {path: [] for path in ("", *first_paths.values())}
    for name, paths in owners.items():
        owned[paths.pop() if len(paths) == 1 else ""].append(name)
    units = tuple(
        UnitSpec.of_module(path, names, type(module.get_submodule(path)).__name__, is_end=path in ends)
        for path, names in owned.items()
        if names or not path
    )
    blocks = dict.fromkeys(unit.class_name for unit in units[ROOT_UNIT + 1 :] if not unit.is_end)
    return UnitPlan(units, source, aliases, tuple(blocks) if ends else ())


def aliases_in(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[tuple[str, str], ...]:
    """Return further and canonical names of tied parameters, of named ones with all their names."""
    first: dict[int, str] = {}
    return tuple((name, known) for name, param in named if (known := first.setdefault(id(param), name)) != name)


def _owner(parameter_name: str, owner_of_path: Mapping[str, str]) -> str:
    """Return the unit that holds a parameter, if any; units are outermost, so at most one does."""
    parts = parameter_name.split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((owner_of_path[prefix] for prefix in prefixes if prefix in owner_of_path), "")


def _holds_parameters(module: nn.Module) -> bool:
    """Return True if a module has parameters."""
    if any(param is not None for param in module._parameters.values()):
        return True
    return any(child is not None and _holds_parameters(child) for child in module._modules.values())


def has_forward(module: nn.Module) -> bool:
    """Return True if the module can be called; containers such as ``ModuleList`` inherit a forward that raises."""
    return type(module).forward is not nn.Module.forward


def refine_units(module: nn.Module, plan: UnitPlan, whole_types: tuple[type[nn.Module], ...] = ()) -> UnitPlan:
    """Split every unit into the modules that own its parameters, for fine-grained gathers.

    A parameter goes with the module that registers it; with an outer one where that cannot be called by itself, or
    where an outer one inside the unit is of a class in `whole_types`. Parameters that several such modules share belong
    to the root.
    """
    other_names: dict[str, list[str]] = {}
    for alias, canonical in plan.aliases:
        other_names.setdefault(canonical, []).append(alias)
    root = plan.units[ROOT_UNIT]
    shared: list[str] = []
    owned: dict[str, list[str]] = {}
    for unit in plan.units[ROOT_UNIT + 1 :]:
        for name in unit.parameters:
            # A tied parameter may have names elsewhere in its unit; those outside would have made it the root's. Names
            # under a second path of the unit are left out.
            inside = (each for each in (name, *other_names.get(name, ())) if each.startswith(f"{unit.name}."))
            paths = (_owning_module(module, unit.name, each, whole_types) for each in inside)
            owners = {id(module.get_submodule(path)): path for path in paths}
            if len(owners) > 1:
                shared.append(name)
            else:
                owned.setdefault(next(iter(owners.values())), []).append(name)
    ends = {unit.name for unit in plan.units if unit.is_end}
    finer = [
        UnitSpec.of_module(path, names, type(module.get_submodule(path)).__name__, is_end=path in ends)
        for path, names in owned.items()
    ]
    order = {name: position for position, (name, _) in enumerate(module.named_parameters())}
    of_root = tuple(sorted((*root.parameters, *shared), key=order.__getitem__))
    units = (UnitSpec.of_module(root.name, of_root, root.class_name), *finer)
    return UnitPlan(units, f"{plan.source}, fine-grained", plan.aliases, plan.block_classes)


def _owning_module(module: nn.Module, unit: str, parameter: str, whole_types: tuple[type[nn.Module], ...]) -> str:
    """Return the path of the module with which a parameter is gathered."""
    inner = parameter.removeprefix(f"{unit}.").split(".")[:-1]
    paths = [".".join((unit, *inner[:depth])) for depth in range(len(inner) + 1)]
    for path in paths:
        inside = module.get_submodule(path)
        if isinstance(inside, (*READ_INNER_PARAMETERS, *whole_types)) or is_parametrized(inside):
            return path
    return next(path for path in reversed(paths) if has_forward(module.get_submodule(path)))


_LATENCY_BYTES = 4 * 2**20
"""Messages below a few megabytes take the time of their latency, over gloo as over NCCL: 48 all-gathers of 0.8 MB take
twice the time of 12 of 3.2 MB (2 ranks, gloo), and 12 hardly more than 3 of 12.8 MB."""

_LATENCY_BYTES_PER_RANK = 2**20
"""Rings cut a message into one part for each rank."""


_WHOLE_BYTES = 25 * 2**20
"""As the buckets of torch's DDP: whole weights are never gathered, so nothing waits for a message but the step. They
have no slots, and mostly no buckets: gradients are reduced where they stay."""


_MOST_OF_A_SHARD = 1 / 8
"""A merged unit's share of the weights that a rank keeps. Two slots, two buckets and scratch are as large, so where few
activations are alive merging adds about a fifth of weights and Adam's state in one dtype."""

_UNITS_OF_A_LENGTH = 8
"""The last eight units of a model are as short as `MergeLimit.last` says, the eight before them may have a module more,
and so on. A backward begins at the end, while all activations are alive, and slots and buckets come on top of them;
when it reaches longer units, many activations are freed. 48 layers of width 128 (2 ranks, gloo) in 24 units of one to
three have the peak of 48 separate units, and their step takes no longer than that of 24 pairs."""


class MergeLimit(NamedTuple):
    """The sizes up to which neighbouring units are merged, in bytes or elements; 0: never."""

    size: int  # of any merged unit
    last: int  # of the last units of a model; equal to `size` where all may be as long


def merge_limit(unit_bytes: Sequence[int], num_ranks: int, num_shards: int, given: int | None = None) -> MergeLimit:
    """Return the limit in bytes: the given one, or by the number of ranks.

    0 on one rank, which sends nothing.

    It grows with the ranks as far as the peak does not: slots and buckets become as large as the largest unit anyway.
    Beyond that it is a small share of what a rank keeps, one of `num_shards` shards of the weights that are updated,
    and the last units are shorter. `unit_bytes` are those of the full weights of each unit, the root first.
    """
    if given is not None:
        return MergeLimit(given, given)
    if num_ranks == 1:
        return MergeLimit(0, 0)
    if num_shards == 1:
        return MergeLimit(_WHOLE_BYTES, _WHOLE_BYTES)
    largest = max(unit_bytes[ROOT_UNIT + 1 :], default=0)
    fast = max(_LATENCY_BYTES, min(num_ranks * _LATENCY_BYTES_PER_RANK, largest))
    share = int(_MOST_OF_A_SHARD * sum(unit_bytes) / num_shards)
    return MergeLimit(min(fast, max(largest, share)), min(fast, largest))


def plan_units(
    module: nn.Module,
    unit_modules: Sequence[type[nn.Module] | str] | str | None,
    memory: MemoryOptions,
    num_ranks: int,
    num_shards: int,
    *,
    shapes_are_alike: bool,
) -> UnitPlan:
    """Find the units of a model; split them for fine-grained all-gathers, or merge small neighbours; it is only read.

    `num_ranks` are data-parallel ones, of which `num_shards` hold different parts of the weights that are updated.
    `shapes_are_alike`: all ranks hold tensors of the same shapes. Experts and tensor-parallel parts may not, and then
    nothing is merged, since all ranks have to merge the same.
    """
    # Where weights and buckets stay whole, an end by itself saves no memory, and a small one is a message more.
    least_end_bytes = _LATENCY_BYTES if num_shards == 1 < num_ranks else 0
    plan = find_units(module, unit_modules, adds_ends=memory.cuts_root, least_end_bytes=least_end_bytes)
    memory.check_plan(len(plan.units) - 1)
    if memory.fine_grained:
        return refine_units(module, plan, memory.whole_types)
    if not shapes_are_alike:
        return plan
    params = dict(module.named_parameters())
    held = [sum(params[name].nbytes for name in unit.parameters) for unit in plan.units]
    if memory.message_bytes is None and memory.communication_unit_numel is not None:
        numels = [sum(params[name].numel() for name in unit.parameters) for unit in plan.units]
        given = memory.communication_unit_numel
        return merge_small_units(plan, numels, MergeLimit(given, given))
    return merge_small_units(plan, held, merge_limit(held, num_ranks, num_shards, memory.message_bytes))


def merge_small_units(plan: UnitPlan, sizes: Sequence[int], limit: MergeLimit) -> UnitPlan:
    """Merge runs of small neighbouring units, up to a limit, so that each run is one all-gather.

    Units of one class are merged as `small_neighbours` says; ends stay apart. `sizes` are bytes or elements, as the
    limit is; the root's comes first.
    """
    root, *others = plan.units
    kinds = [f"end {unit.name}" if unit.is_end else unit.class_name for unit in others]
    runs = small_neighbours([unit.name for unit in others], kinds, sizes[ROOT_UNIT + 1 :], limit)
    return replace(plan, units=(root, *(_merged([others[index] for index in run]) for run in runs)))


def small_neighbours(
    paths: Sequence[str], kinds: Sequence[object], sizes: Sequence[int], limit: MergeLimit
) -> list[tuple[int, ...]]:
    """Return runs of small neighbouring modules, by position; a module without neighbours is a run by itself.

    Neighbours are numbered modules of one kind in one list, one behind the other, such as `layers.3` and `layers.4`.
    Under one limit they are cut into as few runs as it allows, as even as possible. With a smaller one for the last
    units the runs at the end of the model are short, and those before them longer (`_UNITS_OF_A_LENGTH`).
    """
    by_place = groupby(range(len(paths)), key=lambda index: (_place(paths[index], index), kinds[index]))
    found: list[tuple[int, ...]] = []  # from the last one on
    for run in reversed([tuple(numbered) for _, numbered in by_place]):
        most, shortest = (max(1, bound // max(1, *(sizes[index] for index in run))) for bound in limit)
        if shortest == most:
            parts = -(-len(run) // most)
            cuts = [len(run) * part // parts for part in range(parts, -1, -1)]
            found += [run[start:stop] for stop, start in pairwise(cuts)]
            continue
        stop = len(run)
        while stop:
            start = max(0, stop - min(most, shortest + len(found) // _UNITS_OF_A_LENGTH))
            found.append(run[start:stop])
            stop = start
    return found[::-1]


def _place(path: str, position: int) -> tuple[object, ...]:
    """Return the key of neighbours: the path of their list, and the difference of their numbers and positions."""
    parent, _, last = path.rpartition(".")
    return (parent, int(last) - position) if last.isdigit() else (position,)


def name_of_neighbours(paths: Sequence[str]) -> str:
    """Return the name of a unit for messages: the path of its module, `layers.0..3` for several."""
    (parent, _, _), (other, _, last) = paths[0].rpartition("."), paths[-1].rpartition(".")
    return paths[0] if len(paths) == 1 else f"{paths[0]}..{last if parent == other else paths[-1]}"


def _merged(units: Sequence[UnitSpec]) -> UnitSpec:
    first, last = units[0], units[-1]
    if first is last:
        return first
    return UnitSpec(
        name_of_neighbours([unit.name for unit in units]),
        tuple(name for unit in units for name in unit.parameters),
        first.class_name,
        tuple(path for unit in units for path in unit.modules),
    )


@dataclass(frozen=True)
class GroupKey:
    """The properties that parameters of one group have in common."""

    dtype: torch.dtype  # in the model
    requires_grad: bool  # whether they are trained
    sharding: Hashable = None  # the `Sharding` by which they are cut and reduced
    is_scalar: bool = False  # no dimension to shard, so that every rank holds them whole
    sums_in_fp32: bool = False  # gradients are accumulated in float32, whatever they travel in
    weight_format: WeightFormat | None = None  # that they are gathered in; None: their dtype


@dataclass(frozen=True)
class ParameterInfo:
    """Metadata of one parameter, for grouping and layout."""

    name: str  # fully qualified, in the model
    shape: tuple[int, ...]  # in the model; () for a scalar
    key: GroupKey  # what parameters have to share to lie in one flat buffer
    is_looked_up: bool = False  # its unit is an embedding, whose backward does not read it

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterGroupSpec:
    """The parameters of one unit that share a flat buffer."""

    key: GroupKey
    parameters: tuple[ParameterInfo, ...]  # in the order in which they were given


def group_parameters(parameters: Sequence[ParameterInfo]) -> tuple[ParameterGroupSpec, ...]:
    """Group parameters by their `GroupKey`."""
    members: dict[GroupKey, list[ParameterInfo]] = {}
    for parameter in parameters:
        members.setdefault(parameter.key, []).append(parameter)
    return tuple(ParameterGroupSpec(key, tuple(group)) for key, group in members.items())


def cut_groups(groups: Sequence[ParameterGroupSpec], group_numel: int | None) -> tuple[ParameterGroupSpec, ...]:
    """Cut groups into smaller ones; the parameter that reaches the limit is the last of its group."""
    if group_numel is None:
        return tuple(groups)
    cut: list[ParameterGroupSpec] = []
    for group in groups:
        filling: list[ParameterInfo] = []
        for parameter in group.parameters:
            filling.append(parameter)
            if sum(info.numel for info in filling) >= group_numel:
                cut.append(ParameterGroupSpec(group.key, tuple(filling)))
                filling = []
        if filling:
            cut.append(ParameterGroupSpec(group.key, tuple(filling)))
    return tuple(cut)
