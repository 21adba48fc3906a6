"""This engine with one thing changed, to stand beside the whole of it in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

COMPILED = "-compiled"
"""What the name of a contender ends with whose blocks are compiled in place before they are wrapped."""

CLIPPING = "ours-3-clipping"
DEFERRED = "ours-3-deferred"
FUSED = "ours-3-fused"


@dataclass(frozen=True)
class Variant:
    """Strategy 3 with something changed.

    Attributes:
        options: Further arguments of `fully_shard`.
        around: Surrounds building and every step.
        defers: Whether only the last of several microbatches is reduced.
        clips: Whether gradients are clipped between backward and the optimizer's step, at a norm that is never reached.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    defers: bool = False
    clips: bool = False


PLAIN: Mapping[str, Variant] = {
    CLIPPING: Variant(clips=True),
    DEFERRED: Variant(defers=True),
    FUSED: Variant({"gradient_accumulation_fusion": True}),
}
"""Variants that are no optimisation switched off."""


def variants() -> dict[str, Variant]:
    """All of them by name."""
    from benchmarks.optimisations import OPTIMISATIONS

    return {**PLAIN, **{each.name: each.without for each in OPTIMISATIONS if each.without is not None}}
