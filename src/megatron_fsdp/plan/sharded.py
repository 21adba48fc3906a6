"""A model sharded on paper: units and groups with their layouts, made by the engine's own planning.

Only process groups are missing: an axis is a number of ranks and a place on it. Nothing here takes memory; a rank's
memory between steps is counted from the layouts, to the byte.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron_fsdp.comm.collectives import Axis
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.engine.plans import GroupPlan, MemoryPlan, ModelSharding, Sharding, plan_groups, plan_memory
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.formats.fp8_linear import encoded_parameters
from megatron_fsdp.optim.full_tensor.exchange import assign_owners
from megatron_fsdp.optim.full_tensor.muon import WAVE_BYTES, newton_schulz_flops
from megatron_fsdp.optim.optimizer import kinds_of
from megatron_fsdp.plan.machine import Machine
from megatron_fsdp.plan.setup import MUON, OPTIMIZERS, LocalShard, Setup
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.placement import placements_for
from megatron_fsdp.sharding.units import looked_up, plan_units
from megatron_fsdp.sharding.weight_formats import Fp8Compute

UnitModules = Sequence[type[nn.Module] | str] | str | None
_META = torch.device("meta")


@dataclass(frozen=True)
class PlannedUnit:
    """One unit and its parameter groups."""

    name: str
    class_name: str
    modules: tuple[str, ...]  # paths; several where small neighbours were merged
    groups: tuple[GroupPlan, ...]  # the plan of each of its parameter groups

    @property
    def numel(self) -> int:
        """The elements of its parameters on this tensor- and expert-parallel rank, without padding."""
        return sum(group.layout.payload_numel for group in self.groups)

    @property
    def padding_numel(self) -> int:
        """The elements of padding."""
        return sum(group.layout.padding_numel for group in self.groups)


@dataclass(frozen=True)
class PlannedModel:
    """All units, the root first."""

    setup: Setup
    units: tuple[PlannedUnit, ...]  # in the order of the engine
    source: str  # how the units were found
    memory: MemoryPlan  # the settings of scheduler and executor
    matrices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of the parameters that Muon steps
    used: Collection[str] | None = None  # those that get gradients; an optimizer leaves others alone; None: all

    @cached_property
    def muon(self) -> MuonWork | None:
        """The compute and communication of Muon; None for another optimizer."""
        setup, inner, outer = self.setup, self.setup.ranks.inner, self.setup.ranks.dp_outer
        replicas = inner if setup.strategy is ShardingStrategy.no_shard else 1
        replicas *= outer if setup.outer_strategy is ShardingStrategy.no_shard else 1
        return muon_work(self.matrices.values(), outer * inner, replicas) if self.matrices else None

    @property
    def groups(self) -> tuple[GroupPlan, ...]:
        """All groups in unit order."""
        return tuple(group for unit in self.units for group in unit.groups)

    @property
    def numel(self) -> int:
        """The elements of all parameters on this tensor- and expert-parallel rank, without padding."""
        return sum(unit.numel for unit in self.units)

    @property
    def padding_fraction(self) -> float:
        """Padding over payload, in elements."""
        return sum(unit.padding_numel for unit in self.units) / max(1, self.numel)

    def local_shards(self) -> list[LocalShard]:
        """List the optimizer's shards on this rank: one per used parameter, without padding, possibly empty."""
        trained = [shard for group in self.groups if group.requires_grad for shard in self.local_shards_of(group)]
        return [shard for shard in trained if self.used is None or shard.name in self.used]

    def local_shards_of(self, group: GroupPlan) -> list[LocalShard]:
        """List the shard of each parameter of a group in this rank's main weights."""
        names = [info.name for info in group.spec.parameters]
        used = [index for index, name in enumerate(names) if self.used is None or name in self.used]
        cuts = group.layout.segments_in(group.main_region, used, group.precision.main_params.itemsize)
        # State that is moved is stepped parameter by parameter.
        cuts = [] if group.offload.optimizer_state else cuts
        first_of = {names[index]: names[used[cut.start]] for cut in cuts for index in used[cut]}
        return [
            LocalShard(
                info.name,
                *group.layout.range_in(index, group.main_region),
                group.precision,
                OPTIMIZERS["momentum"] if info.name in self.matrices else self.setup.optimizer,
                group.offloads_main,
                group.offload.optimizer_state > 0,
                first_of.get(info.name, info.name),
            )
            for index, info in enumerate(group.spec.parameters)
        ]


def plan_model(module: nn.Module, setup: Setup, fsdp_unit_modules: UnitModules = None) -> PlannedModel:
    """Shard a model on paper, as `fully_shard` would; the module is only read.

    It has the parameters of one tensor- and expert-parallel rank of one pipeline stage.
    """
    ranks, num_ranks = setup.ranks, setup.ranks.inner * setup.ranks.dp_outer
    is_flat = ranks.ep == ranks.tp == 1
    if next(module.parameters(), None) is None:
        raise ConfigurationError(f"{type(module).__name__} has no parameters; there is nothing to plan")
    options = EngineOptions(
        setup.strategy, setup.outer or ShardingStrategy.no_shard, setup.policy, offload=setup.offload
    )
    placements = placements_for(setup.strategy, options.outer_strategy if ranks.dp_outer > 1 else None)
    dense, *experts = (
        Sharding(options, rank_mesh, placements, _META, divisor=num_ranks)
        for rank_mesh in (
            _rank_mesh(setup, ranks.inner),
            *([_rank_mesh(setup, ranks.inner // ranks.ep, is_expert=True)] if ranks.ep > 1 else []),
        )
    )
    found = plan_units(module, fsdp_unit_modules, setup.memory, num_ranks, dense.num_shards, shapes_are_alike=is_flat)
    sharding = ModelSharding(
        dense,
        experts[0] if experts else None,
        encoded_parameters(module, setup.policy, setup.strategy, keeps_transposed=setup.keep_fp8_transpose_cache),
        looked_up(module),
    )
    planned = plan_groups(module, found, sharding, setup.memory.root_group_numel_on(num_ranks))
    units = tuple(
        PlannedUnit(spec.name, spec.class_name, spec.modules, tuple(groups))
        for spec, groups in zip(found.units, planned, strict=True)
    )
    memory = plan_memory(setup.memory, setup.reduces_early, [unit.groups for unit in units])
    matrices = muon_matrices(module) if setup.optimizer.name == MUON else {}
    return PlannedModel(setup, units, found.source, memory, matrices)


def _rank_mesh(setup: Setup, inner: int, *, is_expert: bool = False) -> RankMesh:
    """Build the engine's axes without process groups; the last one has `inner` ranks."""
    position_outer, position_inner = divmod(setup.device_rank, setup.ranks.inner)
    places = {"dp_outer": (position_outer, setup.ranks.dp_outer)} if setup.ranks.dp_outer > 1 else {}
    places["dp_shard"] = (position_inner * inner // setup.ranks.inner, inner)
    axes = tuple(Axis(None, *place, sums_locally=setup.backend == "gloo") for place in places.values())
    nowhere: Any = None
    return RankMesh(axes, tuple(places), None, None, nowhere, is_expert=is_expert)


# ---- memory of a rank between steps ---------------------------------------------------------------------------------


def held_bytes(groups: Iterable[GroupPlan], *, offloaded: bool = False) -> tuple[int, int, int]:
    """Count a rank's bytes of compute weights, of main weights with their own memory, and of main gradients.

    On the device, or those that are `offloaded`.
    """
    compute = main = gradients = 0
    for group in groups:
        precision, numel = group.precision, group.main_region.numel
        if group.offloads_compute is offloaded:
            compute += group.held_bytes
        if (form := group.weight_format) is not None and form.agrees_on_amax and not offloaded:
            # amaxes, and the scales that linears multiply by
            compute += len(group.layout.shapes) * torch.float32.itemsize * (2 if isinstance(form, Fp8Compute) else 1)
        if (group.weight_format is not None or group.has_main_copy) and group.offloads_main is offloaded:
            main += numel * precision.main_params.itemsize
        if group.requires_grad and (group.offload.main_gradients > 0) is offloaded:
            gradients += numel * precision.main_grads.itemsize
    return compute, main, gradients


def optimizer_bytes(model: PlannedModel, *, offloaded: bool = False) -> int:
    """Count this rank's bytes of optimizer state on the device, or `offloaded`."""
    return sum(shard.state_bytes for shard in model.local_shards() if shard.state_is_offloaded is offloaded)


def cast_bytes(group: GroupPlan, *, offloaded: bool = False) -> int:
    """Count the bytes of `.grad` in the main weights' dtype, if main gradients have another dtype.

    They are cast where the main gradients are: on the device, or `offloaded`.
    """
    precision = group.precision
    is_cast = group.requires_grad and precision.main_grads != precision.main_params
    is_here = (group.offload.main_gradients > 0) is offloaded
    return group.main_region.numel * precision.main_params.itemsize if is_cast and is_here else 0


def offloaded_bytes(model: PlannedModel) -> int:
    """Count this rank's offloaded bytes."""
    casts = sum(cast_bytes(group, offloaded=True) for group in model.groups)
    return sum(held_bytes(model.groups, offloaded=True)) + optimizer_bytes(model, offloaded=True) + casts


def step_bytes(model: PlannedModel) -> int:
    """Count the device bytes that the optimizers' steps borrow, one after another.

    Offloaded state of weights on the device is streamed group by group, three at a time: one that comes, one that steps
    and one that goes.
    """
    kind, muon = model.setup.optimizer, 0 if model.muon is None else model.muon.borrowed_bytes
    here = [shard for shard in model.local_shards() if shard.kind is kind and not shard.is_offloaded]
    paged = [
        sum(shard.state_bytes for shard in model.local_shards_of(group) if shard.is_streamed)
        for group in model.groups
        if group.requires_grad
    ]
    return max(kind.borrowed_bytes(here) + sum(heapq.nlargest(3, paged)), muon)


def host_step_s(model: PlannedModel, machine: Machine) -> float:
    """Estimate the seconds that offload adds to an optimizer's step.

    The host steps the weights that are offloaded with their state, and sends new weights back; state that is offloaded
    alone is moved in both directions at the same time. Gradients leave during backward, which hides them.
    """
    shards = model.local_shards()
    stepped = sum(shard.kind.passes_per_param * shard.num_bytes for shard in shards if shard.is_offloaded)
    sent = sum(shard.num_bytes for shard in shards if shard.is_offloaded)
    sent += sum(shard.state_bytes for shard in shards if shard.is_streamed)
    return stepped / machine.host_bytes_per_s + sent / machine.host_link_bytes_per_s


def saving_bytes(model: PlannedModel) -> int:
    """Count this rank's bytes of a checkpoint: main weights without padding, and optimizer state."""
    weights = sum(shard.num_bytes for group in model.groups for shard in model.local_shards_of(group))
    return weights + optimizer_bytes(model) + optimizer_bytes(model, offloaded=True)


# ---- the cost of Muon: balance of its iteration over ranks, compute and communication --------------------------------

NEWTON_SCHULZ_STEPS = 5  # of torch.optim.Muon
_BYTES = 2  # of an element that travels, each way
_SMALL = 0.05


def muon_matrices(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of Muon's parameters: matrices and stacks, without embeddings and head."""
    named = dict(module.named_parameters())
    kinds = zip(named, kinds_of(named.values(), module), strict=True)
    return {name: tuple(named[name].shape) for name, kind in kinds if kind in ("matrices", "stacks of matrices")}


@dataclass(frozen=True)
class MuonWork:
    """The compute and communication of a Muon step that is shared over ranks by whole matrices."""

    ranks: int  # replicas included
    matrices: int  # their number; a stack counts as its matrices
    numel: int  # their elements
    flops: int  # of Newton-Schulz iteration, all ranks together
    busiest_flops: int  # of the rank that has most to do
    largest_numel: int  # elements of the largest matrix
    replicas: int = 1  # ranks that hold the same shards

    @property
    def imbalance(self) -> float:
        """The work of the busiest rank over the mean."""
        return self.busiest_flops * self.ranks / max(1, self.flops)

    @property
    def sent_bytes(self) -> float:
        """The mean bytes that a rank sends in a step, there and back to all replicas, including its own part."""
        return (1 + self.replicas) * _BYTES * self.numel / self.ranks

    @property
    def borrowed_bytes(self) -> int:
        """The most bytes that a rank borrows: all updates of its shards; three waves and a result; one iteration."""
        one = _BYTES * self.largest_numel
        own = _BYTES * self.numel * self.replicas // self.ranks
        return own + 4 * max(self.replicas * one, min(WAVE_BYTES, own)) + 4 * one

    def seconds(self, machine: Machine) -> float:
        """Estimate the time of iteration and exchange, without their overlap."""
        sent_s = machine.all_to_all_s(self.sent_bytes / 2, self.ranks)
        return machine.compute_s(self.busiest_flops, 0) + 2 * sent_s

    def summary(self, machine: Machine, tokens: int, compute_s: float) -> str:
        """Summarise the cost, and the tokens per rank and step above which it is below 5 % of the compute."""
        seconds = self.seconds(machine)
        enough = math.ceil(tokens * seconds / (_SMALL * compute_s)) if compute_s else 0
        return (
            f"{self.matrices:,} matrices, the busiest of {self.ranks:,} ranks has {self.imbalance:.2f} of the mean; "
            f"{1e3 * seconds:,.1f} ms, {in_bytes(round(self.sent_bytes))} sent by a rank; {100 * _SMALL:.0f} % of "
            f"compute at {enough:,} tokens per rank and step"
        )


def single_matrices(shapes: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return FLOPs and elements of every matrix in shapes (..., rows, columns), each matrix of a stack by itself."""
    single = [shape[-2:] for shape in shapes for _ in range(math.prod(shape[:-2]))]
    return [newton_schulz_flops(each, NEWTON_SCHULZ_STEPS) for each in single], [math.prod(each) for each in single]


def muon_work(shapes: Iterable[Sequence[int]], ranks: int, replicas: int = 1) -> MuonWork:
    """Distribute the iteration of matrices over ranks and replicas, as the optimizer does."""
    flops, numels = single_matrices(shapes)
    loads = [0] * ranks
    assign_owners(flops, loads)
    return MuonWork(ranks, len(flops), sum(numels), sum(flops), max(loads), max(numels, default=0), replicas)
