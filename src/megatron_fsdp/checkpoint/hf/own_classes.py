"""The classes of modules as their authors wrote them, where torch's `fully_shard` has put others in front."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module: `LlamaForCausalLM`, not `FSDPLlamaForCausalLM`."""
    kinds: Any = type(module).__mro__
    found: type[nn.Module] = next(kind for kind in kinds if not issubclass(kind, FSDPModule))
    return found


@contextlib.contextmanager
def with_own_classes(module: nn.Module) -> Iterator[None]:
    """Let all modules of a model have their own classes meanwhile: transformers looks conversions up by class name."""
    changed: list[tuple[Any, type]] = [(part, type(part)) for part in module.modules() if isinstance(part, FSDPModule)]
    for part, _ in changed:
        part.__class__ = own_class(part)
    try:
        yield
    finally:
        for part, kind in changed:
            part.__class__ = kind
