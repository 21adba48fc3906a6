"""Mixtures of experts on the meta device: routing is assumed to be balanced.

Which rows an expert gets is data. Memory depends on the number of rows only, where all experts are computed by
one grouped product, as transformers 5 does by default: k rows for each token, however they are routed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_GROUPED = "grouped_mm"
_FIELD = "_experts_implementation"


@contextmanager
def balanced_experts(model: nn.Module) -> Iterator[None]:
    """Let fused experts of transformers run without values: loops over experts become grouped products.

    Args:
        model: Its configs are changed inside of the block only; without experts nothing is done.
    """
    found: dict[int, Any] = {
        id(config): config
        for name, part in model.named_modules()
        if name.rpartition(".")[2] == "experts" and (config := getattr(part, "config", None)) is not None
    }
    loops = [config for config in found.values() if getattr(config, _FIELD, None) in (None, "eager")]
    before = [getattr(config, _FIELD, None) for config in loops]
    for config in loops:
        setattr(config, _FIELD, _GROUPED)
    try:
        yield
    finally:
        for config, implementation in zip(loops, before, strict=True):
            setattr(config, _FIELD, implementation)
