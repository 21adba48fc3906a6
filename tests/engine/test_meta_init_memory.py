"""The peak of meta-device initialisation: what is held for good, and the full tensors of one unit."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp import fully_shard_model
from tests.conftest import RunRanks
from tests.support.live_bytes import LiveBytes

FP32_BYTES = 4
FEATURES, HIDDEN, FLOORS = 64, 128, 8
ROOT_NUMEL, FLOOR_NUMEL = 2 * FEATURES * FEATURES, 2 * FEATURES * HIDDEN
SCALARS_BYTES = 128
"""The results of checks."""


class Floor(nn.Module):
    """Two layers, which initialise themselves one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ResetFloor(Floor):
    """A floor with a method of its own, which has to see all it holds at once."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up.weight)
        nn.init.normal_(self.down.weight)


class Tower(nn.Module):
    """A layer, eight floors, a layer; the two layers belong to the root. Its bytes divide over 1, 2 and 4 ranks."""

    floor: type[Floor] = Floor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.floors = nn.Sequential(*(self.floor() for _ in range(FLOORS)))
        self.last = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.floors(self.first(x)))


class ResetFloorTower(Tower):
    """Floors that see all they hold at once."""

    floor = ResetFloor


class ModelMethodTower(Tower):
    """A model that initialises every module below it after construction, and itself last."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


@dataclass(frozen=True)
class Reading:
    """Bytes on one rank: at the peak of wrapping, and after it."""

    peak_bytes: int
    held_bytes: int


def measure(tower: type[Tower], strategy: int) -> Reading:
    with torch.device("meta"):
        model = tower()
    torch.manual_seed(0)
    with LiveBytes() as live:
        wrapped = fully_shard_model(
            model, fsdp_unit_modules=[Floor], zero_dp_strategy=strategy, init_model_with_meta_device=True
        )
    return Reading(live.peak_bytes, wrapped.memory().persistent_bytes)


@pytest.mark.full(short=["one module-0-2", "one unit-3-2", "root and one unit-3-2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize(
    ("tower", "extra_numel"),
    [(Tower, FLOOR_NUMEL // 2), (ResetFloorTower, FLOOR_NUMEL), (ModelMethodTower, FLOOR_NUMEL + ROOT_NUMEL)],
    ids=["one module", "one unit", "root and one unit"],
)
def test_wrapping_takes_the_shards_and_what_one_method_has_to_see(
    tower: type[Tower], extra_numel: int, strategy: int, num_ranks: int, run_ranks: RunRanks
) -> None:
    ranks_of_shards = 1 if strategy == 0 else num_ranks
    shards_bytes = 2 * FP32_BYTES * (ROOT_NUMEL + FLOORS * FLOOR_NUMEL) // ranks_of_shards
    for reading in run_ranks(num_ranks, measure, tower, strategy):
        assert reading.held_bytes == shards_bytes  # weights and gradients
        extra = reading.peak_bytes - shards_bytes // 2  # gradients are taken when there are some
        assert FP32_BYTES * extra_numel <= extra <= FP32_BYTES * extra_numel + SCALARS_BYTES
