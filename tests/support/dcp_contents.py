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
from torch.distributed.tensor import DTensor


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what plain calls save and load."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Load what a folder holds into a model and an optimizer, by plain calls. Collective where there are ranks."""
    state = state_of(model, optimizer)
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State of an optimizer by parameter and slot, whole. Collective."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        f"{names[id(param)]}/{slot}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for param, state in optimizer.state.items()
        for slot, value in state.items()
    }


class Stateful:
    """Something that has a state dict."""

    def __init__(self, state: Any = None) -> None:
        self.state = state or {}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


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
