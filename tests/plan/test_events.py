"""Events of a profile against those that an observer of a sharded model is told."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard_model
from megatron_fsdp.engine.observer import Observer, Phase
from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.recompute import recomputing
from megatron_fsdp.plan.setup import Recompute
from tests.conftest import RunRanks
from tests.support.zoo import FLOORS, TOWER_FEATURES, Floor, Tower, tower_loss

UNITS = ["", *(f"floors.{index}" for index in range(FLOORS))]


class Events(Observer):
    """What begins and ends, in the compact form of a profile."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begins(self, phase: Phase, unit: int) -> None:
        if phase is Phase.FORWARD:
            self.told.append(f"F{unit}>")
        elif phase in (Phase.BACKWARD, Phase.FINALISE):
            self.told.append(f"B{unit}" if phase is Phase.BACKWARD else "E")

    def ends(self, phase: Phase, unit: int) -> None:
        if phase is Phase.FORWARD:
            self.told.append(f"F{unit}<")


def events_of_a_sharded_step(recompute: Recompute) -> str:
    model = Tower()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with recomputing(model, UNITS, recompute):
        sharded = fully_shard_model(model, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Floor])
        events = Events()
        sharded.observe(events)
        tower_loss(sharded, torch.ones(4, TOWER_FEATURES)).backward()
    return " ".join(events.told)


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_profile_has_the_events_of_the_engine(run_ranks: RunRanks, recompute: Recompute) -> None:
    with torch.device("meta"):
        model, given = Tower(), torch.empty(4, TOWER_FEATURES)
    profile = profile_compute(model, given, unit_names=UNITS, loss_fn=mean_square, recompute=recompute)
    assert run_ranks(2, events_of_a_sharded_step, recompute) == [profile.events] * 2
