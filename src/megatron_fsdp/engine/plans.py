"""Plans, made before any memory is taken: of a parameter group, of a model's groups, and of its communication memory.

`GroupPlan` is everything that is decided for one parameter group. `Sharding` holds the ranks, placements, dtypes and
gradient factor of some parameters, and plans their groups: one for each unit, or, where a whole model is sharded by one
call, one for its dense parameters and one for its experts (`ModelSharding`). `plan_memory` then chooses slots, buckets
and prefetch for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, chain
from math import lcm

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from megatron_fsdp.comm.agreement import is_first_in
from megatron_fsdp.comm.collectives import Axis
from megatron_fsdp.comm.groups import OwnGroups
from megatron_fsdp.config.engine_options import (
    DOUBLE_BUFFERS,
    EngineOptions,
    MemoryOptions,
    Offload,
    WeightAllocator,
    offload_by_unit,
)
from megatron_fsdp.config.precision import ResolvedPrecision, resolve_precision
from megatron_fsdp.dtensor.shard_spec import ShardSpec, TensorParallelPart, local_tensor, part_of
from megatron_fsdp.engine.schedule import ScheduleConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.placement import (
    GradientReduction,
    Layout,
    Placement,
    Placements,
    Region,
    gradient_reduction,
    held_region,
    plan_layout,
    shard_count,
)
from megatron_fsdp.sharding.shards import MeshUse, ShardDescription, TensorParallelCut
from megatron_fsdp.sharding.units import (
    ROOT_UNIT,
    GroupKey,
    ParameterGroupSpec,
    ParameterInfo,
    UnitPlan,
    cut_groups,
    group_parameters,
)
from megatron_fsdp.sharding.weight_formats import Fp8Compute, WeightFormat, encoded_bytes

# ---- one parameter group ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one parameter group, made before memory is allocated."""

    spec: ParameterGroupSpec
    layout: Layout
    precision: ResolvedPrecision
    reduction: GradientReduction
    placements: Placements
    rank_mesh: RankMesh
    device: torch.device
    parts: tuple[TensorParallelPart | None, ...]  # how tensor parallelism cut each parameter before, if it did
    layouts_by_part: tuple[Layout, ...] = ()  # on each tensor-parallel rank, where their parts differ in shape
    offload: Offload = Offload()  # noqa: RUF009 (frozen)
    sharding: Sharding | None = None  # by which it was planned, for a later change of `requires_grad` or dtypes

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes, outermost first; the last one is the sharding axis."""
        return self.rank_mesh.axes

    @property
    def offloads_compute(self) -> bool:
        """True if this rank's shard of the compute weights is offloaded."""
        return Placement.SHARD in self.placements.compute_weight and self.offload.compute_weights > 0

    @property
    def offloads_main(self) -> bool:
        """True if the main weights are offloaded; frozen ones lie where the compute weights do."""
        return self.offload.main_weights > 0 if self.requires_grad else self.offloads_compute

    @property
    def has_main_copy(self) -> bool:
        """True if main weights have memory of their own: another dtype, or only one of both is offloaded."""
        return self.precision.has_main_copy or self.offloads_main != self.offloads_compute

    @property
    def axis(self) -> Axis:
        """The sharding axis."""
        return self.axes[-1]

    @property
    def requires_grad(self) -> bool:
        """True if the parameters are trained."""
        return self.spec.key.requires_grad

    @cached_property
    def inner_region(self) -> Region:
        """The region of the compute weights that one inner rank holds after the outer all-gather."""
        inner_only = [Placement.REPLICATE] * (len(self.axes) - 1) + [self.placements.main_weight[-1]]
        return held_region(self.layout.numel, inner_only, self.axes)

    @cached_property
    def main_region(self) -> Region:
        """The region of the main weights on this rank."""
        return held_region(self.layout.numel, self.placements.main_weight, self.axes)

    @cached_property
    def needs_all_gather(self) -> bool:
        """True if full weights are all-gathered over the inner ranks."""
        return self.inner_region.numel < self.layout.numel

    @cached_property
    def gathers_outer(self) -> bool:
        """True if an inner rank's region is all-gathered over the outer ranks after an update."""
        return self.main_region.numel < self.inner_region.numel

    @cached_property
    def shards_compute_weights(self) -> bool:
        """True if full weights exist only while unsharded: compute weights are sharded, or offloaded."""
        held = held_region(self.layout.numel, self.placements.compute_weight, self.axes)
        return self.offloads_compute or held.numel < self.layout.numel

    @cached_property
    def is_looked_up(self) -> bool:
        """True if backward reads none of the weights."""
        return all(info.is_looked_up for info in self.spec.parameters)

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of the full compute weights if they exist only while unsharded, else 0."""
        return self.gathered_numel * self.gathered_dtype.itemsize if self.shards_compute_weights else 0

    @cached_property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of the memory of full compute weights."""
        return torch.uint8 if self.stays_encoded else self.precision.compute

    @cached_property
    def gathered_numel(self) -> int:
        """Elements of `gathered_dtype` in the full compute weights."""
        return self.sent_bytes if self.stays_encoded else self.layout.numel

    @property
    def weight_format(self) -> WeightFormat | None:
        """The weight format of the compute weights; None: their dtype."""
        return self.spec.key.weight_format

    @property
    def stays_encoded(self) -> bool:
        """True if modules compute with the bytes that are gathered."""
        return self.weight_format is not None and self.weight_format.stays_encoded

    @property
    def keeps_transposed(self) -> bool:
        """True if gathered weights are kept transposed, too, once a backward has multiplied them."""
        return isinstance(self.weight_format, Fp8Compute) and self.weight_format.keeps_transposed

    @property
    def is_encoded(self) -> bool:
        """True if compute weights are held and gathered as the bytes of a weight format."""
        return self.weight_format is not None and (self.shards_compute_weights or self.stays_encoded)

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of the memory that gathers read."""
        return torch.uint8 if self.is_encoded else self.precision.compute

    @property
    def sent_bytes(self) -> int:
        """Bytes of the full compute weights as they travel."""
        return self._bytes_sent(self.layout.numel)

    @property
    def held_bytes(self) -> int:
        """Bytes of the compute weights on this rank while they are not gathered."""
        return self._bytes_sent(held_region(self.layout.numel, self.placements.compute_weight, self.axes).numel)

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's compute weights that all-gathers read or write, else 0."""
        if not (self.needs_all_gather or self.gathers_outer) or self.offloads_compute:
            return 0
        return self.held_bytes

    def _bytes_sent(self, numel: int) -> int:
        if self.is_encoded and self.weight_format is not None:
            return encoded_bytes(self.weight_format, numel)
        return numel * self.precision.compute.itemsize

    @property
    def outer_buffer_bytes(self) -> int:
        """Bytes of the gradients that are sent over the outer axis, else 0."""
        crosses = self.requires_grad and len(self.axes) > 1 and self.axes[0].num_ranks > 1
        return self.inner_region.numel * self.precision.grad_comm.itemsize if crosses else 0

    @property
    def received_bytes(self) -> int:
        """Bytes that an exchange over the outer axis receives, else 0."""
        return self.outer_buffer_bytes if self.gathers_outer and self.axes[0].exchanges_pairwise else 0

    @cached_property
    def exchanges_inner(self) -> bool:
        """True if gradients are reduced over the inner ranks by an exchange, which needs scratch."""
        return self.requires_grad and self.needs_all_gather and self.axis.exchanges_pairwise

    @property
    def reduces_in_place(self) -> bool:
        """True if the main gradient can be its own bucket: whole on every rank, in the communication dtype."""
        return (
            self.main_region.numel == self.layout.numel
            and self.precision.main_grads == self.precision.grad_comm
            and not (self.outer_buffer_bytes or self.reduction.one_by_one or self.offload.main_gradients)
        )

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the full gradients in the communication dtype; 0 for a frozen group."""
        return self.layout.numel * self.precision.grad_comm.itemsize if self.requires_grad else 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes that an exchange over the inner ranks receives; between two ranks only the other's half."""
        leaves_out = self.axis.num_ranks == 2 and self.rank_mesh.flat is None
        return self.bucket_bytes // (2 if leaves_out else 1) if self.exchanges_inner else 0

    def shard_spec(self, index: int) -> ShardSpec:
        """Return the shard spec of tensor `index`, which its main weight, gradient and state share."""
        part, layouts = self.parts[index], self.layouts_by_part
        is_sharded = [placement is Placement.SHARD for placement in self.placements.main_weight]
        mesh = self.rank_mesh.described_mesh
        use = MeshUse(
            sizes=tuple(mesh.shape),
            shard_dims=tuple(dim for dim in reversed(range(len(is_sharded))) if is_sharded[dim]),
            tensor_dim=len(self.axes) if mesh.ndim > len(self.axes) else None,
        )
        on_mesh = mesh.get_coordinate()
        assert on_mesh is not None
        coordinate = (*(axis.rank for axis in self.axes), *on_mesh[len(self.axes) :])
        tensor_cut = None
        if part is not None and isinstance(part.placement, Shard):
            dim = part.placement.dim
            tensor_cut = TensorParallelCut.by_chunk(part.shape[dim], use.num_parts, dim)
        return ShardSpec(
            mesh,
            ShardDescription(
                shape=self.layout.shapes[index] if part is None else tuple(part.shape),
                use=use,
                coordinate=coordinate,
                cut=self.layout.cut(index),
                tensor_cut=tensor_cut,
                other_cuts=tuple(layout.cut(index) for layout in layouts),
            ),
            self.rank_mesh.foreign_groups,
            self.reduction.adds_up,
        )


_ALIGNMENT_BYTES = 16


# ---- the sharding of some parameters, or of a model ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sharding:
    """The ranks, placements, dtypes and gradient factor by which some parameters are sharded."""

    options: EngineOptions
    rank_mesh: RankMesh
    placements: Placements  # of trained parameters with dimensions
    device: torch.device
    divisor: float  # of the sum of all ranks' gradients; for experts also the number of dense data-parallel ranks
    compute_dtype: torch.dtype | None = None  # to which real floating-point weights are cast; None: their own

    @property
    def num_shards(self) -> int:
        """The number of shards of the main weights over all ranks."""
        return shard_count(self.placements.main_weight, self.rank_mesh.axes)

    def plan_group(self, spec: ParameterGroupSpec, parts: tuple[TensorParallelPart | None, ...]) -> GroupPlan:
        """Plan layout, dtypes, placements and factors of one group, whose parameters were cut as `parts` before."""
        own, placements = spec.key.dtype, self.placements
        if spec.key.is_scalar:
            placements = placements.of_scalars()
        elif not spec.key.requires_grad:
            placements = placements.of_frozen()
        compute = self._compute_dtype(own)
        precision = ResolvedPrecision(compute, own, own, own, has_main_copy=compute != own)
        if spec.key.requires_grad:
            precision = self.precision(spec.key)
        layout, layouts = self._layouts(spec, parts, shard_count(placements.main_weight, self.rank_mesh.axes))
        return GroupPlan(
            spec=spec,
            layout=layout,
            precision=precision,
            reduction=self._reduction(precision),
            placements=placements,
            rank_mesh=self.rank_mesh,
            device=self.device,
            parts=parts,
            layouts_by_part=layouts,
            sharding=self,
        )

    def plan_training(self, plan: GroupPlan) -> GroupPlan:
        """Plan the training of a group that was frozen: weights stay where they are, gradients are added."""
        key = replace(plan.spec.key, requires_grad=True)
        infos = tuple(replace(info, key=key) for info in plan.spec.parameters)
        return self.plan_again(replace(plan, spec=ParameterGroupSpec(key, infos)))

    def plan_again(self, plan: GroupPlan) -> GroupPlan:
        """Plan the reduction of a group that another sharding has planned, whose weights stay as they are."""
        if not plan.requires_grad:
            return replace(plan, sharding=self)
        precision = self.precision(plan.spec.key)
        return replace(plan, precision=precision, reduction=self._reduction(precision), sharding=self)

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.compute_dtype is None or not dtype.is_floating_point else self.compute_dtype

    def _reduction(self, precision: ResolvedPrecision) -> GradientReduction:
        one_by_one = self.options.deterministic is not None
        # By the sharding, and not by the group: scalars of a sharded model are scaled when all others are, since the
        # divisor may change between microbatches, and hooks see gradients that are reduced and not scaled yet.
        is_whole = Placement.SHARD not in self.placements.main_weight
        reduction = gradient_reduction(
            self.divisor,
            self.rank_mesh.num_ranks,
            average_in_collective=self.options.average_in_collective,
            calculate_per_token_loss=self.options.calculate_per_token_loss,
            comm_dtype=precision.grad_comm,
            scales_first=not self.options.gradient_reduce_div_fusion,
            is_whole=is_whole and not one_by_one and not precision.widens_sent,
        )
        return replace(reduction, one_by_one=one_by_one)

    def precision(self, key: GroupKey) -> ResolvedPrecision:
        """Return the dtypes of a trained group."""
        precision = resolve_precision(self.options.policy, key.dtype, self._compute_dtype(key.dtype))
        are_views = self.options.megatron_fsdp_use_decoupled_grad or precision.main_params == precision.main_grads
        if self.options.megatron_fsdp_cuda_graph_mode and not are_views:
            raise ConfigurationError(
                f"cuda_graph_mode=True needs gradients that are shown where they are summed, and main gradients of "
                f"{key.dtype} parameters are {precision.main_grads} where main weights are {precision.main_params}; "
                "set main_grads_dtype and main_params_dtype of mixed_precision_policy alike, or use_decoupled_grad=True"
            )
        if not key.sums_in_fp32 or not key.dtype.is_floating_point:
            return precision
        return replace(precision, main_grads=torch.promote_types(precision.main_grads, torch.float32))

    def _layouts(
        self, spec: ParameterGroupSpec, parts: Sequence[TensorParallelPart | None], num_shards: int
    ) -> tuple[Layout, tuple[Layout, ...]]:
        """Plan the layout on this rank, and those of all tensor-parallel ranks where their parts differ in shape."""
        form = spec.key.weight_format
        block_numel = 1 if form is None else form.block_numel
        multiple = self.options.numel_multiple if spec.key.requires_grad else 1
        if self.rank_mesh.flat is not None:
            multiple = lcm(multiple, self.rank_mesh.flat.axis.num_ranks)  # each rank adds up an equal part
        rows_only = {} if form is None or form.cuts_rows else {"max_waste": float(num_shards)}
        itemsize = 1 if form is not None and form.stays_encoded else spec.key.dtype.itemsize

        def plan(shapes: Sequence[Sequence[int]]) -> Layout:
            # Tensors begin at addresses that vector loads want, and at a block of the format, whose elements share a
            # scale.
            return plan_layout(
                shapes,
                num_shards,
                alignment_numel=lcm(max(1, _ALIGNMENT_BYTES // itemsize), block_numel),
                numel_multiple=multiple,
                **rows_only,
            )

        mesh = self.rank_mesh.tensor_parallel
        num_parts = 1 if mesh is None else mesh.size()
        by_parameter = [
            (info.shape,) * num_parts if part is None else part.shapes_by_rank(info.shape)
            for info, part in zip(spec.parameters, parts, strict=True)
        ]
        layout = plan([info.shape for info in spec.parameters])
        if all(len(set(shapes)) == 1 for shapes in by_parameter):
            return layout, ()
        return layout, tuple(map(plan, zip(*by_parameter, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of a model."""

    device: torch.device  # of this rank
    meshes: tuple[RankMesh, ...]  # of all parameters, the same on all ranks and in one order
    reaching_all: tuple[dist.ProcessGroup | None, ...]  # groups that together reach every rank
    own_groups: OwnGroups | None = None  # groups that are destroyed with the engine

    @property
    def is_first(self) -> bool:
        """True if this is the first rank of the model."""
        return is_first_in(self.reaching_all)


EXPERT_NAME = ".experts."
"""Part of the name of every expert's parameter."""
SAME_ON_EXPERT_RANKS = "_same_on_expert_ranks"
"""Attribute of a parameter with such a name that all ranks hold alike, and reduce as they do dense ones."""


def _matches(name: str, pattern: str) -> bool:
    """Return True if a pattern for sums in float32 matches a parameter's name."""
    return pattern == "all" or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class ModelSharding:
    """The sharding of all parameters of a model: its dense ones and its experts."""

    dense: Sharding
    experts: Sharding | None = None  # None where they are on the ranks of everything else
    weight_formats: Mapping[str, WeightFormat] = field(default_factory=dict)  # by canonical name
    lookups: frozenset[str] = frozenset()  # canonical names of what `looked_up` finds
    apart: Mapping[str, Sharding] = field(default_factory=dict)  # by canonical name, of those of another sharding
    own_groups: OwnGroups | None = None  # that it was put on

    @property
    def options(self) -> EngineOptions:
        """The options of the model."""
        return self.dense.options

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks of the model: those of dense parameters, then those of experts."""
        dense = self.dense.rank_mesh
        return Ranks(
            device=self.dense.device,
            meshes=(dense,) if self.experts is None else (dense, self.experts.rank_mesh),
            reaching_all=(dense.group, dense.tensor_parallel_group),
            own_groups=self.own_groups,
        )

    def sums_in_fp32(self, name: str) -> bool:
        """Return True if the gradients of a parameter are accumulated in float32, by its canonical name."""
        return any(_matches(name, pattern) for pattern in self.options.param_name_patterns_for_fp32_local_accumulation)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise if a pattern matches none of `names`, the canonical ones of the model's trainable parameters."""
        for pattern in self.options.param_name_patterns_for_fp32_local_accumulation:
            if not any(_matches(name, pattern) for name in names):
                raise ConfigurationError(
                    f"param_name_patterns_for_fp32_local_accumulation has {pattern!r}, which matches none of the "
                    f"{len(names)} trainable parameters (such as {', '.join(names[:2])}); patterns are those of "
                    "fnmatch, and 'all' is every parameter"
                )

    def is_expert(self, name: str, param: torch.Tensor) -> bool:
        """Return True if a parameter is on the expert mesh: by its name, or marked `allreduce=False` as in Megatron.

        A mark without an expert mesh is refused.
        """
        if getattr(param, SAME_ON_EXPERT_RANKS, False):
            return False
        is_marked = getattr(param, "allreduce", True) is False
        if is_marked and self.experts is None:
            raise ConfigurationError(
                f"{name} is marked as an expert's (allreduce=False), and there is no expert mesh; pass expt_device_mesh"
            )
        return self.experts is not None and (is_marked or EXPERT_NAME in f".{name}")

    def of(self, name: str, param: torch.Tensor) -> Sharding:
        """Return the sharding of a parameter."""
        if name in self.apart:
            return self.apart[name]
        return self.experts if self.experts is not None and self.is_expert(name, param) else self.dense


# ---- the groups of a model -------------------------------------------------------------------------------------------


def parameter_info(
    name: str, param: nn.Parameter, sharding: ModelSharding, unit_modules: Sequence[str] = ()
) -> ParameterInfo:
    """Return the facts about a parameter that grouping needs; only its metadata is read.

    `unit_modules` are the paths of the modules that are its unit.
    """
    shape = tuple(local_tensor(param).shape)
    key = GroupKey(
        param.dtype,
        param.requires_grad,
        sharding=sharding.of(name, param),
        is_scalar=not shape,
        sums_in_fp32=sharding.sums_in_fp32(name),
        weight_format=sharding.weight_formats.get(name),
    )
    return ParameterInfo(name, shape, key, name in sharding.lookups and name.rpartition(".")[0] in unit_modules)


def plan_groups(
    module: nn.Module, plan: UnitPlan, sharding: ModelSharding, root_group_numel: int | None
) -> list[list[GroupPlan]]:
    """Plan the parameter groups of each unit; the model is only read.

    Groups that are alike, as repeated blocks have, are planned once and share one layout. Those of the root are cut at
    `root_group_numel` elements, if any.
    """
    originals = dict(module.named_parameters())
    known: dict[object, GroupPlan] = {}
    planned = []
    for unit_index, unit in enumerate(plan.units):
        params = {name: originals[name] for name in unit.parameters}
        planned.append(plan_unit(params, unit.modules, sharding, known, None if unit_index else root_group_numel))
    return with_offload(planned, sharding.options.offload)


def plan_unit(
    params: Mapping[str, nn.Parameter],
    unit_modules: Sequence[str],
    sharding: ModelSharding,
    known: dict[object, GroupPlan],
    group_numel: int | None = None,
) -> list[GroupPlan]:
    """Plan the parameter groups of one unit, cut at `group_numel` elements, if any; only metadata is read.

    Plans of groups before that are alike are reused from `known`, and new ones are added there.
    """
    infos = [parameter_info(name, param, sharding, unit_modules) for name, param in params.items()]
    planned = []
    for spec in cut_groups(group_parameters(infos), group_numel):
        first = spec.parameters[0].name
        own = sharding.of(first, params[first])
        tensor_parallel = own.rank_mesh.tensor_parallel
        parts = tuple(part_of(info.name, params[info.name], tensor_parallel) for info in spec.parameters)
        alike = (own, spec.key, tuple(info.shape for info in spec.parameters), parts)
        if alike not in known:
            known[alike] = own.plan_group(spec, parts)
        planned.append(replace(known[alike], spec=spec))
    return planned


def with_offload(planned: list[list[GroupPlan]], offload: Offload) -> list[list[GroupPlan]]:
    """Set the offload of each unit, from the last one to the root, until the fractions are reached."""
    if not offload:
        return planned
    numels = [sum(group.layout.numel for group in unit) for unit in planned]
    by_unit = zip(offload_by_unit(offload, numels), planned, strict=True)
    return [[replace(group, offload=own) for group in unit] for own, unit in by_unit]


# ---- memory of a model -----------------------------------------------------------------------------------------------


BLOCK_ALIGNMENT_BYTES = 128  # groups that share a borrowed block start at multiples of this


def pack_bytes(lengths_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Place stretches one after another, each aligned; return their offsets and the total, in bytes."""
    offsets, cursor = [], 0
    for length in lengths_bytes:
        offsets.append(cursor)
        cursor += -(-length // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
    return tuple(offsets), cursor


GroupPlans = Sequence[GroupPlan]
"""The groups of one unit."""


class WeightStorage(Enum):
    """Storage of one unit's gathered weights."""

    SLOT = "slot"  # in numbered slots, shared with other units; freed before a step unless taken when wrapping
    OWN = "own"  # in a persistent buffer of its own
    FOR_STEP = "for a step"  # in a buffer of its own, from its first use to the last backward before weights change
    RESIZED = "resized"  # in a buffer of its own that is allocated only while the unit is gathered


@dataclass(frozen=True)
class UnitWeights:
    """The gathered weights of one unit."""

    block_bytes: int  # of the block that holds them, padding included; 0 where every rank holds them whole anyway
    # elements and dtype of each parameter group; equal shapes fit one another's memory
    shape: tuple[tuple[int, torch.dtype], ...] = ()


def _weights_of(unit: GroupPlans) -> UnitWeights:
    in_slots = [group for group in unit if group.shards_compute_weights]
    return UnitWeights(
        pack_bytes([group.gathered_bytes for group in unit])[1],
        tuple((group.layout.numel, group.precision.compute) for group in in_slots),
    )


@dataclass(frozen=True)
class WeightPlan:
    """A storage for the gathered weights of every unit, the root first."""

    storages: tuple[WeightStorage, ...]
    block_bytes: tuple[int, ...]  # of the block of each unit
    slots: int  # the most units besides the root that are gathered at a time, without those that keep their memory
    # Whether slots and persistent buffers are allocated at wrap time, each slot for the largest unit in it; else at
    # their first use, and a slot is as long as the unit that is in it.
    taken_at_once: bool = False

    def units_in(self, storage: WeightStorage) -> tuple[int, ...]:
        """Return the units with a kind of storage, the root included."""
        return tuple(unit for unit, found in enumerate(self.storages) if found is storage)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for the largest unit that lives in slots."""
        return max((self.block_bytes[unit] for unit in self.units_in(WeightStorage.SLOT)), default=0)

    @property
    def slots_used(self) -> int:
        """Number of slots that are ever allocated: at most that of units that live in slots."""
        return min(self.slots, sum(self.block_bytes[unit] > 0 for unit in self.units_in(WeightStorage.SLOT)))


_ROOT_STORAGE = {WeightAllocator.RESIZE: WeightStorage.RESIZED, WeightAllocator.SLOTS: WeightStorage.FOR_STEP}


def most_common_shape(units: Sequence[UnitWeights]) -> tuple[tuple[int, torch.dtype], ...]:
    """Return the most common shape of units; of several the one with most bytes, then the first."""
    sizes = {unit.shape: unit.block_bytes for unit in units if unit.block_bytes}
    counts = Counter(unit.shape for unit in units if unit.block_bytes)
    return max(counts, key=lambda shape: (counts[shape], sizes[shape]), default=())


def plan_weights(
    allocator: WeightAllocator, units: Sequence[UnitWeights], slots: int, is_persistent: bool = False
) -> WeightPlan:
    """Choose a storage for every unit; the root, whose forward surrounds all others, never lives in a slot.

    `slots`: how many units besides the root are gathered at a time. `is_persistent`: take everything at wrap time
    and keep it; what does not live in slots has a buffer of its own.
    """
    others = units[1:]
    if allocator is WeightAllocator.RESIZE:
        of_others = [WeightStorage.RESIZED] * len(others)
    elif allocator in (WeightAllocator.SLOTS, WeightAllocator.MAX_POOL):
        of_others = [WeightStorage.SLOT] * len(others)
    else:
        common = most_common_shape(others)
        odd = WeightStorage.RESIZED if allocator is WeightAllocator.DOUBLE_BUFFER else WeightStorage.OWN
        of_others = [WeightStorage.SLOT if unit.shape == common else odd for unit in others]
    storages = [_ROOT_STORAGE.get(allocator, WeightStorage.OWN), *of_others]
    if is_persistent:
        storages = [storage if storage is WeightStorage.SLOT else WeightStorage.OWN for storage in storages]
    taken_at_once = is_persistent or allocator in DOUBLE_BUFFERS
    return WeightPlan(tuple(storages), tuple(unit.block_bytes for unit in units), slots, taken_at_once)


class Use(Enum):
    """Use of a block of communication memory."""

    SHARD = "shard"  # a rank's compute weights as collectives use them: its shard (strategy 3), else the full buffer
    SLOT = "slot"  # gathered weights of units that take turns
    UNIT = "unit"  # gathered weights of one unit
    ROOT_BUCKET = "root bucket"
    BUCKET = "bucket"
    SCRATCH = "scratch"  # what a pairwise exchange receives
    OUTER_BUFFER = "outer buffer"  # what travels over the outer axis


@dataclass(frozen=True)
class PlannedBlock:
    """A block of communication memory: its offset and its size, in bytes."""

    use: Use
    number: int  # of the group, slot, unit or block, among those of the same use
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        """Name it, with its offset."""
        return f"{self.use.value} {self.number} at {self.offset:,}"


@dataclass(frozen=True)
class PoolPlan:
    """Offsets of all blocks in the stretch that a pool allocates at wrap time; the same on all ranks."""

    blocks: tuple[PlannedBlock, ...]  # in the order of their offsets
    num_bytes: int


_POOL_ALIGNMENT_BYTES = 512  # as torch's allocator aligns tensors on a GPU


def plan_pool(sizes: Mapping[Use, Sequence[int]]) -> PoolPlan:
    """Place blocks one after another, by use and number; those of 0 bytes take no memory."""
    blocks, cursor = [], 0
    for use in Use:
        for number, num_bytes in enumerate(sizes.get(use, ())):
            if num_bytes:
                blocks.append(PlannedBlock(use, number, cursor, num_bytes))
                cursor += -(-num_bytes // _POOL_ALIGNMENT_BYTES) * _POOL_ALIGNMENT_BYTES
    return PoolPlan(tuple(blocks), cursor)


def prefetch_depth(numel: int, unit_numels: Sequence[int]) -> int:
    """Return the number of units, whichever they are, that fit into `numel` elements; at least 1 unless that is 0."""
    if numel < 0:
        raise ConfigurationError(f"{numel} elements cannot be gathered ahead; give 0 (none) or more.")
    count = sum(total <= numel for total in accumulate(sorted(unit_numels, reverse=True)))
    return min(len(unit_numels), max(count, int(numel > 0)))


OUTER_REDUCTIONS = 2
"""Units whose gradients are in reduction over the outer axis at a time."""
_BUCKETS = 2  # one fills while the other is being reduced


def unit_numels(units: Sequence[GroupPlans]) -> list[int]:
    """Return the elements of each unit besides the root, padding included."""
    return [sum(group.layout.numel for group in unit) for unit in units[ROOT_UNIT + 1 :]]


def outer_buffer_offsets(unit: GroupPlans) -> tuple[tuple[int, ...], int]:
    """Place the outer send and receive buffers of a unit's groups in one block."""
    return pack_bytes([length for group in unit for length in (group.outer_buffer_bytes, group.received_bytes)])


def bucket_count(numel: int, units: Sequence[GroupPlans]) -> int:
    """Return the number of buckets, each for the largest unit, that fit into `numel` elements: 1 to all units."""
    largest = max(unit_numels(units), default=0)
    trainable = sum(any(group.requires_grad for group in unit) for unit in units[ROOT_UNIT + 1 :])
    return max(1, min(numel // max(1, largest), trainable))


def _block_sizes(
    weights: WeightPlan, buckets: int, filled: int, units: Sequence[GroupPlans]
) -> dict[Use, Sequence[int]]:
    """Return the bytes of every block that the collectives of a model use, by use and number.

    `buckets`: how many units besides the root fill one or have one in reduction at a time; `filled`: the same where all
    fill before any is reduced.
    """
    own = weights.units_in(WeightStorage.OWN)
    # A unit has one bucket, in which its groups lie one behind another.
    needed = [pack_bytes([group.bucket_bytes for group in unit])[1] for unit in units]
    scratch = max(pack_bytes([group.scratch_bytes for group in unit])[1] for unit in units)
    outer_buffer = max((outer_buffer_offsets(unit)[1] for unit in units), default=0)
    return {
        Use.SHARD: [group.shard_bytes for group in chain.from_iterable(units)],
        Use.SLOT: [weights.slot_bytes] * weights.slots_used,
        Use.UNIT: [size if unit in own else 0 for unit, size in enumerate(weights.block_bytes)],
        Use.ROOT_BUCKET: needed[: ROOT_UNIT + 1],
        Use.BUCKET: [max(needed[ROOT_UNIT + 1 :], default=0)] * filled,
        Use.SCRATCH: [scratch] * max(1, buckets - 1),
        Use.OUTER_BUFFER: [outer_buffer] * OUTER_REDUCTIONS,
    }


@dataclass(frozen=True)
class MemoryPlan:
    """Plan of one model's communication memory and schedule."""

    weights: WeightPlan
    schedule: ScheduleConfig
    buckets: int  # units besides the root that fill a bucket or have one in reduction at a time
    pool: PoolPlan | None = None  # the persistent blocks, which are taken at wrap time, if any


def plan_memory(
    options: MemoryOptions, reduces_early: bool, units: Sequence[GroupPlans], kept: Collection[int] = ()
) -> MemoryPlan:
    """Plan memory and schedule from the caller's options and the groups of a model; allocates nothing.

    `kept`: units that are not resharded after their forward.
    """
    forward, backward = options.forward_prefetch_units, options.backward_prefetch_units
    slots, buckets = options.slots, _BUCKETS
    if options.communication_unit_numel is not None:
        numels = unit_numels(units)
        depth = prefetch_depth(options.communication_unit_numel, numels)
        if not (forward or backward):  # nothing is gathered ahead, as with overlap_param_gather=False
            depth = 0
        if options.may_grow:
            slots = max(slots, depth + 1)  # of the units ahead, and of the one in use
        forward = backward = min(depth, slots - 1)
        buckets = bucket_count(options.communication_unit_numel, units)
    weights = plan_weights(options.allocator, [_weights_of(unit) for unit in units], slots, options.is_persistent)
    groups = [group for unit in units for group in unit]
    # Units that every rank holds whole have no memory to give back: one gather serves until weights change.
    whole = frozenset(unit for unit, num_bytes in enumerate(weights.block_bytes) if not num_bytes)
    resized = frozenset(weights.units_in(WeightStorage.RESIZED)) - whole
    schedule = ScheduleConfig(
        trainable=tuple(any(group.requires_grad for group in unit) for unit in units),
        gathers=any(group.needs_all_gather or group.gathers_outer or group.shards_compute_weights for group in groups),
        shares_slots=any(group.gathered_bytes for group in groups),
        slots=slots,
        forward_prefetch_units=forward,
        backward_prefetch_units=backward,
        reduces_early=reduces_early,
        resized=resized,
        without_slot=frozenset(weights.units_in(WeightStorage.OWN)).union(kept, whole) - {ROOT_UNIT},
        resharded_after_backward=resized,
        resharded_before_step=frozenset(
            unit
            for unit, storage in enumerate(weights.storages)
            if storage is WeightStorage.FOR_STEP or (storage is WeightStorage.SLOT and not weights.taken_at_once)
            if any(group.shards_compute_weights for group in units[unit])
        ),
    )
    # Where none is reduced before the backward ends, all units fill a bucket at a time.
    at_a_time = buckets if reduces_early else max(buckets, sum(schedule.trainable[ROOT_UNIT + 1 :]))
    pool = plan_pool(_block_sizes(weights, buckets, at_a_time, units)) if options.is_persistent else None
    return MemoryPlan(weights, schedule, buckets, pool)
