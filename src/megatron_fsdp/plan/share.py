"""What one rank computes of a language model that tensor, context and pipeline parallelism divide."""

from __future__ import annotations

from torch import nn

from megatron_fsdp.plan.planned_model import UnitModules
from megatron_fsdp.plan.setup import ParallelRanks
from megatron_fsdp.plan.workload import Workload, language_workload


def share_of_rank(
    name: str,
    module: nn.Module,
    ranks: ParallelRanks,
    micro_batch: int,
    sequence_length: int,
    unit_modules: UnitModules,
    stage: int,
) -> Workload:
    """One rank's share of a model and of a microbatch.

    Args:
        name: For people.
        module: The whole model, on the meta device.
        ranks: Along each axis.
        micro_batch: Sequences per microbatch.
        sequence_length: Tokens of each, over all context-parallel ranks.
        unit_modules: As `fully_shard` takes them.
        stage: Which pipeline stage.

    Raises:
        ConfigurationError: The model cannot be divided like that.
    """
    return language_workload(name, module, micro_batch, sequence_length, unit_modules)
