"""Mixtures of experts without values: routing is balanced.

Which rows an expert gets is data. What is alive depends on the number of rows only, where all experts are computed by
one grouped product, as transformers 5 does by default: k rows for each token, however they are routed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megatron_fsdp.errors import ConfigurationError

_GROUPED = "grouped_mm"
_FIELD = "_experts_implementation"


@contextmanager
def balanced_experts(model: nn.Module) -> Iterator[None]:
    """Let fused experts of transformers compute without values, each as many rows as any other.

    Experts that are computed one after another ("eager") get equally many rows, up to one; families whose loop is not
    the common one are computed by grouped products instead.

    Args:
        model: Changed inside of the block only; without experts nothing is done.

    Raises:
        ConfigurationError: Experts have neither a common loop nor a grouped product.
    """
    with ExitStack() as stack:
        for part in fused_experts(model).values():
            stack.enter_context(_without_values(part))
        yield


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold the weights of all experts of a layer, stacked, by name."""
    return {name: part for name, part in model.named_modules() if _is_fused(name, part)}


def _is_fused(name: str, part: nn.Module) -> bool:
    weights = dict(part.named_parameters(recurse=False))
    if name.rpartition(".")[2] != "experts" or not isinstance(getattr(part, "num_experts", None), int):
        return False
    stacked = all(weight.dim() > 0 and len(weight) == part.num_experts for weight in weights.values())
    return stacked and any(weight.dim() == 3 for weight in weights.values()) and len(_arguments(part)) == 3


def _arguments(part: nn.Module) -> list[str]:
    parameters = inspect.signature(part.forward).parameters.values()
    return [known.name for known in parameters if known.kind is known.POSITIONAL_OR_KEYWORD]


@contextmanager
def _without_values(part: nn.Module) -> Iterator[None]:
    """Loops over experts depend on values: the common one runs balanced, others give way to grouped products."""
    config: Any = getattr(part, "config", None)
    before = getattr(config, _FIELD, None)
    if before not in (None, "eager"):
        yield
    elif _loops_plainly(part):
        had = part.__dict__.get("forward")
        part.__dict__["forward"] = functools.partial(_balanced_loop, part)
        try:
            yield
        finally:
            del part.__dict__["forward"]
            if had is not None:
                part.__dict__["forward"] = had
    elif config is None:
        raise ConfigurationError(
            f"{type(part).__name__} has no grouped product, so which rows are computed depends on values; profile "
            "experts of transformers 5 that have one"
        )
    else:
        setattr(config, _FIELD, _GROUPED)
        try:
            yield
        finally:
            setattr(config, _FIELD, before)


def _loops_plainly(part: nn.Module) -> bool:
    """Whether the module's loop is the common one: gate and up in one stack of matrices, down in another, no biases."""
    names = {name for name, _ in part.named_parameters()}
    turned = getattr(part, "is_transposed", False)
    return names == {"gate_up_proj", "down_proj"} and not turned and hasattr(part, "_apply_gate")


def _balanced_loop(part: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the loop keeps and computes where every expert gets as many rows as any other, up to one.

    Args:
        part: The experts; `loops_plainly`.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k).
        top_k_weights: (tokens, k).

    Returns:
        (tokens, hidden).
    """
    final = torch.zeros_like(hidden_states)
    mask, hit = _masks(top_k_index, part.num_experts)
    for expert, rows in _rows(top_k_index.numel(), part.num_experts):
        _ = hit[expert], mask[expert]
        position, token = top_k_index.new_empty((rows, 2), dtype=torch.int64).unbind(1)
        current = hidden_states[token]
        current = _gated(part, linear(current, part.gate_up_proj[expert]))
        current = linear(current, part.down_proj[expert])
        current = current * top_k_weights[token, position, None]
        final.index_add_(0, token, current.to(final.dtype))
    return final


def _gated(part: Any, gate_up: Tensor) -> Tensor:
    gated: Tensor = part._apply_gate(gate_up)
    return gated


@torch.no_grad()
def _masks(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Which choice of which token is which expert, and the experts that are chosen; both only stay alive here."""
    mask = index.new_zeros((*index.shape, num_experts + 1), dtype=torch.int64)
    mask = mask.scatter_(-1, index.unsqueeze(-1), 1).permute(2, 1, 0)
    chosen = torch.greater(mask.sum(dim=(-1, -2)), 0)
    return mask, chosen.new_empty((min(num_experts, index.numel()), 1), dtype=torch.int64)


def _rows(total: int, num_experts: int) -> Iterator[tuple[int, int]]:
    """Each expert that gets rows, and how many."""
    least, more = divmod(total, num_experts)
    for expert in range(num_experts):
        rows = least + (expert < more)
        if rows:
            yield expert, rows
