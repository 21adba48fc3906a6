"""The scale of the loss in float16: as large as gradients allow, so that small ones do not vanish (Micikevicius 2018).

`torch.amp.GradScaler` looks for infinity in the gradients of each rank and optimizer. Here all ranks know the norm of
all gradients anyway, so nothing is looked for twice, and every engine, pipelines included, is scaled alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

GROWTH_INTERVAL = 1000
"""Steps without overflow after which the scale is doubled; Megatron-LM's `--loss-scale-window`."""


@dataclass
class LossScale:
    """What the loss is multiplied by; halved by an overflow, doubled after `GROWTH_INTERVAL` steps without one.

    Attributes:
        value: The scale; 1 or more.
        good_steps: Steps since it last changed.
    """

    value: float
    good_steps: int = 0

    def has_overflowed(self, loss: float, grad_norm: float) -> bool:
        """Whether a step failed through the scale alone: a loss that is finite, and gradients that a smaller one helps.

        Args:
            loss: Of the step, not scaled; the same on all ranks.
            grad_norm: Of all gradients, likewise.
        """
        return math.isfinite(loss) and not math.isfinite(grad_norm) and self.value > 1.0

    def grow(self) -> None:
        """Note a step that was taken."""
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2.0, 0

    def shrink(self) -> None:
        """Note a step that was not."""
        self.value, self.good_steps = max(1.0, self.value / 2.0), 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Out of a checkpoint."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


def make_loss_scale(is_half: bool, initial: float) -> LossScale | None:
    """The scale of a run; None where it computes in a dtype whose range is that of float32."""
    return LossScale(max(1.0, initial)) if is_half else None
