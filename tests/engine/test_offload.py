"""State that rests elsewhere: the results of the resident run, bit for bit, and the bytes on the device."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.local_step import StateMemory
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid
from tests.support.case import FP32, Recording, Run, Scenario, Setting, assert_parity, reference, run_sharded, shard
from tests.support.case import adamw_above_noise as adamw
from tests.support.formulas import footprints_of, persistent_bytes
from tests.support.on_ranks import assert_equal_tensors, on_ranks
from tests.support.zoo import DENSE, FLOOR_NUMEL, MODEL_CASES, TOWER_FEATURES, tower_case, tower_loss

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


def assert_bits_of_the_resident_run(
    run_ranks: RunRanks, num_ranks: int, scenario: Scenario, setting: Setting, offloads: dict[str, Any]
) -> list[Recording]:
    """Return what the resident run recorded."""
    settings = [replace(setting, options=(("offload", where),)) for where in (None, *offloads.values())]
    jobs = [(scenario, each) for each in settings]
    first, *others = zip(*run_ranks(num_ranks, run_sharded, jobs), strict=True)
    for name, other in zip(offloads, others, strict=True):
        assert [each.losses for each in other] == [each.losses for each in first], name
        assert [each.digest for each in other] == [each.digest for each in first], name
    return list(first)


@pytest.mark.parametrize("strategy", [1, 3])
def test_steps_equal_those_of_the_resident_run_bit_for_bit(run_ranks: RunRanks, strategy: int) -> None:
    scenario = Scenario(train_in_every_way, DENSE, adamw)
    offloads = {name: where for name, where in EVERYWHERE.items() if strategy == 3 or name != "shards"}
    resident = assert_bits_of_the_resident_run(run_ranks, 2, scenario, Setting(strategy), offloads)
    assert_parity(resident, reference(scenario, 2), FP32)


@pytest.mark.full(short=["half precision", "scalars"])
@pytest.mark.parametrize("kind", ["half precision", "formats", "shared outside", "whole tensors", "scalars"])
def test_other_kinds_of_runs_do_too(run_ranks: RunRanks, kind: str) -> None:
    num_ranks, offloads = 2, dict(EVERYWHERE)
    scenario, setting = Scenario(train_in_every_way, DENSE, adamw), Setting(3)
    if kind in ("half precision", "formats"):
        setting = Setting(3, BF16 if kind == "half precision" else MixedPrecisionPolicy(weight_format="fp8"))
    elif kind == "whole tensors":
        scenario = replace(scenario, optimizer=adafactor)
        offloads = {name: EVERYWHERE[name] for name in ("all", "half")}
    elif kind == "scalars":
        scenario = Scenario(train_in_every_way, MODEL_CASES["scalars"], adagrad)
    else:
        num_ranks, setting = 4, Setting(3, outer_strategy=1, arrangement=hybrid(2, 2))
        del offloads["all"], offloads["shards"]  # shards on the host are refused there
    assert_bits_of_the_resident_run(run_ranks, num_ranks, scenario, setting, offloads)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Sums begin in its constructor, before sharding; that of a scalar is shaped as a counter of steps."""
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)


@on_ranks(1)
def test_steps_on_dtensors_are_refused_only_where_state_rests_elsewhere_than_weights() -> None:
    def step(offload: Any) -> None:
        model, optimizer = shard(tower_case((32, 32)), offload=offload)
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
        case = tower_case((32, 32, 32, 32), torch.bfloat16)
        options = {"zero_dp_strategy": strategy, "mixed_precision_policy": BF16, "offload": offload}
        model, optimizer = shard(case, adamw, **options)
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
    foreach = lambda model: torch.optim.AdamW(model.parameters(), foreach=True)  # noqa: E731
    model, optimizer = shard(tower_case((32,) * 6), foreach, offload=["optimizer_state"])
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
    scenario = Scenario(train_in_every_way, DENSE, adamw)
    first, again = (
        Run(scenario, Setting(3, options=(("offload", EVERYWHERE.get(name)),)))  # type: ignore[arg-type]
        for name in (before, after)
    )
    first.train(0, 1)
    first.save(tmp_path)
    first.train(2, 3)
    again.load(tmp_path)
    again.train(2, 3)
    assert first.sharded is not None
    assert again.sharded is not None
    assert_equal_tensors(again.sharded.full_parameters(), first.sharded.full_parameters())
