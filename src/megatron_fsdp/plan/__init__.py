"""The planner: memory, communication and time of a run, worked out without hardware by the engine's own code."""

from megatron_fsdp.plan.machine import MACHINES, Machine, find_machine
from megatron_fsdp.plan.planning import Plan, Recommendation, WorkloadOptions, plan, recommend
from megatron_fsdp.plan.setup import OPTIMIZERS, ParallelRanks, Setup

__all__ = [
    "MACHINES",
    "OPTIMIZERS",
    "Machine",
    "ParallelRanks",
    "Plan",
    "Recommendation",
    "Setup",
    "WorkloadOptions",
    "find_machine",
    "plan",
    "recommend",
]
