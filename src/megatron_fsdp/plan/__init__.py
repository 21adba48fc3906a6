"""The planner: memory, communication and time of a run, computed without hardware by the engine's own code."""

from megatron_fsdp.plan.machine import MACHINES, Machine, find_machine
from megatron_fsdp.plan.planning import Plan, Recommendation, make_workload, plan, recommend
from megatron_fsdp.plan.setup import OPTIMIZERS, ParallelRanks, Setup

__all__ = [
    "MACHINES",
    "OPTIMIZERS",
    "Machine",
    "ParallelRanks",
    "Plan",
    "Recommendation",
    "Setup",
    "find_machine",
    "make_workload",
    "plan",
    "recommend",
]
