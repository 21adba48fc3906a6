"""Moving or casting a sharded model: nothing where it is, a refusal elsewhere."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.conftest import RunRanks
from tests.support.api_net import Layer, build, largest_difference, mesh, train, weights


def wrap(strategy: int) -> MegatronFSDP:
    return fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)


def moves() -> dict[str, Any]:
    model = wrap(3)
    before = weights(model)
    same = [
        model.to("cpu"),
        model.cpu(),
        model.float(),
        model.to(torch.device("cpu"), torch.float32, non_blocking=True),
    ]
    found: dict[str, Any] = {
        "same": all(result is model for result in same),
        "kept": largest_difference(weights(model), before),
        "sharded": all(isinstance(param, DTensor) for param in model.parameters()),
    }
    for name, move in (
        ("half", model.half),
        ("bfloat16", lambda: model.to(torch.bfloat16)),
        ("double", lambda: model.to(dtype=torch.float64)),
        ("meta", lambda: model.to("meta")),
    ):
        try:
            move()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    found["kept after"] = largest_difference(weights(model), before)
    return found


@pytest.fixture(scope="module")
def moved(run_ranks: RunRanks) -> list[dict[str, Any]]:
    return run_ranks(2, moves)


def test_moving_to_where_it_is_does_nothing(moved: list[dict[str, Any]]) -> None:
    for found in moved:
        assert (found["same"], found["kept"], found["sharded"], found["kept after"]) == (True, 0.0, True, 0.0)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("half", "torch.float16 on cpu"),
        ("bfloat16", "torch.bfloat16 on cpu"),
        ("double", "torch.float64 on cpu"),
        ("meta", "torch.float32 on meta"),
    ],
)
def test_moving_or_casting_elsewhere_is_refused(name: str, target: str, moved: list[dict[str, Any]]) -> None:
    for found in moved:
        assert f"cannot be moved or cast (from torch.float32 on cpu to {target})" in found[name]
        assert "do that before fully_shard" in found[name]


def train_after_inner_cast() -> tuple[str, float]:
    """What was raised by casting or by the step after it; how far that step moved what the model computes with."""
    model = wrap(3)
    before = weights(model)
    try:
        model.module.to(torch.bfloat16)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, 1)
    except Exception as error:  # noqa: BLE001 - any refusal will do
        return str(error), 0.0
    return "", largest_difference(weights(model), before)


def test_casting_the_inner_module_does_not_stop_training_in_silence(run_ranks: RunRanks) -> None:
    """The wrapper refuses casts; its inner module is a plain module, whose cast swaps the memory behind the shards."""
    for refusal, moved_by in run_ranks(2, train_after_inner_cast):
        assert refusal or moved_by > 1e-3
