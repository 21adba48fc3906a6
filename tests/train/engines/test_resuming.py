"""A run that is saved and goes on comes to what one run comes to, with every engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.train.checkpoints import RunCheckpoints
from megatron_fsdp.train.loop import train
from megatron_fsdp.train.recovery.resuming import find_origin
from tests.conftest import RunRanks
from tests.train.engines.runs import DECODER, LLAMA, MIXTRAL, Results, Silent, prepare, results_of

FSDP2 = {"use_torch_fsdp2": True}
UNITS = {"use_megatron_fsdp": True}


def train_with_checkpoints(values: dict[str, Any]) -> Results:
    run, watcher = prepare(values), Silent()
    with RunCheckpoints(run, find_origin(run.job, watcher.say), watcher.say) as keeper:
        train(run, watcher, keeper)
    return results_of(run, watcher)


def train_twice(values: dict[str, Any], folder: str) -> tuple[Results, Results]:
    """Three steps that are saved after the second, and the third once more from there."""
    whole = train_with_checkpoints({**values, "save": folder, "save_interval": 2, "lr_decay_iters": 3})
    return whole, train_with_checkpoints({**values, "load": f"{folder}/iter_0000002", "lr_decay_iters": 3})


@pytest.mark.parametrize(
    "values",
    [
        {**DECODER, **FSDP2},
        {**DECODER, **UNITS, "fp16": True, "initial_loss_scale": 64.0},
        {**LLAMA, **FSDP2},
        {**LLAMA, **FSDP2, "tensor_model_parallel_size": 2},
        {**MIXTRAL, **FSDP2, "expert_model_parallel_size": 2},
        {**LLAMA, **UNITS, "tensor_model_parallel_size": 2},
        {**LLAMA, **UNITS, "context_parallel_size": 2},
    ],
)
def test_third_step_is_the_same_from_a_checkpoint(run_ranks: RunRanks, values: dict[str, Any], tmp_path: Path) -> None:
    for whole, resumed in run_ranks(2, train_twice, values, str(tmp_path / "saved")):
        assert resumed.losses == whole.losses[2:]
        assert resumed.norms == whole.norms[2:]
        assert resumed.held_out == whole.held_out
        assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
