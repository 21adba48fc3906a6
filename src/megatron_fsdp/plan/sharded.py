"""A model sharded on paper: units and groups with their layouts, made by the engine's own planning.

Only process groups are missing: an axis is a number of ranks and a place on it. Nothing here takes memory; what a rank
holds between steps is counted from the layouts, to the byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nlargest
from typing import Any

import torch
from torch import nn

from megatron_fsdp.comm.axis import Axis
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.engine.group_plan import Domain, GroupPlan, Sharding, looked_up
from megatron_fsdp.engine.memory import MemoryPlan, plan_memory
from megatron_fsdp.engine.weight_codec import encoded_parameters
from megatron_fsdp.engine.wrap import parameter_info, plan_units
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.muon import MuonWork, muon_matrices, muon_work
from megatron_fsdp.plan.setup import MUON, Setup
from megatron_fsdp.sharding.accounting import GroupFootprint
from megatron_fsdp.sharding.units import (
    ParameterInfo,
    cut_groups,
    group_parameters,
)

UnitModules = Sequence[type[nn.Module] | str] | str | None
_META = torch.device("meta")
_COUNTER_BYTES = 4


@dataclass(frozen=True)
class PlannedUnit:
    """One unit and its parameter groups."""

    name: str
    class_name: str
    modules: tuple[str, ...]  # paths; several where small neighbours were merged
    groups: tuple[GroupPlan, ...]  # what was decided for each of its parameter groups

    @property
    def numel(self) -> int:
        """Elements of its parameters on this tensor- and expert-parallel rank, without padding."""
        return sum(group.layout.payload_numel for group in self.groups)

    @property
    def padding_numel(self) -> int:
        """Elements of padding."""
        return sum(group.layout.padding_numel for group in self.groups)


@dataclass(frozen=True)
class PlannedModel:
    """All units, the root first."""

    setup: Setup
    units: tuple[PlannedUnit, ...]  # in the order of the engine
    source: str  # how the units were found, in words
    memory: MemoryPlan  # what scheduler and executor are told
    matrices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of the parameters that Muon steps

    @cached_property
    def muon(self) -> MuonWork | None:
        """What Muon computes and sends; None for another optimizer."""
        ranks = self.setup.ranks.dp_outer * self.setup.ranks.inner
        return muon_work(list(self.matrices.values()), ranks) if self.matrices else None

    @property
    def groups(self) -> tuple[GroupPlan, ...]:
        """All groups, in unit order."""
        return tuple(group for unit in self.units for group in unit.groups)

    @cached_property
    def footprints(self) -> tuple[GroupFootprint, ...]:
        """The groups' sizes, as the formulas of `megatron_fsdp.sharding.accounting` take them."""
        return tuple(group.footprint(index) for index, unit in enumerate(self.units) for group in unit.groups)

    @property
    def numel(self) -> int:
        """Elements of all parameters on this tensor- and expert-parallel rank, without padding."""
        return sum(unit.numel for unit in self.units)

    @property
    def padding_fraction(self) -> float:
        """Padding over payload, in elements."""
        return sum(unit.padding_numel for unit in self.units) / max(1, self.numel)

    def updated(self, used: Collection[str] | None = None) -> Iterator[tuple[GroupPlan, list[int]]]:
        """Yield each trained group, and the elements of each of its parameters that this rank's optimizer updates.

        `used` names the parameters that get gradients, since an optimizer leaves others alone; None: all.
        """
        for group in self.groups:
            if group.requires_grad:
                names = [info.name for info in group.spec.parameters]
                owned = zip(names, _owned(group), strict=True)
                yield group, [count for name, count in owned if used is None or name in used]


def _owned(group: GroupPlan) -> list[int]:
    """Count the elements of each parameter in this rank's main weights, without padding."""
    ranges = (group.layout.range_in(index, group.main_region) for index in range(len(group.layout.shapes)))
    return [stop - start for start, stop in ranges]


def plan_model(module: nn.Module, setup: Setup, fsdp_unit_modules: UnitModules = None) -> PlannedModel:
    """Shard a model on paper, as `fully_shard` would; the module is only read.

    Its parameters are what one tensor-parallel rank of one pipeline stage holds, experts those of all expert-parallel
    ranks.
    """
    num_ranks = setup.ranks.inner * setup.ranks.dp_outer
    is_flat = setup.ranks.ep == setup.ranks.tp == 1
    found = plan_units(module, fsdp_unit_modules, setup.memory, num_ranks, shapes_are_alike=is_flat)
    params = dict(module.named_parameters())
    if not params:
        raise ConfigurationError(f"{type(module).__name__} has no parameters; there is nothing to plan")
    formats = encoded_parameters(module, setup.policy, setup.strategy)
    sharding = replace(_sharding(setup), weight_formats=formats, lookups=looked_up(module))
    known: dict[object, GroupPlan] = {}  # a model of 126 equal layers has one layout
    cut_numel = setup.memory.root_group_numel_on(num_ranks)
    units = []
    for index, spec in enumerate(found.units):
        infos = [_info(name, params[name], sharding, setup, spec.modules) for name in spec.parameters]
        specs = group_parameters(infos)
        groups = []
        for group in specs if index else cut_groups(specs, cut_numel):
            alike = (group.key, tuple(info.shape for info in group.parameters))
            if alike not in known:
                originals = [nn.Parameter(torch.empty(0, device=_META), requires_grad=False) for _ in group.parameters]
                known[alike] = sharding.plan_group(group, originals)
            groups.append(replace(known[alike], spec=group))
        units.append(PlannedUnit(spec.name, spec.class_name, spec.modules, tuple(groups)))
    memory = plan_memory(setup.memory, setup.reduces_early, [unit.groups for unit in units])
    matrices = muon_matrices(module) if setup.optimizer.name == MUON else {}
    return PlannedModel(setup, tuple(units), found.source, memory, matrices)


def _info(
    name: str, param: nn.Parameter, sharding: Sharding, setup: Setup, unit_modules: Sequence[str]
) -> ParameterInfo:
    info = parameter_info(name, param, sharding, unit_modules)
    if not info.key.is_expert or setup.ranks.ep == 1:
        return info
    rows, *rest = info.shape
    if rows % setup.ranks.ep:
        raise ParallelSizeError(
            f"{name} has {rows} experts, which ep={setup.ranks.ep} does not divide; give a divisor of their number"
        )
    return replace(info, shape=(rows // setup.ranks.ep, *rest))


def _sharding(setup: Setup) -> Sharding:
    """Make the engine's sharding with axes that have no process groups."""
    ranks = setup.ranks
    has_experts = ranks.ep > 1
    return Sharding(
        EngineOptions(setup.strategy, setup.outer or ShardingStrategy.no_shard, setup.policy),
        _domain(setup, ranks.inner),
        _domain(setup, ranks.inner // ranks.ep) if has_experts else None,
        _META,
    )


def _domain(setup: Setup, inner: int) -> Domain:
    outer = setup.ranks.dp_outer
    position_outer, position_inner = divmod(setup.device_rank, setup.ranks.inner)
    axes = [Axis(None, position_inner * inner // setup.ranks.inner, inner)]
    names = ["dp_shard"]
    if outer > 1:
        axes.insert(0, Axis(None, position_outer, outer))
        names.insert(0, "dp_outer")
    nowhere: Any = None
    return Domain(tuple(axes), tuple(names), None, None, nowhere)


# ---- what a rank holds between steps --------------------------------------------------------------------------------


def optimizer_bytes(model: PlannedModel, used: Collection[str] | None = None) -> int:
    """Count the optimizer state of this rank in bytes; `used` names the parameters that get gradients (None: all)."""
    kind = model.setup.optimizer
    total = 0
    for group, counts in model.updated(used):
        total += kind.states_per_param * sum(counts) * group.precision.main_params.itemsize
        total += _COUNTER_BYTES * len(counts) if kind.counts_steps else 0
    value_bytes, number = _of_matrices(model, used)
    return total - value_bytes - _COUNTER_BYTES * number  # Muon keeps momentum alone


def step_bytes(model: PlannedModel, used: Collection[str] | None = None) -> int:
    """Count the bytes that the optimizer's step borrows; `used` as for `optimizer_bytes`."""
    kind = model.setup.optimizer
    sizes = [count * group.precision.main_params.itemsize for group, counts in model.updated(used) for count in counts]
    if kind.one_by_one:  # a parameter at a time, and the last value of the one before is still there
        first, second = nlargest(2, [*sizes, 0, 0])
        return kind.temporaries * first + second
    if model.muon is not None:  # the other optimizer's step comes before or after
        return max(model.muon.borrowed_bytes, kind.temporaries * (sum(sizes) - _of_matrices(model, used)[0]))
    return kind.temporaries * sum(sizes)


def _of_matrices(model: PlannedModel, used: Collection[str] | None) -> tuple[int, int]:
    """Return the bytes of a value for each element of Muon's matrices on this rank, and the number of matrices."""
    named = set(model.matrices) if used is None else set(model.matrices).intersection(used)
    found = [
        (sum(counts) * group.precision.main_params.itemsize, len(counts)) for group, counts in model.updated(named)
    ]
    return sum(nbytes for nbytes, _ in found), sum(number for _, number in found)


def saving_bytes(model: PlannedModel, used: Collection[str] | None = None) -> int:
    """Count the bytes of a checkpoint of this rank: main weights without padding, and optimizer state."""
    weights = sum(sum(_owned(group)) * group.precision.main_params.itemsize for group in model.groups)
    return weights + optimizer_bytes(model, used)
