"""One thing that differs between a sharded run and one process (plain data)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

INITIAL, LOSS, GRADIENT, NORM = "initial weight", "loss", "gradient", "gradient norm"
COUNTER, WEIGHT, STATE, BUFFER = "step counter", "weight", "optimizer state", "buffer"
LOADED, RESUMED = "checkpoint", "step after loading"


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs in one place of a run.

    Attributes:
        where: What kind of value: loss, gradient, gradient norm, step counter, weight, optimizer state, ...
        step: Optimizer step, from 1; 0 before the first.
        name: The tensor, by its name in the user's model; empty for the loss and the norm.
        kind: The cause, for programs (`Diagnosis.kind`).
        words: The cause, for people.
        ratio: Found over expected, where that is one number.
        error: Largest difference of an element.
        allowed: What was allowed for that element.
        also: Other tensors that differ in the same place.
    """

    where: str
    step: int
    name: str
    kind: str
    words: str
    ratio: float | None = None
    error: float = math.nan
    allowed: float = math.nan
    also: tuple[str, ...] = ()

    def told(self) -> str:
        """The difference in a sentence."""
        when = f" of step {self.step}" if self.step else ""
        name = f" `{self.name}`" if self.name else ""
        size = "" if math.isnan(self.error) else f" [off by {self.error:.3g}, allowed {self.allowed:.3g}]"
        more = f"; {len(self.also)} more differ there: {_few(self.also)}" if self.also else ""
        return f"{self.where}{when}{name} {self.words}{size}{more}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are not finite become None."""
        numbers = {key: getattr(self, key) for key in ("ratio", "error", "allowed")}
        return {
            "where": self.where,
            "step": self.step,
            "name": self.name,
            "kind": self.kind,
            "words": self.words,
            **{key: value if value is not None and math.isfinite(value) else None for key, value in numbers.items()},
            "also": list(self.also),
        }


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
