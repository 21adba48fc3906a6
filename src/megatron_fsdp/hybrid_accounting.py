"""What the outer axis of hybrid sharding costs, once per optimizer step; derivations in ``docs/formulas.md``."""

from collections.abc import Sequence

from megatron_fsdp.accounting import GroupFootprint, StepTraffic
from megatron_fsdp.placement import ShardingStrategy

UNITS_CROSSING = 2
"""How many units' gradients are on their way over the outer axis at a time."""


def outer_step_traffic(groups: Sequence[GroupFootprint], strategy: ShardingStrategy) -> StepTraffic:
    """Count the collectives over the outer axis from one optimizer step to the next.

    What an inner rank stands for, its part of each trainable group (all of it under ``no_shard``), crosses once per
    gradient sync: by an all-reduce, or by a reduce-scatter where the outer ranks share main weights out. Then the new
    weights are gathered over the outer axis, once per optimizer step.

    Args:
        groups: All parameter groups.
        strategy: The strategy on the sharding axis.

    Returns:
        Counts and bytes per rank; zeros without an outer axis.
    """
    trainable = [group for group in groups if group.requires_grad and group.outer_ranks > 1]
    shared = [group for group in trainable if group.outer_shares and not group.is_whole]
    return StepTraffic(
        gathers=len(shared),
        reductions=len(trainable),
        gather_bytes=sum(_sent_bytes(group, strategy, group.compute.itemsize) for group in shared),
        reduce_bytes=sum(
            _sent_bytes(group, strategy, group.grad_comm.itemsize) * (1 if group in shared else 2)
            for group in trainable
        ),
    )


def pending_bytes(groups: Sequence[GroupFootprint], strategy: ShardingStrategy, deferred: bool = False) -> int:
    """Bound the sums that wait for, or are on, their way over the outer axis.

    Args:
        groups: All parameter groups.
        strategy: The strategy on the sharding axis.
        deferred: Whether the outer reduction is being put off over microbatches: then every group keeps its sum.

    Returns:
        Bytes per rank, in the main gradient's dtype: those of all units, or of the units that cross at a time and the
        one that is being summed.
    """
    by_unit: dict[int, int] = {}
    for group in groups:
        if group.requires_grad and group.outer_ranks > 1:
            held = part_numel(group, strategy) * group.main_grads.itemsize
            by_unit[group.unit] = by_unit.get(group.unit, 0) + held
    sizes = sorted(by_unit.values(), reverse=True)
    return sum(sizes if deferred else sizes[: UNITS_CROSSING + 1])


def part_numel(group: GroupFootprint, strategy: ShardingStrategy) -> int:
    """Elements of a group's gradient that one inner rank stands for after the inner reduction."""
    is_cut = not group.is_whole and strategy is not ShardingStrategy.no_shard
    return group.shard_numel if is_cut else group.numel


def _sent_bytes(group: GroupFootprint, strategy: ShardingStrategy, itemsize: int) -> int:
    part_bytes = part_numel(group, strategy) * itemsize
    return part_bytes - part_bytes // group.outer_ranks
