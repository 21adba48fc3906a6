"""`torch.compile`: units are compiled, what surrounds them is not.

Hooks swap parameters and communicate, which no graph can hold, so the compiler is kept out of them. A unit that was
compiled in place before sharding is called inside its hooks instead of with them, so that its graph is whole (also with
`fullgraph=True`). Models that `torch.compile` has put into a box are taken out and compiled in place, with the same
options, so that names of parameters stay what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError

_REASON = (
    "the hooks of a sharded unit communicate; compile units before fully_shard (fullgraph=True then holds for the "
    "whole unit), or without fullgraph=True"
)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a function and all that it calls."""
    return torch.compiler.disable(function, reason=_REASON)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def surround(module: nn.Module, before: Callable[..., None], after: Callable[..., Any]) -> None:
    """Call hooks around a module that was compiled in place.

    Args:
        module: The module; what it calls is replaced.
        before: A forward pre-hook.
        after: A forward hook; is called after an exception too, with None.
    """
    compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
    before, after = uncompiled(before), uncompiled(after)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            before(None, args)
            output = compiled(*args, **kwargs)
        except BaseException:
            after(None, args, None)
            raise
        return after(None, args, output)

    module._compiled_call_impl = torch.compiler.disable(call, recursive=False)


def compiled_in_place(module: nn.Module) -> nn.Module:
    """Take modules out of the boxes that `torch.compile(module)` puts them into, and compile them in place.

    Args:
        module: A model; boxes inside it are replaced.

    Returns:
        The model, or what was in its box.

    Raises:
        ConfigurationError: A box of another kind than this version of torch makes.
    """
    if "torch._dynamo" not in sys.modules:
        return module  # nothing can have been compiled
    module = _unboxed(module)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = _unboxed(child)
    return module


def _unboxed(module: nn.Module) -> nn.Module:
    if not isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
        return module
    inner, context = module._orig_mod, getattr(module, "dynamo_ctx", None)
    if context is None:
        raise ConfigurationError(
            f"the options with which a {type(inner).__name__} was compiled cannot be read; compile it in place by "
            "module.compile(...) instead of torch.compile(module, ...)"
        )
    inner._compiled_call_impl = context(inner._call_impl)
    return inner
