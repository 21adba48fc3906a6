"""State that rests elsewhere: the results of the resident run, bit for bit, and the bytes on the device."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.local_step import StateMemory
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid
from tests.support.case import FP32, Run, Scenario, Setting, assert_parity, reference, run_sharded, shard
from tests.support.case import adamw_above_noise as adamw
from tests.support.formulas import footprints_of, persistent_bytes
from tests.support.on_ranks import assert_equal_tensors, on_ranks
from tests.support.zoo import DENSE, FLOOR_NUMEL, TOWER_FEATURES, Floor, Tower, tower_loss

HALF = 0.5
BF16 = MixedPrecisionPolicy(torch.float32, torch.float32)


def train_in_every_way(run: Run) -> None:
    """Plain steps, accumulation without and with reductions, clipping, a failed step and what comes after it."""
    run.train(0, 1)
    run.loss(2).backward()
    run.loss(3).backward()
    run.step()
    with run.no_sync():
        run.loss(4).backward()
    run.loss(5).backward()
    if run.sharded is not None:
        run.sharded.clip_grad_norm_(0.5)
    else:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.step()
    loss = run.loss(6)
    if run.sharded is not None:
        run.sharded.reset()
    del loss
    run.train(7)


EVERYWHERE: dict[str, Any] = {
    "all": "all",
    "state": ["optimizer_state"],
    "half": {"main_weights": HALF},
    "shards": ["compute_weights"],
}


def test_steps_equal_those_of_the_resident_run_bit_for_bit(run_ranks: RunRanks) -> None:
    scenario = Scenario(train_in_every_way, DENSE, adamw)
    jobs = [
        (strategy, name, Setting(strategy, options=(("offload", offload),)))
        for strategy in (1, 3)
        for name, offload in {"none": None, **EVERYWHERE}.items()
        if strategy == 3 or name != "shards"
    ]
    by_job = zip(*run_ranks(2, run_sharded, [(scenario, setting) for *_, setting in jobs]), strict=True)
    for (strategy, name, _), found in zip(jobs, by_job, strict=True):
        if name == "none":
            first = found
            assert_parity(first, reference(scenario, 2), FP32)
        assert [each.losses for each in found] == [each.losses for each in first], (strategy, name)
        assert [each.digest for each in found] == [each.digest for each in first], (strategy, name)


@pytest.mark.full(short=["half precision"])
@pytest.mark.parametrize("kind", ["half precision", "formats", "shared outside", "whole tensors"])
def test_other_kinds_of_runs_do_too(run_ranks: RunRanks, kind: str) -> None:
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    setting: dict[str, Any] = {}
    num_ranks, offload = 2, dict(EVERYWHERE)
    if kind in ("half precision", "formats"):
        setting["policy"] = BF16 if kind == "half precision" else MixedPrecisionPolicy(weight_format="fp8")
    elif kind == "whole tensors":
        optimizer = adafactor
        offload = {name: EVERYWHERE[name] for name in ("all", "half")}
    else:
        num_ranks = 4
        setting["arrangement"] = hybrid(2, 2)
        setting["outer_strategy"] = 1
        del offload["all"], offload["shards"]  # shards on the host are refused there
    scenario = Scenario(train_in_every_way, DENSE, optimizer)
    jobs = [(scenario, Setting(3, options=(("offload", where),), **setting)) for where in (None, *offload.values())]
    first, *others = zip(*run_ranks(num_ranks, run_sharded, jobs), strict=True)
    for name, other in zip(offload, others, strict=True):
        assert [each.losses for each in other] == [each.losses for each in first], name
        assert [each.digest for each in other] == [each.digest for each in first], name


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@on_ranks(2)
def test_state_of_scalars_that_the_optimizer_makes_before_sharding_moves_too() -> None:
    """As of Adagrad, whose sums begin in its constructor; the sum of a scalar is shaped as a counter of steps."""

    class Scaled(Floor):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    def trained(offload: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Scaled(), Scaled())
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
        return train(*fully_shard(model, optimizer, fsdp_unit_modules=[Floor], offload=offload), range(3))

    resident = trained(None)
    for offload in (["optimizer_state"], "all", ["compute_weights"]):
        assert_equal_tensors(trained(offload), resident)


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    """Return the weights after some steps."""
    for step in steps:
        x = torch.randn(2, TOWER_FEATURES, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        tower_loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.full_parameters().items()}


@on_ranks(1)
def test_steps_on_dtensors_are_refused_only_where_state_rests_elsewhere_than_weights() -> None:
    def step(offload: Any) -> None:
        model = Tower((32, 32))
        model, optimizer = fully_shard(
            model, torch.optim.SGD(model.parameters(), 0.1), offload=offload, zero_dp_strategy=3
        )
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])  # is stepped twice
        tower_loss(model, torch.randn(2, TOWER_FEATURES)).backward()
        optimizer.step()

    step("all")
    step(["compute_weights"])
    with pytest.raises(ConfigurationError, match="offload main_weights, too"):
        step(["optimizer_state"])


# ---- bytes -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_offloaded_state_takes_no_bytes_of_the_device() -> None:
    for offload, strategy in (("all", 3), (["optimizer_state"], 1), ({"main_weights": HALF}, 2)):
        model = Tower((32, 32, 32, 32))
        model, optimizer = fully_shard(
            model.bfloat16(),
            torch.optim.AdamW(model.parameters()),
            fsdp_unit_modules=[Floor],
            zero_dp_strategy=strategy,
            mixed_precision_policy=BF16,
            offload=offload,
        )
        tower_loss(model, torch.randn(2, TOWER_FEATURES, dtype=torch.bfloat16)).backward()
        optimizer.step()
        described = model.describe()
        groups = footprints_of(model)
        expected = persistent_bytes(groups, ShardingStrategy(strategy))
        held = model.memory()
        assert held.compute_weight_bytes == expected.compute_weight
        assert held.main_weight_bytes == expected.main_weight
        assert held.main_grad_bytes == expected.main_grad
        whole = persistent_bytes([replace(each, offloaded=frozenset()) for each in groups], ShardingStrategy(strategy))
        moved = {
            "compute_weights": whole.compute_weight - expected.compute_weight,
            "main_weights": whole.main_weight - expected.main_weight,
            "main_gradients": whole.main_grad - expected.main_grad,
        }
        for kind, count in moved.items():
            assert held.offloaded.get(kind, 0) == count, (offload, kind)
        assert held.offloaded["optimizer_state"] > 0
        counters = 4 * sum(1 for _ in model.parameters())
        state = described.memory.optimizer_bytes
        if offload == {"main_weights": HALF}:
            assert 0 < state < held.offloaded["optimizer_state"] + counters + whole.optimizer
        else:
            assert state == 0
        assert any(line.startswith("optimizer_state ") for line in described.memory.offload)
        del model, optimizer


@on_ranks(1)
def test_state_of_three_units_at_most_is_on_the_device_while_the_next_comes_and_the_last_goes() -> None:
    model = Tower((32,) * 6)
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), foreach=True),
        fsdp_unit_modules=[Floor],
        offload=["optimizer_state"],
    )
    borrowed: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    make = StateMemory.borrow

    def borrow(memory: StateMemory, value: torch.Tensor) -> torch.Tensor:
        made = make(memory, value)
        borrowed.append(weakref.ref(made))
        held.append(sum(found.numel() for each in borrowed if (found := each()) is not None))
        return made

    with patch.object(StateMemory, "borrow", borrow):
        for _ in range(2):  # the first makes the state
            tower_loss(model, torch.randn(2, TOWER_FEATURES)).backward()
            optimizer.step()
    assert len(borrowed) == 2 * 14
    assert max(held) == 3 * 2 * FLOOR_NUMEL
    assert not [each for each in borrowed if each() is not None]


@pytest.mark.full(short=["all-state"])
@pytest.mark.parametrize(("before", "after"), [("all", "state"), ("state", None)], ids=["all-state", "state-none"])
@on_ranks(2)
def test_a_run_goes_on_with_other_kinds_offloaded(tmp_path: Path, before: str, after: str | None) -> None:
    model, optimizer = towers(before)
    train(model, optimizer, range(2))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "saved")
    straight = train(model, optimizer, range(2, 4))
    model, optimizer = towers(after)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_equal_tensors(train(model, optimizer, range(2, 4)), straight)


def towers(offload: str | None) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    options = {"offload": None if offload is None else EVERYWHERE[offload], "fsdp_unit_modules": [Floor]}
    torch.manual_seed(0)
    return shard(Tower((32, 32, 32)), adamw, **options)
