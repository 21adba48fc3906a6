"""Changes to how a module's forward runs that leave its class, its hooks and the names of its parameters alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


def recompute_in_backward(module: nn.Module) -> None:
    """Keep only the inputs of a module's forward, and run it again in backward (non-reentrant).

    Hooks of the module, such as those that gather its weights, run outside: once in forward, and for recomputation
    the weights are gathered by the hooks of backward.
    """
    forward = _unbound(module)

    @functools.wraps(forward)
    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)
        return checkpoint(forward, self, *args, use_reentrant=False, **kwargs)

    module.forward = MethodType(recomputed, module)


def compile_forward(module: nn.Module) -> None:
    """Compile a module's forward by `torch.compile`; hooks around it stay eager, and no `_orig_mod` enters names."""
    module.forward = torch.compile(module.forward)


def run_under_autocast(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run a module's forward under `torch.autocast`."""
    forward = _unbound(module)

    @functools.wraps(forward)
    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return forward(self, *args, **kwargs)

    module.forward = MethodType(cast, module)


def _unbound(module: nn.Module) -> Forward:
    """A module's forward that takes the module: bound again, it lets deep copies use their own weights."""
    forward: Any = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__

    @functools.wraps(forward)
    def called(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return called
