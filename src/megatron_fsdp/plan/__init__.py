"""What a run will need, worked out without hardware by the layout, grouping and schedule code that runs it."""

from megatron_fsdp.plan.machine import MACHINES, Machine, find_machine
from megatron_fsdp.plan.planning import Plan, Recommendation, plan, recommend
from megatron_fsdp.plan.setup import OPTIMIZERS, Accumulation, ParallelRanks, Setup

__all__ = [
    "MACHINES",
    "OPTIMIZERS",
    "Accumulation",
    "Machine",
    "ParallelRanks",
    "Plan",
    "Recommendation",
    "Setup",
    "find_machine",
    "plan",
    "recommend",
]
