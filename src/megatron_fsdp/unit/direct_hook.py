"""The hook that brings a gradient from autograd into its bucket.

It runs for every parameter in every backward, so it does the common case, a plain gradient that is the first for its
bucket, without calling anything of ours: that halves the host time of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Take = Callable[[torch.Tensor], None]
"""Called with a full parameter when autograd has accumulated its gradient."""

_STRIDED = torch.strided


def direct_hook(
    direct: list[torch.Tensor | None], filled: list[bool], arrived: list[bool], index: int, take: Take
) -> Take:
    """A hook for full parameter `index`.

    Args:
        direct: For each parameter, where its next gradient may be copied as it is; None: it may not.
        filled: For each, whether its bucket holds a gradient; raised by a copy.
        arrived: For each, whether a gradient has come since the last sync; raised by a copy.
        index: Which parameter.
        take: What every other gradient goes to, untouched.
    """

    def receive(param: torch.Tensor) -> None:
        place, grad = direct[index], param.grad
        if place is None or grad is None or grad.layout is not _STRIDED or grad.requires_grad:
            take(param)
            return
        direct[index] = param.grad = None
        place.copy_(grad)
        filled[index] = arrived[index] = True

    return receive
