"""Where a sharded parameter shows its gradient: in `.grad`, or in `.decoupled_grad`, which torch knows nothing of.

Torch insists that `.grad` has the dtype of its parameter; an attribute of its own may have any.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import torch
from torch import nn

GradAttribute = Literal["grad", "decoupled_grad"]

GRAD: GradAttribute = "grad"
DECOUPLED: GradAttribute = "decoupled_grad"

_GRAD = attrgetter(GRAD)


def get_grad(param: nn.Parameter, attribute: GradAttribute) -> torch.Tensor | None:
    """The gradient that a parameter shows, or None."""
    found: torch.Tensor | None = getattr(param, attribute, None)
    return found


def get_grads(params: Sequence[nn.Parameter], attribute: GradAttribute) -> list[torch.Tensor | None]:
    """The same of several."""
    return list(map(_GRAD, params)) if attribute == GRAD else [get_grad(param, attribute) for param in params]


def set_grad(param: nn.Parameter, attribute: GradAttribute, grad: torch.Tensor | None) -> None:
    """Let a parameter show a gradient, or none."""
    setattr(param, attribute, grad)
