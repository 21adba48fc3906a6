"""Plans of runs whose state rests elsewhere: the bytes of a live rank, the seconds by hand, and the choice."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.homes import Homes, resolve_homes
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan import recommend
from megatron_fsdp.plan.machine import find_machine
from megatron_fsdp.plan.models import PRESETS
from megatron_fsdp.plan.planning import make_workload, plan_workload
from megatron_fsdp.plan.setup import ParallelRanks, Setup, make_setup
from megatron_fsdp.plan.sharded import away_bytes, held_bytes, home_step_s, optimizer_bytes, plan_model, step_bytes
from tests.support.on_ranks import on_ranks
from tests.support.zoo import TOWER_FEATURES, Floor, Tower, tower_loss

GIVEN: dict[str, Any] = {
    "all": "host",
    "state": {"optimizer_state": "host"},
    "half": {"main_weights": {"home": "host", "fraction": 0.5}},
    "shards": {"compute_weights": "host"},
}
BF16 = MixedPrecisionPolicy(torch.float32, torch.float32)


@pytest.mark.parametrize("given", list(GIVEN))
@on_ranks(1)
def test_a_plan_has_the_bytes_of_a_live_rank(given: str) -> None:
    model = Tower((32, 32, 64)).bfloat16()
    planned = plan_model(model, make_setup(1, policy=BF16, homes=GIVEN[given]), [Floor])
    live, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters()),
        fsdp_unit_modules=[Floor],
        mixed_precision_policy=BF16,
        homes=GIVEN[given],
    )
    tower_loss(live, torch.randn(2, TOWER_FEATURES, dtype=torch.bfloat16)).backward()
    optimizer.step()
    memory = live.memory()
    assert held_bytes(planned.groups) == (
        memory.compute_weight_bytes,
        memory.main_weight_bytes,
        memory.main_grad_bytes,
    )
    assert away_bytes(planned) == sum(memory.away.values())
    assert optimizer_bytes(planned) == live.describe().memory.optimizer_bytes
    home = resolve_homes(None, ShardingStrategy.optim_grads_params)
    resident = plan_model(Tower((32, 32, 64)).bfloat16(), make_setup(1, policy=BF16, homes=home), [Floor])
    assert away_bytes(resident) == 0


def test_the_seconds_of_a_step_by_hand() -> None:
    machine = find_machine("h100")
    numel = sum(param.numel() for param in Tower().parameters())
    sharded = ShardingStrategy.optim_grads_params

    def seconds(given: Any) -> float:
        setup = make_setup(1, policy=BF16, optimizer="adamw", homes=resolve_homes(given, sharded))
        return home_step_s(plan_model(Tower().bfloat16(), setup, [Floor]), machine)

    assert seconds(None) == 0.0
    # seven passes over fp32 by the host, and fp32 weights back
    there = 7 * 4 * numel / machine.host_bytes_per_s + 4 * numel / machine.host_link_bytes_per_s
    assert seconds("host") == pytest.approx(there)
    counters = 4 * len(list(Tower().parameters()))
    both_ways = (8 * numel + counters) / machine.host_link_bytes_per_s
    assert seconds({"optimizer_state": "host"}) == pytest.approx(both_ways)


def test_state_of_three_groups_is_on_the_device_while_it_steps() -> None:
    homes = resolve_homes({"optimizer_state": "host"}, ShardingStrategy.optim_grads_params)
    setup = make_setup(1, policy=BF16, optimizer="adamw", homes=homes)
    planned = plan_model(Tower((32, 64, 32, 32)).bfloat16(), setup, [Floor])
    widths = (64, 32, 32)
    resident = plan_model(Tower((32, 64, 32, 32)).bfloat16(), replace(setup, homes=Homes()), [Floor])
    paged = step_bytes(planned) - step_bytes(resident)
    assert paged == sum(8 * 2 * TOWER_FEATURES * width + 2 * 4 for width in widths)  # and two counters each


def test_state_goes_to_the_host_where_nothing_else_fits_and_not_before() -> None:
    workload = make_workload({**PRESETS["llama-3.2-1b"], "num_hidden_layers": 2}, ParallelRanks(1))
    setup, machine = Setup(ParallelRanks(1)), find_machine("h100")
    resident = plan_workload(workload, setup, machine)
    assert resident.fits
    chosen = recommend(workload, setup, machine).best
    assert chosen is not None
    assert chosen.setup.homes == Homes()
    small = replace(machine, memory_bytes=resident.memory.peak_bytes - 2 * 2**30, reserved_bytes=0)
    found = recommend(workload, setup, small, ("none",)).best
    assert found is not None
    assert found.setup.homes.optimizer_state.is_away
    assert found.memory.peak_bytes + found.memory.away_bytes >= resident.memory.peak_bytes
    assert found.hides_homes_from_tokens is not None
    assert recommend(workload, setup, replace(small, host_memory_bytes=1), ("none",)).best is None


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_state_that_cannot_rest_alone_is_neither_planned_nor_recommended(optimizer: str) -> None:
    with pytest.raises(ConfigurationError, match="rests beside its main weights"):
        make_setup(1, optimizer=optimizer, homes={"optimizer_state": "host"})
    workload = make_workload({**PRESETS["llama-3.2-1b"], "num_hidden_layers": 2}, ParallelRanks(1))
    small = replace(find_machine("h100"), memory_bytes=2**20, reserved_bytes=0)
    found = recommend(workload, make_setup(1, optimizer=optimizer), small, ("none",))
    homes = [plan.setup.homes for plan in found.plans]
    assert any(each.main_weights.is_away for each in homes)
    assert all(each.main_weights.is_away or not each.optimizer_state.is_away for each in homes)


def test_compute_weights_that_outer_ranks_write_into_stay() -> None:
    with pytest.raises(ConfigurationError, match="HFSDP"):
        make_setup({"dp_outer": 2, "dp_shard": 2}, outer_strategy="optim", homes={"compute_weights": "host"})
