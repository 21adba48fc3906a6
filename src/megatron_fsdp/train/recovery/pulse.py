"""Signs of life of a rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Pulse:
    """What a rank did last, for whoever asks when it goes no further.

    Attributes:
        step: The step under way, from 1; 0 before the first.
        last_s: When it last got somewhere, on the clock `time.monotonic`.
        is_resting: Whether it does something that may take long, and whose collectives end a wait by themselves.
    """

    step: int = 0
    last_s: float = field(default_factory=time.monotonic)
    is_resting: bool = False

    def beat(self, step: int | None = None) -> None:
        """Note that this rank goes on, and with which step."""
        self.step = self.step if step is None else step
        self.last_s = time.monotonic()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While the block runs, silence is no standstill: loading, saving and evaluating take what they take."""
        self.is_resting = True
        try:
            yield
        finally:
            self.beat()
            self.is_resting = False

    @property
    def quiet_s(self) -> float:
        """Seconds since the last sign; 0 while it rests."""
        return 0.0 if self.is_resting else time.monotonic() - self.last_s
