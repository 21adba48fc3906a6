"""Where a sharded parameter shows its gradient: in `.grad`, or in `.decoupled_grad`, which torch knows nothing of.

Torch insists that `.grad` has the dtype of its parameter; an attribute of its own may have any.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Literal

import torch
from torch import nn

GradAttribute = Literal["grad", "decoupled_grad"]

GRAD: GradAttribute = "grad"
DECOUPLED: GradAttribute = "decoupled_grad"

_GRAD = attrgetter(GRAD)

plain_attributes = torch._C.DisableTorchFunctionSubclass
"""A context in which attributes of DTensors cost what those of tensors do.

Torch looks for `__torch_function__` at each access to an attribute of a subclass, which takes several times as long as
the access. DTensors have none, so that nothing else changes.
"""


def get_grad(param: torch.Tensor, attribute: GradAttribute) -> torch.Tensor | None:
    """The gradient that a parameter shows, or None."""
    found: torch.Tensor | None = getattr(param, attribute, None)
    return found


def get_grads(params: Sequence[torch.Tensor], attribute: GradAttribute) -> list[torch.Tensor | None]:
    """The same of several."""
    with plain_attributes():
        return list(map(_GRAD, params)) if attribute == GRAD else [get_grad(param, attribute) for param in params]


def num_shown(grads: Sequence[torch.Tensor | None]) -> int:
    """How many of some gradients are there."""
    return sum(map(is_not, grads, repeat(None)))


def set_grads(params: Sequence[nn.Parameter], grads: Sequence[torch.Tensor | None]) -> None:
    """Let each of some parameters show a gradient, or none, as `.grad`."""
    with plain_attributes():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def set_grad(param: nn.Parameter, attribute: GradAttribute, grad: torch.Tensor | None) -> None:
    """Let a parameter show a gradient, or none."""
    setattr(param, attribute, grad)
