"""Which modules are run again in backward, so that only their inputs stay alive in between."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.errors import ConfigurationError

Recompute = Literal["none", "full", "attention", "mlp"]
"""Nothing, every unit but the root, or the attention or the MLP (or mixture of experts) inside of each unit."""

_PARTS: dict[Recompute, tuple[str, ...]] = {
    "attention": ("self_attn", "self_attention", "attention", "attn"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe"),
}


@contextmanager
def recomputing(model: nn.Module, unit_names: Sequence[str], recompute: Recompute) -> Iterator[None]:
    """Inside of it, modules keep only their inputs and compute again in backward (non-reentrant checkpoints of torch).

    Hooks of the modules run outside of the recomputation, as the engine's do. Random numbers are drawn anew, which
    changes no shape.

    Args:
        model: Changed inside of the block only.
        unit_names: Name of each unit's module, the root first.
        recompute: Which modules.

    Raises:
        ConfigurationError: No such mode, or no such module.
    """
    chosen = [model.get_submodule(name) for name in _names(model, unit_names, recompute)]
    had = [module.__dict__.get("forward") for module in chosen]
    for module in chosen:
        _wrap(module)
    try:
        yield
    finally:
        for module, forward in zip(chosen, had, strict=True):
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward


def _names(model: nn.Module, unit_names: Sequence[str], recompute: Recompute) -> list[str]:
    if recompute == "none":
        return []
    units = list(unit_names[1:])
    if recompute == "full":
        names, wanted = units, "besides the root"
    elif recompute in _PARTS:
        parts = _PARTS[recompute]
        children = ((unit, child) for unit in units for child, _ in model.get_submodule(unit).named_children())
        names, wanted = [f"{unit}.{child}" for unit, child in children if child in parts], f"with {', '.join(parts)}"
    else:
        raise ConfigurationError(f"recompute={recompute!r}; choose none, full, {' or '.join(_PARTS)}")
    if not names:
        raise ConfigurationError(f"recompute={recompute!r}, but the model has no units {wanted}; use 'none'")
    return names


def _wrap(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.__dict__["forward"] = recomputed
