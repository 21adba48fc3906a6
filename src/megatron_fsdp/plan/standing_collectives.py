"""Collectives of model parallelism without ranks: what they allocate in forward and backward, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, part: Tensor) -> Tensor:
        return torch.empty_like(part)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: int, width: int) -> Tensor:
        ctx.part = part.shape[-1]
        return _gather(part, ranks, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, 0, ctx.part).clone(memory_format=torch.contiguous_format), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int, part: int) -> Tensor:
        ctx.ranks, ctx.width = ranks, whole.shape[-1]
        return whole.narrow(-1, 0, part).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grads[0], ctx.ranks, ctx.width), None, None


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return rows.new_empty(rows.shape[0] * ranks, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        return grad.new_empty(grad.shape[0] // ctx.ranks, *grad.shape[1:]), None


def _gather(part: Tensor, ranks: int, width: int) -> Tensor:
    """Parts arrive one after another, and are put beside each other."""
    arrived = part.new_empty(ranks * part.shape[0], *part.shape[1:])
    beside = torch.cat(arrived.chunk(ranks, 0), -1)
    return beside if beside.shape[-1] == width else beside.narrow(-1, 0, width)


def summed(part: Tensor) -> Tensor:
    """An all-reduce in forward; the gradient passes as it is."""
    result: Tensor = _Summed.apply(part)  # type: ignore[no-untyped-call]  # torch gives these no hints
    return result


def with_summed_gradient(whole: Tensor) -> Tensor:
    """The same tensor; an all-reduce of its gradient in backward."""
    result: Tensor = _SummedGradient.apply(whole)  # type: ignore[no-untyped-call]  # likewise
    return result


def gathered(part: Tensor, ranks: int, width: int) -> Tensor:
    """A gather of the last dimension in forward; backward takes the own part.

    Args:
        part: (..., own part), the largest of all ranks.
        ranks: Of the group.
        width: Of the whole.

    Returns:
        (..., width).
    """
    result: Tensor = _Gathered.apply(part, ranks, width)  # type: ignore[no-untyped-call]  # likewise
    return result


def own_part(whole: Tensor, ranks: int, part: int) -> Tensor:
    """The own part of the last dimension in forward; a gather in backward.

    Args:
        whole: (..., width).
        ranks: Of the group.
        part: Of this rank.

    Returns:
        (..., part).
    """
    result: Tensor = _OwnPart.apply(whole, ranks, part)  # type: ignore[no-untyped-call]  # likewise
    return result


def gathered_rows(rows: Tensor, ranks: int) -> Tensor:
    """A gather of the first dimension in forward, a reduce-scatter in backward.

    Args:
        rows: (rows, ...).
        ranks: Of the group.

    Returns:
        (ranks x rows, ...), rank by rank.
    """
    result: Tensor = _GatheredRows.apply(rows, ranks)  # type: ignore[no-untyped-call]  # likewise
    return result
