"""The choices that hold for a whole model, and what they mean for one parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.buffer.own_group import OwnGroups
from megatron_fsdp.buffer.share import over_shared_memory
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.gradient_scaling import GradientReduction, gradient_reduction
from megatron_fsdp.grouping import GroupKey, ParameterGroupSpec
from megatron_fsdp.layout import Layout, plan_layout
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy, ResolvedPrecision, resolve_precision
from megatron_fsdp.placement import Placements, ShardingStrategy, placements_for
from megatron_fsdp.region import shard_count
from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.unit.group_plan import GroupPlan
from megatron_fsdp.unit.tensor_parallel import TensorParallelPart, part_of

_ALIGNMENT_BYTES = 16
EXPERT_NAME = ".experts."
"""What the name of an expert's parameter contains."""
EVERY_PARAMETER = "all"
"""The pattern that stands for every parameter."""


@dataclass(frozen=True)
class Sharding:
    """How parameters are sharded, decided by the caller once for the whole model.

    Attributes:
        strategy: On the sharding axis.
        outer_strategy: On the outer axis; None where there is none.
        policy: Dtypes.
        dense: The ranks of dense parameters.
        experts: The ranks of experts; None where they are sharded as everything else.
        device: Where the buffers live.
        average_in_collective: Let the collective average.
        calculate_per_token_loss: Sum gradients, without a factor.
        find_unused_parameters: Agree at every sync on which parameters were used.
        scales_first: Scale gradients before they travel.
        numel_multiple: What the elements of every trainable group are padded to a multiple of.
        fp32_patterns: `fnmatch` patterns of the parameters whose gradients are accumulated in float32.
    """

    strategy: ShardingStrategy
    outer_strategy: ShardingStrategy | None
    policy: MixedPrecisionPolicy
    dense: Domain
    experts: Domain | None
    device: torch.device
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False
    find_unused_parameters: bool = False
    scales_first: bool = False
    numel_multiple: int = 1
    fp32_patterns: tuple[str, ...] = ()

    def sums_in_fp32(self, name: str) -> bool:
        """Whether the gradients of a parameter are accumulated in float32, by its canonical name."""
        return any(self.matches(name, pattern) for pattern in self.fp32_patterns)

    def check_patterns(self, names: Sequence[str]) -> None:
        """Refuse patterns without effect.

        Args:
            names: Canonical names of the model's trainable parameters.

        Raises:
            ConfigurationError: A pattern matches none of them.
        """
        for pattern in self.fp32_patterns:
            if not any(self.matches(name, pattern) for name in names):
                raise ConfigurationError(
                    f"param_name_patterns_for_fp32_local_accumulation has {pattern!r}, which matches none of the "
                    f"{len(names)} trainable parameters (such as {', '.join(names[:2])}); patterns are those of "
                    "fnmatch, and 'all' is every parameter"
                )

    @staticmethod
    def matches(name: str, pattern: str) -> bool:
        """Whether one of `fp32_patterns` means a parameter."""
        return pattern == EVERY_PARAMETER or fnmatchcase(name, pattern)

    def is_expert(self, name: str, param: torch.Tensor) -> bool:
        """Whether a parameter lives on the expert mesh: by its name, or marked `allreduce=False` as Megatron does.

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
        """The ranks of parameters of one kind."""
        return self.experts if is_expert and self.experts is not None else self.dense

    def over_own_groups(self) -> tuple[Sharding, OwnGroups]:
        """The same with groups that nobody else uses along each data-parallel axis; collective, by all ranks."""
        experts = self.experts.axes if self.experts is not None else ()
        own = OwnGroups((*self.dense.axes, *experts))
        cut = len(self.dense.axes)
        dense = replace(self.dense, axes=own.axes[:cut])
        return replace(
            self, dense=dense, experts=None if self.experts is None else replace(self.experts, axes=own.axes[cut:])
        ), own

    def over_shared_memory(self) -> Sharding:
        """The same, which shares memory along each axis whose ranks can; collective, by all ranks."""

        def shared(domain: Domain) -> Domain:
            return replace(domain, axes=tuple(over_shared_memory(axis, self.device) for axis in domain.axes))

        return replace(self, dense=shared(self.dense), experts=None if self.experts is None else shared(self.experts))

    def parts_of(
        self, spec: ParameterGroupSpec, originals: Sequence[nn.Parameter]
    ) -> tuple[TensorParallelPart | None, ...]:
        """How tensor parallelism cut the parameters of a group."""
        mesh = self.domain(spec.key.is_expert).tensor_parallel
        return tuple(part_of(info.name, param, mesh) for info, param in zip(spec.parameters, originals, strict=True))

    def plan_group(self, spec: ParameterGroupSpec, originals: Sequence[nn.Parameter]) -> GroupPlan:
        """Decide layout, dtypes, placements and factors of one group.

        Args:
            spec: The group.
            originals: Its parameters as the modules hold them; only their description is read.
        """
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
        )

    def plan_training(self, plan: GroupPlan) -> GroupPlan:
        """The plan of a group that was frozen and shall be trained: weights lie as they did, gradients are added."""
        key = replace(plan.spec.key, requires_grad=True)
        infos = tuple(replace(info, requires_grad=True) for info in plan.spec.parameters)
        precision = self.precision(key)
        reduction = self._reduction(self.domain(key.is_expert), precision)
        return replace(plan, spec=ParameterGroupSpec(key, infos), precision=precision, reduction=reduction)

    def _reduction(self, domain: Domain, precision: ResolvedPrecision) -> GradientReduction:
        return gradient_reduction(
            self.dense.num_ranks,
            domain.num_ranks,
            average_in_collective=self.average_in_collective,
            calculate_per_token_loss=self.calculate_per_token_loss,
            comm_dtype=precision.grad_comm,
            scales_first=self.scales_first,
        )

    def precision(self, key: GroupKey) -> ResolvedPrecision:
        """The dtypes of a trained group."""
        precision = resolve_precision(self.policy, key.dtype)
        if not key.sums_in_fp32 or not key.dtype.is_floating_point:
            return precision
        return replace(precision, main_grads=torch.promote_types(precision.main_grads, torch.float32))

    def _layouts(
        self, spec: ParameterGroupSpec, parts: Sequence[TensorParallelPart | None], num_shards: int
    ) -> tuple[Layout, tuple[Layout, ...]]:
        """The layout on this rank, and those of all tensor-parallel ranks where their parts differ in shape."""

        def plan(shapes: Sequence[Sequence[int]]) -> Layout:
            return plan_layout(
                shapes,
                num_shards,
                alignment_numel=max(1, _ALIGNMENT_BYTES // spec.key.dtype.itemsize),
                granularity=[info.granularity for info in spec.parameters],
                numel_multiple=self.numel_multiple if spec.key.requires_grad else 1,
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
        strategy, outer = self.strategy, self.outer_strategy
        is_frozen = not spec.key.requires_grad
        if spec.key.is_scalar or (is_frozen and strategy < ShardingStrategy.optim_grads_params):
            strategy = ShardingStrategy.no_shard  # nothing to cut, or nothing to optimise: whole and never gathered
        if outer is not None and (is_frozen or strategy is ShardingStrategy.no_shard):
            outer = ShardingStrategy.no_shard
        return placements_for(strategy, outer)
