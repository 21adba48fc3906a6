"""Activation recomputation: modules that run again in backward, and keep only their inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.setup import Recompute

_ATEN = torch.ops.aten
PRODUCTS = frozenset((_ATEN.mm, _ATEN.addmm, _ATEN._grouped_mm))
"""Products with weights, which may use 8-bit formats."""
GROUPED = _ATEN._grouped_mm
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
}
_KEPT, _AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
_PARTS: dict[Recompute, tuple[str, ...]] = {
    "selective": ("self_attn", "self_attention", "attention", "attn"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe"),
}


@contextmanager
def recomputing(model: nn.Module, unit_names: Sequence[str], recompute: Recompute) -> Iterator[None]:
    """Recompute modules in backward inside the block (torch's checkpoint), so that they keep only their inputs.

    Hooks of the modules run outside the recomputation, like the engine's. Random numbers are drawn anew, which changes
    no shape. `unit_names` begin with the root.
    """
    chosen = [model.get_submodule(name) for name in _names(model, unit_names, recompute)]
    had = [module.__dict__.get("forward") for module in chosen]
    for module in chosen:
        _wrap(module, _CONTEXTS.get(recompute))
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
    if recompute not in _PARTS:
        names, wanted = units, "besides the root"
    else:
        parts = _PARTS[recompute]
        children = ((unit, child) for unit in units for child, _ in model.get_submodule(unit).named_children())
        names, wanted = [f"{unit}.{child}" for unit, child in children if child in parts], f"with {', '.join(parts)}"
    if not names:
        raise ConfigurationError(f"recompute={recompute!r}, but the model has no units {wanted}; use 'none'")
    return names


def _wrap(module: nn.Module, contexts: Callable[[], tuple[Any, Any]] | None) -> None:
    forward = module.forward
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    module.forward = recomputed


def every_second_product(products: Collection[Any] = PRODUCTS) -> Callable[..., CheckpointPolicy]:
    """Make a policy for one pass of a unit: it keeps attention and the first, third, ... of these matrix products."""
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        packet = operator.overloadpacket
        if packet in products:
            seen[context.is_recompute] += 1
            return _KEPT if seen[context.is_recompute] % 2 else _AGAIN
        return _KEPT if packet in _ATTENTION else _AGAIN

    return policy


def keeping_every_second_product(products: Collection[Any] = PRODUCTS) -> tuple[Any, Any]:
    """Keep the results of attention and of the first, third, ... of these products of a unit; recompute the rest."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(every_second_product(products))
    return contexts


_CONTEXTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "selective": functools.partial(create_selective_checkpoint_contexts, [packet.default for packet in PRODUCTS]),
    "every_second_product": keeping_every_second_product,
}
