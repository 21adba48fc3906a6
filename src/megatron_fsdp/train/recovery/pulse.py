"""Signs of life of a rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Pulse:
    """What a rank did last, for whoever asks when it goes no further.

    Attributes:
        step: The step under way, from 1; 0 before the first.
        last_s: When it last got somewhere, on the clock `time.monotonic`.
    """

    step: int = 0
    last_s: float = field(default_factory=time.monotonic)

    def beat(self, step: int | None = None) -> None:
        """Note that this rank goes on, and with which step."""
        self.step = self.step if step is None else step
        self.last_s = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last sign."""
        return time.monotonic() - self.last_s
