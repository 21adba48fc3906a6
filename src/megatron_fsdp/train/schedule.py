"""The learning rate of a step (pure)."""

import math

FINAL_FRACTION = 0.1


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of step `step` (0-based).

    Rises linearly over `warmup_steps`, reaching `peak` in the last of them, then falls along half a cosine to
    `FINAL_FRACTION * peak` in the last step (Loshchilov and Hutter 2017).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps + 1) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak * (FINAL_FRACTION + (1.0 - FINAL_FRACTION) * cosine)
