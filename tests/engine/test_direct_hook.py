"""A plain first gradient goes straight into the bucket; every other one takes the long way, untouched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_fsdp.engine.gradients import ParameterGradient, direct_hook


def parameter(value: float) -> nn.Parameter:
    """A parameter whose gradient has just come."""
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.full((2,), value)
    return param


def test_the_first_gradient_is_copied_with_the_cast_and_let_go() -> None:
    place, passed_on = torch.zeros(2, dtype=torch.float64), []
    gradient = ParameterGradient()
    gradient.direct = place
    hook = direct_hook(gradient, passed_on.append)
    param = parameter(3.0)
    hook(param)
    assert place.tolist() == [3.0, 3.0]
    assert (param.grad, passed_on) == (None, [])
    assert (gradient.direct, gradient.filled, gradient.arrived) == (None, True, True)
    param.grad = torch.ones(2)
    hook(param)  # the second of this backward has to be added
    assert passed_on == [param]
    assert place.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("reason", ["closed", "none", "sparse", "graph"])
def test_what_is_not_plain_is_passed_on_untouched(reason: str) -> None:
    place, passed_on = torch.zeros(2), []
    gradient = ParameterGradient()
    gradient.direct = None if reason == "closed" else place
    param = parameter(1.0)
    if reason == "none":
        param.grad = None
    elif reason == "sparse":
        param.grad = torch.ones(2).to_sparse()
    elif reason == "graph":
        param.grad = torch.ones(2, requires_grad=True) * 2
    before = param.grad
    direct_hook(gradient, passed_on.append)(param)
    assert passed_on == [param]
    assert param.grad is before
    assert place.tolist() == [0.0, 0.0]
    assert (gradient.filled, gradient.arrived) == (False, False)
    assert gradient.direct is (None if reason == "closed" else place)
