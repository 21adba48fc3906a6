"""Plain torch.distributed.checkpoint calls: saved by one arrangement of ranks, loaded by another, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.conftest import RunRanks
from tests.support.arrangements import divide_tensors, divide_tensors_and_sequences, hybrid, tensor_parallel
from tests.support.models import DENSE, MODEL_CASES, ModelCase
from tests.support.on_ranks import assert_equal_tensors
from tests.support.sharded_run import Run, Scenario, Setting, Values

ODD = MODEL_CASES["odd_shapes"]
Saved = tuple[Values, Values, float]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(run: Run) -> None:
    run.train(0, 1)


def trained(case: ModelCase, setting: Setting, *batches: int) -> Run:
    run = Run(Scenario(train, case, adamw), setting)
    run.train(*batches)
    return run


def state_of(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


def contents(run: Run) -> Saved:
    """Whole weights, whole first moments, which pose as gradients, and the loss of a whole batch."""
    assert run.sharded is not None
    weights = run.arrangement.whole(run.sharded.full_parameters())
    for group in run.sharded.parameter_groups():
        for param in group.sharded:
            param.grad = run.optimizer.state[param]["exp_avg"] if param in run.optimizer.state else None
    moments = run.arrangement.whole(run.sharded.full_gradients())
    run.sharded.zero_grad_buffer()
    with torch.no_grad():
        loss = run.case.loss(run.model, run.whole_batch(9)).item()
    return weights, moments, loss


def save(case: ModelCase, setting: Setting, folder: str) -> Saved:
    run = trained(case, setting, 0, 1)
    dcp.save(state_of(run), checkpoint_id=folder)
    return contents(run)


def load(case: ModelCase, setting: Setting, folder: str) -> Saved:
    run = trained(case, setting, 5)
    state = state_of(run)
    dcp.load(state, checkpoint_id=folder)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    return contents(run)


def load_whole(case: ModelCase, folder: str) -> dict[str, Tensor]:
    """Into the plain tensors of a model that is not sharded."""
    model = case.build()
    weights = {f"module.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load({"model": weights}, checkpoint_id=folder)
    return {name.removeprefix("module."): value for name, value in weights.items()}


def check(
    run_ranks: RunRanks, case: ModelCase, saved: tuple[int, Setting], loaded: tuple[int, Setting], folder: Path
) -> None:
    weights, moments, loss = run_ranks(saved[0], save, case, saved[1], str(folder))[0]
    assert all(bool(moment.any()) for name, moment in moments.items() if "norm" not in name)
    assert_equal_tensors(run_ranks(1, load_whole, case, str(folder))[0], weights)
    for found_weights, found_moments, found_loss in run_ranks(loaded[0], load, case, loaded[1], str(folder)):
        assert_equal_tensors(found_weights, weights)
        assert_equal_tensors(found_moments, moments)
        assert found_loss == pytest.approx(loss, rel=1e-6)


def hybrid_setting(inner: int, outer: int) -> Setting:
    return Setting(inner, outer_strategy=outer, arrangement=hybrid(2, 2))


HYBRID = {
    "HSDP to one rank": ((4, hybrid_setting(3, 0)), (1, Setting(3))),
    "HFSDP to three ranks": ((4, hybrid_setting(3, 1)), (3, Setting(2))),
    "HFSDP to HSDP": ((4, hybrid_setting(3, 1)), (4, hybrid_setting(3, 0))),
    "both axes replicated to HFSDP": ((4, hybrid_setting(0, 0)), (4, hybrid_setting(3, 1))),
    "ZeRO-1 over both axes to four ranks": ((4, hybrid_setting(1, 1)), (4, Setting(3))),
    "three ranks to HFSDP": ((3, Setting(3)), (4, hybrid_setting(3, 1))),
}


@pytest.mark.full(short=["HFSDP to HSDP"])
@pytest.mark.parametrize("way", HYBRID)
def test_hybrid_checkpoints_load_everywhere(run_ranks: RunRanks, tmp_path: Path, way: str) -> None:
    check(run_ranks, ODD, *HYBRID[way], tmp_path / "saved")


SEQUENCES, TENSORS = tensor_parallel(divide_tensors_and_sequences), tensor_parallel(divide_tensors)
BOTH = tensor_parallel(divide_tensors, 2)
TENSOR_PARALLEL = {
    "FSDP x TP to one rank": ((4, Setting(3, arrangement=TENSORS)), (1, Setting(3))),
    "FSDP x TP to four ranks": ((4, Setting(3, arrangement=SEQUENCES)), (4, Setting(3))),
    "ZeRO-1 x TP to FSDP x TP of another plan": (
        (4, Setting(1, arrangement=TENSORS)),
        (4, Setting(3, arrangement=SEQUENCES)),
    ),
    "replicated x TP to TP alone": ((4, Setting(0, arrangement=SEQUENCES)), (2, Setting(3, arrangement=TENSORS))),
    "HFSDP x TP to two ranks": ((4, Setting(3, outer_strategy=1, arrangement=BOTH)), (2, Setting(2))),
    "three ranks to FSDP x TP": ((3, Setting(3)), (4, Setting(3, arrangement=TENSORS))),
    "one rank to HSDP x TP": ((1, Setting(0)), (4, Setting(3, arrangement=BOTH))),
}


@pytest.mark.full(short=["ZeRO-1 x TP to FSDP x TP of another plan"])
@pytest.mark.parametrize("way", TENSOR_PARALLEL)
def test_tensor_parallel_checkpoints_load_everywhere(run_ranks: RunRanks, tmp_path: Path, way: str) -> None:
    check(run_ranks, DENSE, *TENSOR_PARALLEL[way], tmp_path / "saved")
