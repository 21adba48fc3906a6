"""The scripts of `sharded_run`, trained by `DistributedDataParallel` in place of `fully_shard`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard_optimizer
from tests.support.arrangements import FLAT, Arrangement
from tests.support.sharded_run import (
    FP32,
    Outcome,
    Run,
    RunRanks,
    Scenario,
    Tolerance,
    assert_parity,
    outcome_of,
    reference,
)

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


def ddp(
    options: dict[str, Any] | None = None, connects: bool = True, arrangement: Arrangement = FLAT, **fields: Any
) -> DdpSetting:
    """A setting, with fields of the configuration by name."""
    return DdpSetting(tuple(fields.items()), tuple((options or {}).items()), connects, arrangement)


class DdpRun(Run):
    """A script's hands; see `Run`."""

    sharded: DistributedDataParallel

    def _shard(self, scenario: Scenario, setting: Any) -> None:
        self.arrangement.place(self.model)
        found = {_NOT_OF_DDP.get(name, name): value for name, value in self.arrangement.arguments().items()}
        config = DistributedDataParallelConfig(**dict(setting.fields))
        if config.use_megatron_fsdp:
            found["fsdp_unit_modules"] = scenario.case.unit_classes
        self.sharded = DistributedDataParallel(config, self.model, **found, **dict(setting.options))
        optimizer = scenario.optimizer(self.sharded)
        self.optimizer = fully_shard_optimizer(optimizer) if setting.connects else optimizer
        self.model = self.sharded


def start(scenario: Scenario, setting: DdpSetting) -> DdpRun:
    """A wrapped model on this rank, before its script."""
    return DdpRun(scenario, setting, dist.get_world_size())  # type: ignore[arg-type]


def run_ddp(jobs: Sequence[tuple[Scenario, DdpSetting]]) -> list[Outcome]:
    """Run scenarios one after another on this rank."""
    outcomes = []
    for scenario, setting in jobs:
        run = start(scenario, setting)
        try:
            scenario.script(run)
        except Exception as error:
            error.add_note(f"in {scenario.script.__name__} with {setting}")
            raise
        outcomes.append(outcome_of(run))
    return outcomes


def check_ddp(
    run_ranks: RunRanks,
    num_ranks: int,
    jobs: Sequence[tuple[Scenario, DdpSetting]],
    tolerance: Tolerance = FP32,
) -> None:
    """Run each scenario in its setting and assert parity with one process that stands for as many ranks."""
    by_rank = run_ranks(num_ranks, run_ddp, list(jobs))
    for (scenario, setting), *outcomes in zip(jobs, *by_rank, strict=True):
        try:
            assert_parity(outcomes, reference(scenario, num_ranks), tolerance)
        except AssertionError as error:
            where = f"{num_ranks} ranks, {scenario.script.__name__}, {scenario.case.build.__name__}, {setting}"
            raise AssertionError(f"{where}: {error}") from None
