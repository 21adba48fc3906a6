"""Names and tensors of a live model as checkpoints of all ranks have them; only experts are not as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.stages import names_of_all

Names = list[list[str]]

PREFIX = "module."
_MOST_WRAPPERS = 8


def own_name(model: nn.Module, name: str) -> str:
    """A name as the model inside of our wrapper has it."""
    return name.removeprefix(PREFIX) if hasattr(model, "install_optimized_model_weights") else name


def saved_name(model: nn.Module, name: str) -> str:
    """The name in a checkpoint of a parameter or buffer of `named_parameters()`, without a prefix."""
    translate: Callable[[str], str] | None = getattr(model, "checkpoint_name", None)
    inner = own_name(model, name)
    return inner if translate is None else translate(inner)


def unwrapped(
    stored: Collection[str], known: Callable[[str], bool], first_guess: int = 0
) -> tuple[dict[str, str], int]:
    """Stored names without what wrappers put before them: as many `module.` as fit the known names best.

    Args:
        stored: Names with the same number of prefixes each.
        known: Whether a name, without prefixes, is one of the live model's.
        first_guess: How many prefixes to take where several fit as well.

    Returns:
        Stored name by the name without prefixes, and how many were taken.
    """
    most = min((_prefixes(name) for name in stored), default=0)
    guesses = sorted(range(most + 1), key=lambda count: (count != first_guess, -count))
    best = max(guesses, key=lambda count: sum(known(name[count * len(PREFIX) :]) for name in stored))
    return {name[best * len(PREFIX) :]: name for name in stored}, best


def _prefixes(name: str) -> int:
    count = 0
    while count < _MOST_WRAPPERS and name.startswith(PREFIX, count * len(PREFIX)):
        count += 1
    return count


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """Whether a bare name of a checkpoint is that of an expert of another rank, or of another stage of a pipeline."""
    if name in names_of_all(model):
        return True
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
    return own if found is None else found


def by_number(names: Names) -> dict[Any, str]:
    """Names by their number."""
    return dict(enumerate(itertools.chain.from_iterable(names)))
