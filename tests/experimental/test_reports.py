"""Reports on modules that were sharded in place, against those on the same units in a wrapper."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.describe import Description, describe
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.experimental import Placements, fully_shard, fully_shard_context, fully_shard_optimizer
from megatron_fsdp.hang.log_file import Mark, read_folder
from megatron_fsdp.hang.watch import log_for_hangs, stop_logging_for_hangs
from megatron_fsdp.trace import Timeline, trace
from tests.experimental.test_fully_shard import AVG, STRATEGIES, R, S, mesh_for, placements
from tests.support.arrangements import mesh_of
from tests.support.doors import build
from tests.support.on_ranks import on_ranks, refusal
from tests.support.zoo import FLOORS, Tower
from tests.trace.training import data, plain, sharded_tower

Trained = tuple[nn.Module, torch.optim.Optimizer]


def in_place(strategy: int) -> Trained:
    """A tower of which each floor and the rest are a unit, and an optimizer of its new parameters."""
    tower = build(Tower)
    with fully_shard_context("cpu"):
        for module in (*tower.floors, tower):
            given = placements(list(STRATEGIES)[strategy])
            fully_shard(module, mesh_of((dist.get_world_size(),), ("dp",)), given, MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-2)
    fully_shard_optimizer(optimizer)
    return tower, optimizer


def train(both: Trained, steps: int = 2) -> Timeline:
    model, optimizer = both
    with trace(model, steps=steps) as recording:
        for step in range(steps):
            plain(model, data(step))  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    return recording.result()


def reports(both: Trained) -> tuple[Description, Timeline, Description]:
    """A model before and after training, and the training."""
    return describe(both[0]), train(both), describe(both[0])


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_descriptions_and_traces_are_those_of_a_wrapper(strategy: int) -> None:
    options: dict[str, Any] = {"weight_allocator": "resize"} if strategy == 3 else {}
    ours, wrapped = reports(in_place(strategy)), reports(sharded_tower(strategy, **options))
    for mine, other in ((ours[0], wrapped[0]), (ours[2], wrapped[2])):
        assert (mine.wrapper, other.wrapper) == ("ExperimentalFsdpTower", "MegatronFSDP")
        for field in ("model", "strategy", "outer_strategy", "axes", "units", "tied", "unused", "optimizers", "notes"):
            assert getattr(mine, field) == getattr(other, field), field
        assert mine.memory.persistent_bytes == other.memory.persistent_bytes
        assert mine.memory.optimizer_bytes == other.memory.optimizer_bytes
        assert "sync_model_each_microbatch" not in mine.options
    assert ours[2].units[1].label == "floors.0"
    assert ours[2].optimizers[0].parameters == FLOORS * 2 + 2
    traces = ours[1], wrapped[1]
    spans = [Counter((each.step, each.phase, each.unit) for each in found.spans) for found in traces]
    assert spans[0] == spans[1]
    sent = [Counter((each.step, each.purpose, each.num_bytes) for each in found.collectives) for found in traces]
    assert sent[0] == sent[1] != {}
    assert ours[1].units == wrapped[1].units == ("(root)", *(f"floors.{floor}" for floor in range(FLOORS)))


@on_ranks(4)
def test_each_unit_says_its_strategy() -> None:
    tower, flat, hybrid = Tower(), mesh_for(), mesh_for("hfsdp")
    with fully_shard_context("cpu"):
        fully_shard(tower.floors[0], flat, placements("zero-1"))
        fully_shard(tower.floors[1], hybrid, placements("hfsdp"))
        fully_shard(tower.floors[2], hybrid, Placements([0, 1], [R, R], [AVG, S], [R, S]))
        fully_shard(tower, flat, placements("ddp"))
    described = describe(tower)
    assert described.strategy == "no_shard, optim, optim_grads_params, optim_grads"
    assert described.outer_strategy == "optim, no_shard"
    assert [unit.groups[0].main_weight for unit in described.units] == [
        ("Replicate",),
        ("Shard",),
        ("Shard", "Shard"),
        ("Replicate", "Shard"),
    ]


@on_ranks(2)
def test_a_log_names_the_unit_of_each_event(tmp_path: Path) -> None:
    model, optimizer = in_place(3)
    log_for_hangs(model, tmp_path)
    plain(model, data())  # type: ignore[arg-type]
    optimizer.step()
    dist.barrier()
    log = read_folder(tmp_path).ranks[dist.get_rank()]
    dist.barrier()
    assert [unit.label for unit in log.writer.units] == ["(root)", *(f"floors.{floor}" for floor in range(FLOORS))]
    gathered = [record.unit for record in log.records if (record.mark, record.phase) == (Mark.BEGINS, Phase.FORWARD)]
    assert gathered == list(range(FLOORS + 1))
    assert "keeps a log for hangs" in refusal(log_for_hangs, model, tmp_path)
    stop_logging_for_hangs(model)
    log_for_hangs(model, tmp_path)


@on_ranks(2)
def test_a_model_that_is_not_sharded_is_refused() -> None:
    assert "this Linear has no engines" in refusal(describe, nn.Linear(2, 2))
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module in pair:
        with fully_shard_context("cpu"):
            fully_shard(module, mesh_for(), placements("zero-3"))
            assert "no engines" in refusal(trace, module)
    assert "has 2 engines" in refusal(describe, pair)
    assert describe(pair[0]).model == "Linear"
