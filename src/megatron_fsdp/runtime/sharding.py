"""The choices that hold for a whole model, and what they mean for one parameter group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.gradient_scaling import gradient_reduction
from megatron_fsdp.grouping import ParameterGroupSpec
from megatron_fsdp.layout import plan_layout
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy, ResolvedPrecision, resolve_precision
from megatron_fsdp.placement import ShardingStrategy, placements_for
from megatron_fsdp.unit.param_group import GroupPlan

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Sharding:
    """How parameters are sharded, decided by the caller once for the whole model.

    Attributes:
        strategy: On the sharding axis.
        policy: Dtypes.
        axis: The sharding axis.
        mesh: The one-dimensional mesh of that axis.
        device: Where the buffers live.
        average_in_collective: Let the collective average.
        calculate_per_token_loss: Sum gradients, without a factor.
    """

    strategy: ShardingStrategy
    policy: MixedPrecisionPolicy
    axis: Axis
    mesh: DeviceMesh
    device: torch.device
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False

    def plan_group(self, spec: ParameterGroupSpec) -> GroupPlan:
        """Decide layout, dtypes, placements and factors of one group."""
        strategy = self.strategy
        if spec.key.is_scalar or (not spec.key.requires_grad and strategy < ShardingStrategy.optim_grads_params):
            strategy = ShardingStrategy.no_shard  # nothing to cut, or nothing to optimise: whole and never gathered
        placements = placements_for(strategy)
        if spec.key.requires_grad:
            precision = resolve_precision(self.policy, spec.key.dtype)
        else:
            precision = ResolvedPrecision(*(spec.key.dtype,) * 4, has_main_copy=False)
        layout = plan_layout(
            [info.shape for info in spec.parameters],
            1 if strategy == ShardingStrategy.no_shard else self.axis.num_ranks,
            alignment_numel=max(1, _ALIGNMENT_BYTES // spec.key.dtype.itemsize),
            granularity=[info.granularity for info in spec.parameters],
        )
        reduction = gradient_reduction(
            self.axis.num_ranks,
            self.axis.num_ranks,
            average_in_collective=self.average_in_collective,
            calculate_per_token_loss=self.calculate_per_token_loss,
            comm_dtype=precision.grad_comm,
        )
        return GroupPlan(spec, layout, precision, reduction, placements, self.axis, self.mesh, self.device)
