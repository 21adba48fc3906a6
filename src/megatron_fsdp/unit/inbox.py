"""Small gradients of one group wait here until the unit's backward is over, and are copied into the bucket together.

A copy of a small tensor is all overhead: one call for all of a unit costs a third of one call each on CPU, and one
kernel in place of many on CUDA. Large ones are copied as they come, while they are still in the cache, so what waits
is at most `WAITING_BYTES` for each parameter of the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WAITING_BYTES = 64 * 1024
"""Above this the copy itself takes several times as long as the call."""

_STRIDED = torch.strided


class Inbox:
    """Gradients that have come for one bucket.

    Args:
        count: Parameters of the group.

    Attributes:
        is_open: Whether gradients may wait here now.
        filled: For each parameter whether the bucket holds its gradient, or will once what waits is copied.
        indices: The parameters of the gradients that wait.
        gradients: These gradients.
    """

    __slots__ = ("filled", "gradients", "indices", "is_open")

    def __init__(self, count: int) -> None:
        self.is_open = False
        self.filled = [False] * count
        self.indices: list[int] = []
        self.gradients: list[Tensor] = []

    def begin(self, is_open: bool) -> None:
        """Another bucket begins to fill."""
        self.is_open = is_open
        self.filled[:] = [False] * len(self.filled)

    def takes(self, index: int) -> bool:
        """Whether a gradient of this parameter may wait now: it is the first for this bucket."""
        return self.is_open and not self.filled[index]

    def put(self, index: int, grad: Tensor) -> None:
        """Let the gradient of a parameter wait."""
        self.filled[index] = True
        self.indices.append(index)
        self.gradients.append(grad)

    def empty_into(self, views: Sequence[Tensor], arrived: list[bool]) -> None:
        """Copy what waits, with the cast.

        Args:
            views: The place of each parameter's gradient in the bucket.
            arrived: A flag per parameter, raised for those copied.
        """
        if not self.indices:
            return
        torch._foreach_copy_([views[index] for index in self.indices], self.gradients)
        for index in self.indices:
            arrived[index] = True
        self.clear()

    def clear(self) -> None:
        """Forget what waits."""
        self.indices.clear()
        self.gradients.clear()

    def hook(self, index: int, take: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """A hook for when autograd has accumulated the gradient of full parameter `index`.

        It runs for every parameter in every backward, so it does the common case without another call.

        Args:
            index: The parameter.
            take: Called with the parameter where its gradient cannot wait here.
        """
        filled, indices, gradients = self.filled, self.indices, self.gradients

        def receive(param: Tensor) -> None:
            grad = param.grad
            if (
                self.is_open
                and not filled[index]
                and grad is not None
                and grad.layout is _STRIDED
                and not grad.requires_grad
            ):
                param.grad = None
                filled[index] = True
                indices.append(index)
                gradients.append(grad)
            else:
                take(param)

        return receive
