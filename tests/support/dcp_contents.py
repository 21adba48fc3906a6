"""Everything that a checkpoint of torch.distributed.checkpoint holds, read by one process without ranks."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what plain calls save and load."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Load what a folder holds into a model and an optimizer, by plain calls. Collective where there are ranks."""
    state = state_of(model, optimizer)
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def contents(folder: str) -> dict[str, Any]:
    """Whole tensors and objects by their flat keys."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, checkpoint_id=folder, no_dist=True)
    return found


def assert_same_contents(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert the same keys, bits and objects."""
    assert found.keys() == expected.keys()
    differing = [key for key, want in expected.items() if not same(found[key], want)]
    assert not differing


def bits(values: torch.Tensor) -> bytes:
    """Return the bytes of all elements, in order."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Whether two nestings have the same types and are equal bit for bit; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))
