"""Measured against computed: what a run used, next to what the formulas of `accounting` say (pure)."""

from dataclasses import dataclass

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.describe.model import MemoryUse
from megatron_fsdp.sharding.accounting import (
    GroupFootprint,
    exchange_scratch_bytes,
    outer_step_traffic,
    persistent_bytes,
    step_traffic,
    transient_bytes,
)


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        what: What is compared.
        unit: `bytes` or `count`.
        measured: What the run used.
        formula: What the formula says.
    """

    what: str
    unit: str
    measured: int
    formula: int

    @property
    def ratio(self) -> float:
        """Measured over formula; 1 where both are 0."""
        if self.formula == 0:
            return 1.0 if self.measured == 0 else float("inf")
        return self.measured / self.formula


@dataclass(frozen=True)
class Measurement:
    """What one rank measured.

    Attributes:
        memory: The engine's buffers.
        optimizer_bytes: The optimizer's state.
        step: Collectives of one optimizer step.
    """

    memory: MemoryUse
    optimizer_bytes: int
    step: Traffic


@dataclass(frozen=True)
class Plan:
    """What the formulas take.

    Attributes:
        groups: All parameter groups.
        strategy: What is sharded.
        microbatches: Per optimizer step.
        exchanges_pairwise: Whether reductions receive into a bucket of their own.
    """

    groups: tuple[GroupFootprint, ...]
    strategy: ShardingStrategy
    microbatches: int
    exchanges_pairwise: bool


def compare(measured: Measurement, plan: Plan) -> tuple[Row, ...]:
    """Set a rank's measurement beside the formulas."""
    held = persistent_bytes(plan.groups, plan.strategy)
    scratch = exchange_scratch_bytes(plan.groups, plan.strategy) if plan.exchanges_pairwise else 0
    borrowed = transient_bytes(plan.groups, plan.strategy, scratch_bytes=scratch)
    # The trainer puts off the reductions of strategies without sharded gradients; others sync after each microbatch.
    syncs = 1 if plan.strategy <= ShardingStrategy.optim else plan.microbatches
    inside, across = step_traffic(plan.groups, plan.strategy, syncs), outer_step_traffic(plan.groups, plan.strategy)
    return (
        Row("weights and gradients", "bytes", measured.memory.persistent_bytes, held.total - held.optimizer),
        Row("optimizer state", "bytes", measured.optimizer_bytes, held.optimizer),
        Row("gathered weights and buckets, peak", "bytes", measured.memory.transient_peak_bytes, borrowed.total),
        Row("gathers per step", "count", measured.step.gathers, inside.gathers + across.gathers),
        Row(
            "sent in gathers per step",
            "bytes",
            measured.step.gather_bytes,
            inside.gather_bytes + across.gather_bytes,
        ),
        Row("reductions per step", "count", measured.step.reductions, inside.reductions + syncs * across.reductions),
        Row(
            "sent in reductions per step",
            "bytes",
            measured.step.reduce_bytes,
            inside.reduce_bytes + syncs * across.reduce_bytes,
        ),
    )
