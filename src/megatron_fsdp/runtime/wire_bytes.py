"""How many bytes a phase of a unit communicates, as ranks compare them."""

from __future__ import annotations

from megatron_fsdp.runtime.observer import Phase
from megatron_fsdp.unit.unit import Unit


def gathered_bytes(unit: Unit) -> int:
    """Of the full weights that are gathered; 0 where they are whole everywhere, or shared."""
    plans = [group.plan for group in unit.groups if group.plan.gathered_by_unit]
    return sum(plan.layout.numel * plan.precision.compute.itemsize for plan in plans)


def communicated_bytes(phase: Phase, unit: Unit) -> int:
    """Of a phase that has started to communicate: of the full weights or of the whole bucket, not of one rank's part.

    Args:
        phase: Which; 0 for those that send only a few numbers.
        unit: Of which unit.
    """
    if phase is Phase.GATHER:
        return gathered_bytes(unit)
    if phase is Phase.REDUCE:
        return unit.bucket_bytes
    if phase in (Phase.GATHER_ACROSS, Phase.REDUCE_ACROSS):
        return sum(group.plan.layout.numel * group.plan.precision.compute.itemsize for group in unit.groups)
    return 0
