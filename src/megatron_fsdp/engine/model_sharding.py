"""How one model is sharded: over which ranks and by which options, and the groups that are planned from these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import lcm

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.comm.groups import OwnGroups
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.config.homes import Homes, homes_by_unit
from megatron_fsdp.config.precision import ResolvedPrecision, resolve_precision
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.engine.domain import Domain
from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.engine.parts import TensorParallelPart, local_part, part_of
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.gradient_scaling import GradientReduction, gradient_reduction
from megatron_fsdp.sharding.layout import Layout, plan_layout
from megatron_fsdp.sharding.placement import Placements, placements_for, shard_count
from megatron_fsdp.sharding.units import (
    GroupKey,
    ParameterGroupSpec,
    ParameterInfo,
    UnitPlan,
    cut_groups,
    group_parameters,
    parameter_sites,
)
from megatron_fsdp.sharding.weight_formats import WeightFormat

_ALIGNMENT_BYTES = 16
_EXPERT_NAME = ".experts."
"""Part of the name of every expert's parameter."""
_EVERY_PARAMETER = "all"
"""The pattern that stands for every parameter."""


@dataclass(frozen=True)
class Sharding:
    """The ranks and options by which the parameters of a model are sharded.

    Attributes:
        options: The options of the engine.
        dense: The ranks of dense parameters.
        experts: The ranks of experts; None where they are sharded as everything else.
        device: Device of the buffers.
        weight_formats: The weight format of each parameter that has one, by canonical name.
        lookups: Canonical names of the parameters that `looked_up` finds.
    """

    options: EngineOptions
    dense: Domain
    experts: Domain | None
    device: torch.device
    weight_formats: Mapping[str, WeightFormat] = field(default_factory=dict)
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
        return pattern == _EVERY_PARAMETER or fnmatchcase(name, pattern)

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
        return self.experts is not None and (is_marked or _EXPERT_NAME in f".{name}")

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

    def plan_group(self, spec: ParameterGroupSpec, parts: tuple[TensorParallelPart | None, ...]) -> GroupPlan:
        """Plan layout, dtypes, placements and factors of one group, whose parameters were cut as `parts` before."""
        domain = self.domain(spec.key.is_expert)
        placements = self._placements(spec)
        if spec.key.requires_grad:
            precision = self.precision(spec.key)
        else:
            precision = ResolvedPrecision(*(spec.key.dtype,) * 4, has_main_copy=False)
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
        form = spec.key.weight_format
        block_numel = 1 if form is None else form.block_numel
        multiple = self.options.numel_multiple if spec.key.requires_grad else 1
        if self.dense.flat is not None:
            multiple = lcm(multiple, self.dense.flat.axis.num_ranks)  # each rank adds up an equal part
        rows_only = {} if form is None or form.cuts_rows else {"max_waste": float(num_shards)}
        itemsize = 1 if form is not None and form.stays_encoded else spec.key.dtype.itemsize

        def plan(shapes: Sequence[Sequence[int]]) -> Layout:
            return plan_layout(
                shapes,
                num_shards,
                alignment_numel=lcm(max(1, _ALIGNMENT_BYTES // itemsize), block_numel),
                numel_multiple=multiple,
                **rows_only,
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


def parameter_info(
    name: str, param: nn.Parameter, sharding: Sharding, unit_modules: Sequence[str] = ()
) -> ParameterInfo:
    """Return the facts about a parameter that grouping needs; only its metadata is read.

    `unit_modules` are the paths of the modules that are its unit.
    """
    shape = tuple(local_part(param).shape)
    key = GroupKey(
        param.dtype,
        param.requires_grad,
        is_expert=sharding.is_expert(name, param),
        is_scalar=not shape,
        sums_in_fp32=sharding.sums_in_fp32(name),
        weight_format=sharding.weight_formats.get(name),
    )
    return ParameterInfo(name, shape, key, name in sharding.lookups and name.rpartition(".")[0] in unit_modules)


def plan_groups(
    module: nn.Module, plan: UnitPlan, sharding: Sharding, root_group_numel: int | None
) -> list[list[GroupPlan]]:
    """Plan the parameter groups of each unit; the model is only read.

    Groups that are alike, as repeated blocks have, are planned once and share one layout. Those of the root are cut at
    `root_group_numel` elements, if any.
    """
    originals = dict(module.named_parameters())
    known: dict[object, GroupPlan] = {}

    def plan_group(spec: ParameterGroupSpec) -> GroupPlan:
        parts = sharding.parts_of(spec, [originals[info.name] for info in spec.parameters])
        alike = (spec.key, tuple(info.shape for info in spec.parameters), parts)
        if alike not in known:
            known[alike] = sharding.plan_group(spec, parts)
        return replace(known[alike], spec=spec)

    planned = []
    for unit_index, unit in enumerate(plan.units):
        specs = group_parameters(
            [parameter_info(name, originals[name], sharding, unit.modules) for name in unit.parameters]
        )
        planned.append(list(map(plan_group, specs if unit_index else cut_groups(specs, root_group_numel))))
    return _with_homes(planned, sharding.options.homes)


def _with_homes(planned: list[list[GroupPlan]], homes: Homes) -> list[list[GroupPlan]]:
    """Say where the state of each unit rests: from the last unit to the root, until the fractions are reached."""
    if not homes.are_away:
        return planned
    of_units = homes_by_unit(homes, [sum(group.layout.numel for group in unit) for unit in planned])
    return [[replace(group, homes=of_unit) for group in unit] for of_unit, unit in zip(of_units, planned, strict=True)]


def looked_up(module: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters that only `nn.Embedding` modules hold, which nobody hooks into.

    Their gradient is made of indices and of the gradient of what was looked up: the backward of a unit that is such a
    module needs no weights. Hooks may compute with the weights, and are counted where they are there before wrapping:
    later ones see sharded parameters.
    """

    def looks_up(owner: nn.Module) -> bool:
        return type(owner) is nn.Embedding and not any(getattr(owner, name) for name in _HOOKS)

    sites = parameter_sites(module)
    return frozenset(
        name for name, param in module.named_parameters() if all(looks_up(owner) for owner, _ in sites[id(param)])
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
