"""What the planner says of a run, beside what was measured of it."""

from __future__ import annotations

from typing import NamedTuple

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.describe.description import table_lines
from megatron_fsdp.plan.compute_profile import idle_profile
from megatron_fsdp.plan.machine import MACHINES
from megatron_fsdp.plan.muon import muon_matrices
from megatron_fsdp.plan.replay import replay_step
from megatron_fsdp.plan.setup import MUON, OPTIMIZERS, ParallelRanks, Setup
from megatron_fsdp.plan.sharded import PlannedModel, PlannedUnit, held_bytes
from megatron_fsdp.plan.sharded import optimizer_bytes as planned_optimizer_bytes
from megatron_fsdp.train.measure import engine_bytes
from megatron_fsdp.train.models.trained import Trained
from megatron_fsdp.train.options.job import Job


class Row(NamedTuple):
    """A measured value of this rank beside what the planner says."""

    what: str
    measured: int
    planned: int


def compare(trained: Trained, step: Traffic | None, job: Job) -> tuple[Row, ...]:
    """Compare gathers, bytes sent and memory of an optimizer step with what the planner says of the same model.

    Empty with an engine that counts nothing, and without a step.
    """
    model = trained.inside
    if model is None or step is None:
        return ()
    planned = as_planned(model, job, defers=trained.defers)
    names = [
        [info.name for plan in unit.groups for info in plan.spec.parameters if plan.requires_grad]
        for unit in planned.units
    ]
    replayed = replay_step(planned, idle_profile(names), MACHINES["h100"])
    told = sum(held_bytes(planned.groups)) + planned_optimizer_bytes(planned) + replayed.borrowed_bytes
    sent = sum(each.sent_bytes for each in replayed.transfers)
    return (
        Row("gathers per step", step.gathers, sum(each.is_gather for each in replayed.transfers)),
        Row("bytes sent per step", step.gather_bytes + step.reduce_bytes, sent),
        Row("peak bytes of weights, gradients, optimizer, communication", engine_bytes(trained), told),
    )


def as_planned(model: DistributedDataParallel, job: Job, *, defers: bool) -> PlannedModel:
    """Return a wrapped model as the planner would have made it, with the groups and the memory that it has."""
    engine, resolved = model._engine, model.resolved
    *outer_axes, inner = (axis.num_ranks for axis in engine.sharding.dense.axes)
    outer = outer_axes[0] if outer_axes else 1
    setup = Setup(
        ParallelRanks(inner, outer),
        resolved.strategy,
        resolved.outer_strategy if outer > 1 else ShardingStrategy.no_shard,
        microbatches=job.batch.microbatches,
        accumulation="last" if defers else "every",
        optimizer=OPTIMIZERS[job.options.optimizer.planned_name],
        backend="gloo" if any(group.plan.exchanges_inner for group in engine.groups()) else "nccl",
    )
    units = tuple(
        PlannedUnit(str(unit.index), "", (str(unit.index),), tuple(group.plan for group in unit.groups))
        for unit in engine.units
    )
    matrices = muon_matrices(model.module) if setup.optimizer.name == MUON else {}
    return PlannedModel(setup, units, "as wrapped", engine.memory_plan, matrices)


def rows_told(rows: tuple[Row, ...]) -> str:
    """Return the rows as lines of text; empty for none."""
    shown = [(row.what, f"{row.measured:,}", f"{row.planned:,}") for row in rows]
    titles = ("on this rank", "measured", "planned")
    return "\n".join(table_lines(titles, shown, titles[1:])) if rows else ""
