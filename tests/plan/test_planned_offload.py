"""Plans of runs with offloaded state: the bytes of a live rank, the seconds by hand, and the choice."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.engine_options import Offload
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan import recommend
from megatron_fsdp.plan.machine import find_machine
from megatron_fsdp.plan.models import PRESETS
from megatron_fsdp.plan.planning import make_workload, plan_workload
from megatron_fsdp.plan.setup import ParallelRanks, Setup, make_setup
from megatron_fsdp.plan.sharded import held_bytes, offloaded_bytes, optimizer_bytes, plan_model
from tests.support.on_ranks import on_ranks
from tests.support.zoo import TOWER_FEATURES, Floor, Tower, tower_loss

GIVEN: dict[str, Any] = {
    "all": "all",
    "state": ["optimizer_state"],
    "half": {"main_weights": 0.5},
    "shards": ["compute_weights"],
}
BF16 = MixedPrecisionPolicy(torch.float32, torch.float32)


@pytest.mark.parametrize("given", list(GIVEN))
@on_ranks(1)
def test_a_plan_has_the_bytes_of_a_live_rank(given: str) -> None:
    model = Tower((32, 32, 64)).bfloat16()
    planned = plan_model(model, make_setup(1, policy=BF16, offload=GIVEN[given]), [Floor])
    live, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters()),
        fsdp_unit_modules=[Floor],
        mixed_precision_policy=BF16,
        offload=GIVEN[given],
    )
    tower_loss(live, torch.randn(2, TOWER_FEATURES, dtype=torch.bfloat16)).backward()
    optimizer.step()
    memory = live.memory()
    assert held_bytes(planned.groups) == (memory.compute_weight_bytes, memory.main_weight_bytes, memory.main_grad_bytes)
    assert offloaded_bytes(planned) == sum(memory.offloaded.values())
    assert optimizer_bytes(planned) == live.describe().memory.optimizer_bytes
    resident = plan_model(Tower((32, 32, 64)).bfloat16(), make_setup(1, policy=BF16), [Floor])
    assert offloaded_bytes(resident) == 0


@pytest.mark.full
def test_state_goes_to_the_host_where_nothing_else_fits_and_not_before() -> None:
    workload = make_workload({**PRESETS["llama-3.2-1b"], "num_hidden_layers": 2}, ParallelRanks(1))
    setup, machine = Setup(ParallelRanks(1)), find_machine("h100")
    resident = plan_workload(workload, setup, machine)
    assert resident.fits
    chosen = recommend(workload, setup, machine).best
    assert chosen is not None
    assert chosen.setup.offload == Offload()
    small = replace(machine, memory_bytes=resident.memory.peak_bytes - 2 * 2**30, reserved_bytes=0)
    found = recommend(workload, setup, small, ("none",)).best
    assert found is not None
    assert found.setup.offload.optimizer_state
    assert found.memory.peak_bytes + found.memory.offloaded_bytes >= resident.memory.peak_bytes
    assert found.hides_offload_from_tokens is not None
    assert recommend(workload, setup, replace(small, host_memory_bytes=1), ("none",)).best is None


def test_compute_weights_that_outer_ranks_write_into_stay() -> None:
    with pytest.raises(ConfigurationError, match="HFSDP"):
        make_setup({"dp_outer": 2, "dp_shard": 2}, outer_strategy="optim", offload=["compute_weights"])
