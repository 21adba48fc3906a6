"""Names and tensors of a live model as checkpoints of all ranks have them; only experts are not as they are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Names = list[list[str]]

_WRAPPERS = re.compile(r"^(module\.)+")


def bare(name: str) -> str:
    """A name without what wrappers put before it: any number of `module.`."""
    return _WRAPPERS.sub("", name)


def saved_name(model: nn.Module, name: str) -> str:
    """The name in a checkpoint of a parameter or buffer; what wrappers put before it stays."""
    translate: Callable[[str], str] | None = getattr(model, "checkpoint_name", None)
    if translate is None:
        return name
    inner = bare(name)
    return name.removesuffix(inner) + translate(inner)


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """Whether a bare name of a checkpoint is that of an expert of another rank."""
    translate: Callable[[str], str | None] | None = getattr(model, "held_name", None)
    return translate is not None and translate(name) is None


def saved_view(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is cut as the parameter of a bare name here, as a checkpoint has it; over the same memory."""
    view: Callable[[str, torch.Tensor], torch.Tensor] | None = getattr(model, "checkpoint_view", None)
    return tensor if view is None else view(name, tensor)


def listed_names(optimizer: torch.optim.Optimizer, model: nn.Module, own: Names) -> Names:
    """Names by the numbers of `optimizer.state_dict()`, in groups: those of all ranks where experts are divided.

    Args:
        optimizer: Of the model.
        model: Live.
        own: Names of this rank's parameters in a checkpoint, by group.
    """
    names: Callable[[torch.optim.Optimizer], Names | None] | None = getattr(model, "optimizer_names", None)
    found = None if names is None else names(optimizer)
    return own if found is None else [[f"module.{name}" for name in group] for group in found]


def by_number(names: Names) -> dict[Any, str]:
    """Names by their number."""
    return dict(enumerate(itertools.chain.from_iterable(names)))
