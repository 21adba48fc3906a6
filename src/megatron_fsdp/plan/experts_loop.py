"""The loop over experts that transformers runs where no grouped product is chosen, with balanced rows and no values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def loops_plainly(part: nn.Module) -> bool:
    """Whether the module's loop is the common one: gate and up in one stack of matrices, down in another, no biases."""
    names = {name for name, _ in part.named_parameters()}
    turned = getattr(part, "is_transposed", False)
    return names == {"gate_up_proj", "down_proj"} and not turned and hasattr(part, "_apply_gate")


def balanced_loop(part: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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
