"""The learning rate of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How the learning rate rises and falls.

    Attributes:
        peak: Largest rate.
        final: Rate at the end of the decay.
        style: `constant`, `linear`, `cosine`, `inverse-square-root` or `WSD`.
        warmup_steps: Steps in which it rises; fewer than `decay_steps`.
        decay_steps: Steps after which it has fallen all the way.
        wsd_steps: With style WSD, the steps of the linear fall at the end.
        initial: Rate that the warmup rises from.

    Numbers of steps that were said in samples may be no whole ones.
    """

    peak: float
    final: float
    style: str
    warmup_steps: float
    decay_steps: float
    wsd_steps: float = 0
    initial: float = 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step` (0-based).

        Rises linearly and reaches the peak in the last step of the warmup, so that the first step has a rate above 0.
        Falls so that the last step of the decay has the final rate: along half a cosine (Loshchilov and Hutter 2017),
        a line, or the inverse root of the step (Vaswani et al. 2017); WSD stays at the peak and falls at the end (Hu et
        al. 2024).
        """
        if step + 1 <= self.warmup_steps:
            return self.initial + (self.peak - self.initial) * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if step + 1 >= self.decay_steps:
            return self.final
        if self.style == "inverse-square-root":
            start = max(1, self.warmup_steps)
            return max(self.final, self.peak * math.sqrt(start / max(start, step + 1)))
        return self.final + (self.peak - self.final) * self._share_left(step)

    def _share_left(self, step: int) -> float:
        """Return the fraction of the way from the final rate up to the peak."""
        if self.style == "WSD":
            return min(1.0, (self.decay_steps - step - 1) / self.wsd_steps) if self.wsd_steps else 1.0
        fallen = (step - self.warmup_steps + 1) / (self.decay_steps - self.warmup_steps)
        return 1.0 - fallen if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * fallen))
