"""The switch `reduce_scatter_with_fp32_accumulation`: where it can take effect, and what is said where it cannot."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.mixed_precision import ResolvedPrecision
from megatron_fsdp.notices import warn_caller
from megatron_fsdp.placement import ShardingStrategy

NAME = "reduce_scatter_with_fp32_accumulation"


def refuse_without_reduce_scatter(strategy: ShardingStrategy) -> None:
    """Refuse the switch where gradients are reduced by an all-reduce, which adds in the dtype that travels.

    Raises:
        ConfigurationError: The strategy is `no_shard`.
    """
    if strategy == ShardingStrategy.no_shard:
        raise ConfigurationError(
            f"{NAME}=True needs a reduce-scatter, but zero_dp_strategy=0 (no_shard) reduces by an all-reduce; "
            "use strategy 1, 2 or 3, or set it to False and grad_comm_dtype=torch.float32"
        )


def warn_without_16_bits(trainable: Sequence[ResolvedPrecision]) -> None:
    """Say so where no gradient travels in 16 bits: the sum is taken in float32 or wider either way.

    Args:
        trainable: The dtypes of every trainable parameter group.
    """
    travelling = sorted({str(precision.grad_comm) for precision in trainable if precision.grad_comm.itemsize > 2})
    if travelling and all(precision.grad_comm.itemsize > 2 for precision in trainable):
        warn_caller(
            f"{NAME}=True changes no sum here, since gradients travel in {', '.join(travelling)} and are added in it; "
            "set grad_comm_dtype=torch.bfloat16 to halve what is sent, or leave the switch out"
        )
