"""Smaller units for fine-grained gathers: the modules inside units that own parameters themselves.

Nothing here changes the model.
"""

from torch import nn

from megatron_fsdp.large_ends import READ_INNER_PARAMETERS
from megatron_fsdp.units import UnitPlan, UnitSpec, has_forward

_ROOT = 0


def refine_units(module: nn.Module, plan: UnitPlan, whole_types: tuple[type[nn.Module], ...] = ()) -> UnitPlan:
    """Split every unit into the modules that own its parameters.

    A parameter goes with the module that it hangs on; with an outer one where that cannot be called by itself, or where
    an outer one inside the unit is of a class that is taken whole. Parameters that several such modules share belong to
    the root.

    Args:
        module: The model; it is only read.
        plan: Its units.
        whole_types: Classes of modules that are taken whole, with everything inside; torch's own attention always is.

    Returns:
        The finer plan. Units may lie inside one another, and own disjoint parameters.
    """
    other_names: dict[str, list[str]] = {}
    for alias, canonical in plan.aliases:
        other_names.setdefault(canonical, []).append(alias)
    root = plan.units[_ROOT]
    shared: list[str] = []
    owned: dict[str, list[str]] = {}
    for unit in plan.units[_ROOT + 1 :]:
        for name in unit.parameters:
            # A tied parameter may have names elsewhere in its unit; those outside would have made it the root's.
            owners = {
                id(module.get_submodule(path)): path
                for path in (_owner(module, unit.name, each, whole_types) for each in _names(name, unit, other_names))
            }
            if len(owners) > 1:
                shared.append(name)
            else:
                owned.setdefault(next(iter(owners.values())), []).append(name)
    ends = {unit.name for unit in plan.units if unit.is_end}
    finer = [
        UnitSpec(path, tuple(names), type(module.get_submodule(path)).__name__, is_end=path in ends)
        for path, names in owned.items()
    ]
    order = {name: position for position, (name, _) in enumerate(module.named_parameters())}
    of_root = tuple(sorted((*root.parameters, *shared), key=order.__getitem__))
    units = (UnitSpec(root.name, of_root, root.class_name), *finer)
    return UnitPlan(units, f"{plan.source}, fine-grained", plan.aliases, plan.block_classes)


def _names(canonical: str, unit: UnitSpec, other_names: dict[str, list[str]]) -> list[str]:
    """The names of a parameter below the path of its unit; a unit that hangs at two paths is looked at through one."""
    return [name for name in (canonical, *other_names.get(canonical, ())) if name.startswith(f"{unit.name}.")]


def _owner(module: nn.Module, unit: str, parameter: str, whole_types: tuple[type[nn.Module], ...]) -> str:
    """The path of the module that a parameter is gathered with."""
    inner = parameter.removeprefix(f"{unit}.").split(".")[:-1]
    paths = [".".join((unit, *inner[:depth])) for depth in range(len(inner) + 1)]
    for path in paths:
        if isinstance(module.get_submodule(path), (*READ_INNER_PARAMETERS, *whole_types)):
            return path
    return next(path for path in reversed(paths) if has_forward(module.get_submodule(path)))
