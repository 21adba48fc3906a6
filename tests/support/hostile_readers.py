"""Everything that reads checkpoints, as functions of a folder; and a small checkpoint for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.errors import CheckpointError

WEIGHT, STEP = "model.weight", "schedule.step"


def write_linear(folder: Path) -> None:
    """A linear layer and one object, as torch writes them."""
    state = {"model": dict(torch.nn.Linear(4, 3).state_dict()), "schedule": {"step": 5}}
    save_alone(state, checkpoint_id=folder)


def by_folder(folder: Path) -> None:
    opened = CheckpointFolder(folder)
    for key in opened.tensors:
        opened.read_tensor(key)
    for key in opened.objects:
        opened.read_object(key)


def by_loading(folder: Path) -> None:
    """With the step as something that a model's owner loads too."""

    class Step:
        def state_dict(self) -> dict[str, Any]:
            return {"step": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(f"given {state}")

    model = torch.nn.Linear(4, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load_checkpoint(model, None, folder, extra={"schedule": Step()}, with_rng=False)
    except CheckpointError as error:
        if "in memory now" not in str(error):
            assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        raise


def by_verify(folder: Path) -> None:
    report = verify(folder)
    if not report.is_whole:
        raise CheckpointError(str(report))


READERS = [by_folder, by_loading, by_verify]
Reader = Callable[[Path], None]


def refused(read: Reader, folder: Path, marker: Path, *told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    for words in told:
        assert words in str(caught.value)
    assert not marker.exists()
