"""From the time of a step to speeds: tokens, operations, and the share of what the hardware could do. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """What a step does, and what the hardware could.

    Attributes:
        tokens: Of all ranks in one optimizer step, without those that only fill up.
        flops: Operations that these tokens take, forward and backward, over all ranks; NaN: not known.
        ranks: All ranks, whatever they cut.
        peak_tflops: What one rank could do, in 10^12 operations per second; NaN: not known.
    """

    tokens: int
    flops: float = math.nan
    ranks: int = 1
    peak_tflops: float = math.nan

    def tokens_per_s(self, step_s: float) -> float:
        """Tokens of all ranks per second, for a step of so many seconds."""
        return self.tokens / step_s

    def tflops(self, step_s: float) -> float:
        """10^12 operations per second and rank; NaN: not known."""
        return self.flops / step_s / self.ranks / 1e12

    def mfu(self, step_s: float) -> float:
        """Model FLOPs utilization (Chowdhery et al. 2022, PaLM): the share of the peak; NaN: not known."""
        return self.tflops(step_s) / self.peak_tflops
