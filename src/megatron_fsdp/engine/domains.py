"""The ranks and options of a whole model, and the plan of each parameter group that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import lcm, prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.axis import Axis, Traffic, real_values
from megatron_fsdp.comm.groups import OwnGroups
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.config.precision import ResolvedPrecision, resolve_precision
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.engine.group_plan import FlatAxis, GroupPlan
from megatron_fsdp.engine.tensor_parallel import TensorParallelPart, part_of
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.gradient_scaling import GradientReduction, gradient_reduction
from megatron_fsdp.sharding.layout import Layout, plan_layout
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex
from megatron_fsdp.sharding.placement import Placements, placements_for, shard_count
from megatron_fsdp.sharding.units import GroupKey, ParameterGroupSpec
from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS


@dataclass(frozen=True)
class Domain:
    """The ranks that share parameters of one kind: dense ones, or experts, which have a mesh of their own.

    Attributes:
        axes: The data-parallel axes, outermost first; the last one is the sharding axis.
        names: Their names in the mesh.
        group: All data-parallel ranks; None for a single one.
        tensor_parallel: The tensor-parallel mesh, one-dimensional; None where there is none.
        described_mesh: The mesh of the sharded parameters' DTensors: the axes and, last, the tensor-parallel dimension.
        foreign_groups: For experts, groups of ranks that hold other experts, one per further dimension of their mesh.
        flat: All data-parallel ranks of a hybrid mesh as one axis, where gradients are added rank by rank; else None.
    """

    axes: tuple[Axis, ...]
    names: tuple[str, ...]
    group: dist.ProcessGroup | None
    tensor_parallel: DeviceMesh | None
    described_mesh: DeviceMesh
    foreign_groups: tuple[dist.ProcessGroup, ...] = field(default=())
    flat: FlatAxis | None = None

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, all axes together."""
        return prod(axis.num_ranks for axis in self.axes)

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks; None for a single one."""
        mesh = self.tensor_parallel
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()


@real_values()
def make_domain(
    index: FSDPDistributedIndex,
    traffic: Mapping[str, Traffic],
    is_expert: bool = False,
    sums_locally: bool = False,
    one_by_one: bool = False,
) -> Domain:
    """Build the domain of one kind of parameters from an index."""
    assert index.dp_shard_dim is not None
    names = tuple(name for name in (index.dp_outer_dim, index.dp_shard_dim) if name is not None)
    axes = tuple(replace(_axis(index, name, traffic[name], is_expert), sums_locally=sums_locally) for name in names)
    tensor_parallel = index.get_submesh((index.tp_dim,), is_expert) if index.tp_dim is not None else None
    described = names if index.tp_dim is None else (*names, index.tp_dim)
    num_ranks = prod(axis.num_ranks for axis in axes)
    group = index.get_dp_group(is_expert) if num_ranks > 1 else None
    return Domain(
        axes=axes,
        names=names,
        group=group,
        tensor_parallel=tensor_parallel,
        described_mesh=index.get_submesh(described, is_expert),
        foreign_groups=_foreign_groups(index) if is_expert else (),
        flat=_flat_axis(index, axes, group) if one_by_one else None,
    )


def _flat_axis(index: FSDPDistributedIndex, axes: Sequence[Axis], group: dist.ProcessGroup | None) -> FlatAxis | None:
    """Make one axis of both axes of a hybrid mesh; None where the outer one has one rank, or there is none."""
    if group is None or len(axes) == 1 or axes[0].num_ranks == 1:
        return None
    assert index.dp_outer_dim is not None
    assert index.dp_shard_dim is not None
    table = index.get_submesh((index.dp_outer_dim, index.dp_shard_dim)).mesh.tolist()
    columns = list(zip(*table, strict=True))
    place = {  # the ranks of an axis are in the order of its group, which is ascending
        rank: sorted(row).index(rank) * len(table) + sorted(column).index(rank)
        for row in table
        for rank, column in zip(row, columns, strict=True)
    }
    ranks = dist.get_process_group_ranks(group)
    axis = Axis(group, dist.get_rank(group), len(ranks), axes[-1].traffic, sums_locally=True)
    return FlatAxis(axis, tuple(place[rank] for rank in ranks))


def _axis(index: FSDPDistributedIndex, name: str, traffic: Traffic, is_expert: bool) -> Axis:
    mesh = index.get_submesh((name,), is_expert)
    num_ranks = mesh.size()
    group = mesh.get_group() if num_ranks > 1 else None
    gather_group = None
    if name == index.dp_shard_dim and group is not None:
        gather_group = index.get_fsdp_group(is_expert, independent_all_gather=True)
    # Not the coordinate on the mesh: a mesh may list ranks out of order, and its group has them in order.
    rank = dist.get_rank(group) if group is not None else 0
    return Axis(group, rank, num_ranks, traffic, gather_group)


def _foreign_groups(index: FSDPDistributedIndex) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups along the dimensions of the expert mesh that are neither data nor tensor parallel."""
    mesh = index.expt_device_mesh
    assert mesh is not None
    here = dist.get_rank()
    own: set[int] = set()
    for group in (index.expt_outer_fsdp_group, index.expt_fsdp_group):
        own.update(dist.get_process_group_ranks(group) if group is not None else ())
    if index.tp_dim is not None:
        own.update(index.get_submesh((index.tp_dim,), True).mesh.flatten().tolist())
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
    return tuple(
        group
        for group in groups
        if dist.get_world_size(group) > 1 and not (set(dist.get_process_group_ranks(group)) - {here}) & own
    )


def looked_up(module: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters that only `nn.Embedding` modules hold, which nobody hooks into.

    Their gradient is made of indices and of the gradient of what was looked up: the backward of a unit that is such a
    module needs no weights. Hooks may compute with the weights, and are counted where they are there before wrapping:
    later ones see sharded parameters.
    """
    only_looked_up: dict[int, bool] = {}
    for owner in module.modules():
        is_lookup = type(owner) is nn.Embedding and not any(getattr(owner, name) for name in _HOOKS)
        for param in owner._parameters.values():
            only_looked_up[id(param)] = only_looked_up.get(id(param), True) and is_lookup
    return frozenset(name for name, param in module.named_parameters() if only_looked_up[id(param)])


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALIGNMENT_BYTES = 16
EXPERT_NAME = ".experts."
"""Part of the name of every expert's parameter."""
EVERY_PARAMETER = "all"
"""The pattern that stands for every parameter."""


@dataclass(frozen=True)
class Sharding:
    """The ranks and options by which the parameters of a model are sharded.

    Attributes:
        options: The options of the engine.
        dense: The ranks of dense parameters.
        experts: The ranks of experts; None where they are sharded as everything else.
        device: Device of the buffers.
        weight_formats: The name of the weight format of each parameter that has one, by canonical name.
        lookups: Canonical names of the parameters that `looked_up` finds.
    """

    options: EngineOptions
    dense: Domain
    experts: Domain | None
    device: torch.device
    weight_formats: Mapping[str, str] = field(default_factory=dict)
    lookups: frozenset[str] = frozenset()

    def sums_in_fp32(self, name: str) -> bool:
        """Return whether the gradients of a parameter are accumulated in float32, by its canonical name."""
        return any(
            self.matches(name, pattern) for pattern in self.options.param_name_patterns_for_fp32_local_accumulation
        )

    def check_patterns(self, names: Sequence[str]) -> None:
        """Refuse patterns without effect.

        Args:
            names: Canonical names of the model's trainable parameters.

        Raises:
            ConfigurationError: A pattern matches none of them.
        """
        for pattern in self.options.param_name_patterns_for_fp32_local_accumulation:
            if not any(self.matches(name, pattern) for name in names):
                raise ConfigurationError(
                    f"param_name_patterns_for_fp32_local_accumulation has {pattern!r}, which matches none of the "
                    f"{len(names)} trainable parameters (such as {', '.join(names[:2])}); patterns are those of "
                    "fnmatch, and 'all' is every parameter"
                )

    @staticmethod
    def matches(name: str, pattern: str) -> bool:
        """Return whether one of the patterns for sums in float32 matches a parameter's name."""
        return pattern == EVERY_PARAMETER or fnmatchcase(name, pattern)

    def is_expert(self, name: str, param: torch.Tensor) -> bool:
        """Return whether a parameter is on the expert mesh: by its name, or marked `allreduce=False` as in Megatron.

        Raises:
            ConfigurationError: It is marked, and there is no expert mesh.
        """
        is_marked = getattr(param, "allreduce", True) is False
        if is_marked and self.experts is None:
            raise ConfigurationError(
                f"{name} is marked as an expert's (allreduce=False), and there is no expert mesh; pass expt_device_mesh"
            )
        return self.experts is not None and (is_marked or EXPERT_NAME in f".{name}")

    @property
    def reaching_all(self) -> tuple[dist.ProcessGroup | None, ...]:
        """Groups that together reach every rank of the model: data-parallel ranks, then tensor-parallel ones."""
        return self.dense.group, self.dense.tensor_parallel_group

    def domain(self, is_expert: bool) -> Domain:
        """Return the ranks of parameters of one kind."""
        return self.experts if is_expert and self.experts is not None else self.dense

    def over_own_groups(self) -> tuple[Sharding, OwnGroups]:
        """Return the sharding on process groups of its own along each data-parallel axis; collective, by all ranks."""
        experts = self.experts.axes if self.experts is not None else ()
        flat = self.dense.flat
        own = OwnGroups((*self.dense.axes, *experts, *(() if flat is None else (flat.axis,))))
        cut = len(self.dense.axes)
        dense = replace(
            self.dense, axes=own.axes[:cut], flat=None if flat is None else replace(flat, axis=own.axes[-1])
        )
        return replace(
            self,
            dense=dense,
            experts=None if self.experts is None else replace(self.experts, axes=own.axes[cut : cut + len(experts)]),
        ), own

    def parts_of(
        self, spec: ParameterGroupSpec, originals: Sequence[nn.Parameter]
    ) -> tuple[TensorParallelPart | None, ...]:
        """Describe how tensor parallelism cut the parameters of a group."""
        mesh = self.domain(spec.key.is_expert).tensor_parallel
        return tuple(part_of(info.name, param, mesh) for info, param in zip(spec.parameters, originals, strict=True))

    def plan_group(self, spec: ParameterGroupSpec, originals: Sequence[nn.Parameter]) -> GroupPlan:
        """Plan layout, dtypes, placements and factors of one group."""
        domain = self.domain(spec.key.is_expert)
        placements = self._placements(spec)
        if spec.key.requires_grad:
            precision = self.precision(spec.key)
        else:
            precision = ResolvedPrecision(*(spec.key.dtype,) * 4, has_main_copy=False)
        parts = self.parts_of(spec, originals)
        layout, layouts = self._layouts(spec, parts, shard_count(placements.main_weight, domain.axes))
        return GroupPlan(
            spec,
            layout,
            precision,
            self._reduction(domain, precision),
            placements,
            domain.axes,
            domain.described_mesh,
            self.device,
            parts,
            layouts,
            domain.foreign_groups,
            domain.flat,
        )

    def plan_training(self, plan: GroupPlan) -> GroupPlan:
        """Plan the training of a group that was frozen: weights stay where they are, gradients are added."""
        key = replace(plan.spec.key, requires_grad=True)
        infos = tuple(replace(info, key=key) for info in plan.spec.parameters)
        precision = self.precision(key)
        reduction = self._reduction(self.domain(key.is_expert), precision)
        return replace(plan, spec=ParameterGroupSpec(key, infos), precision=precision, reduction=reduction)

    def _reduction(self, domain: Domain, precision: ResolvedPrecision) -> GradientReduction:
        reduction = gradient_reduction(
            self.dense.num_ranks,
            domain.num_ranks,
            average_in_collective=self.options.average_in_collective,
            calculate_per_token_loss=self.options.calculate_per_token_loss,
            comm_dtype=precision.grad_comm,
            scales_first=not self.options.gradient_reduce_div_fusion,
        )
        return replace(reduction, one_by_one=self.options.deterministic is not None)

    def precision(self, key: GroupKey) -> ResolvedPrecision:
        """Return the dtypes of a trained group."""
        precision = resolve_precision(self.options.policy, key.dtype)
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
        name = spec.key.weight_format
        block_numel = 1 if name is None else WEIGHT_FORMATS[name].block_numel
        multiple = self.options.numel_multiple if spec.key.requires_grad else 1
        if self.dense.flat is not None:
            multiple = lcm(multiple, self.dense.flat.axis.num_ranks)  # each rank adds up an equal part

        def plan(shapes: Sequence[Sequence[int]]) -> Layout:
            return plan_layout(
                shapes,
                num_shards,
                alignment_numel=lcm(max(1, _ALIGNMENT_BYTES // spec.key.dtype.itemsize), block_numel),
                numel_multiple=multiple,
            )

        layout = plan([info.shape for info in spec.parameters])
        by_parameter = [
            None if part is None else part.shapes_by_rank(info.shape)
            for info, part in zip(spec.parameters, parts, strict=True)
        ]
        if all(shapes is None or len(set(shapes)) == 1 for shapes in by_parameter):
            return layout, ()
        mesh = self.domain(spec.key.is_expert).tensor_parallel
        assert mesh is not None
        return layout, tuple(
            plan(
                [
                    info.shape if shapes is None else shapes[rank]
                    for info, shapes in zip(spec.parameters, by_parameter, strict=True)
                ]
            )
            for rank in range(mesh.size())
        )

    def _placements(self, spec: ParameterGroupSpec) -> Placements:
        strategy = self.options.strategy
        outer = self.options.outer_strategy if len(self.dense.axes) > 1 else None
        is_frozen = not spec.key.requires_grad
        if spec.key.is_scalar or (is_frozen and strategy < ShardingStrategy.optim_grads_params):
            strategy = ShardingStrategy.no_shard  # nothing to shard, or nothing to optimise: whole and never gathered
        if outer is not None and (is_frozen or strategy is ShardingStrategy.no_shard):
            outer = ShardingStrategy.no_shard
        return placements_for(strategy, outer)
