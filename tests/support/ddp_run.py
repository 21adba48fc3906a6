"""The scripts of `sharded_run`, trained by `DistributedDataParallel` in place of `fully_shard`."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard_optimizer
from tests.support.arrangements import FLAT, Arrangement
from tests.support.sharded_run import Run, Scenario

Named = tuple[tuple[str, Any], ...]

_NOT_OF_DDP = {"dp_shard_dim": "dp_dim"}
"""Arguments of `fully_shard` that have another name here."""


@dataclass(frozen=True)
class DdpSetting:
    """How a scenario is wrapped.

    Attributes:
        fields: Of the configuration, as (name, value).
        options: Further arguments of the wrapper.
        connects: Tell the optimizer of the model, else step a plain one.
        arrangement: Meshes, and who holds and computes what.
    """

    fields: Named = ()
    options: Named = ()
    connects: bool = True
    arrangement: Arrangement = FLAT

    def shard(self, scenario: Scenario, model: nn.Module) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        """Wrap a model and make its optimizer."""
        found = {_NOT_OF_DDP.get(name, name): value for name, value in self.arrangement.arguments().items()}
        config = DistributedDataParallelConfig(**dict(self.fields))
        if config.use_megatron_fsdp:
            found["fsdp_unit_modules"] = scenario.case.unit_classes
        wrapped = DistributedDataParallel(config, model, **found, **dict(self.options))
        optimizer = scenario.optimizer(wrapped)
        return wrapped, fully_shard_optimizer(optimizer) if self.connects else optimizer


def ddp(
    options: dict[str, Any] | None = None, connects: bool = True, arrangement: Arrangement = FLAT, **fields: Any
) -> DdpSetting:
    """A setting, with fields of the configuration by name."""
    return DdpSetting(tuple(fields.items()), tuple((options or {}).items()), connects, arrangement)


class DdpRun(Run):
    """A script's hands; see `Run`."""

    sharded: DistributedDataParallel


def start(scenario: Scenario, setting: DdpSetting) -> DdpRun:
    """A wrapped model on this rank, before its script."""
    return DdpRun(scenario, setting, dist.get_world_size())
