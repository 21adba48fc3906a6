"""Rotary embeddings whose frequencies depend on the length of the sequence see the whole of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rope that choose their frequencies by the largest position they are shown."""


def show_whole_length(model: nn.Module, ranks: int) -> None:
    """Show rotary modules that look at the largest position the last one of the sequence, which one rank alone has.

    Otherwise ranks would rotate the tokens of one sequence by different frequencies.

    Args:
        model: Searched for modules with such a `rope_type`.
        ranks: How many have equal parts of a sequence.
    """
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        found = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if found & _BY_LENGTH:
            part.register_forward_pre_hook(partial(_append_last, ranks), with_kwargs=True)
            part.register_forward_hook(_drop_last)


def _append_last(
    ranks: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    in_kwargs = "position_ids" in kwargs
    positions: Tensor = kwargs["position_ids"] if in_kwargs else args[1]
    last = torch.full_like(positions[..., :1], positions.shape[-1] * ranks - 1)
    longer = torch.cat([positions, last], -1)
    if in_kwargs:
        return args, {**kwargs, "position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def _drop_last(_module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cosines and sines, (batch, tokens, size), without those of the appended position."""
    return tuple(part[:, :-1] for part in output)
