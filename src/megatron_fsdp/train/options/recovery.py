"""The options about what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecoveryOptions:
    """When to go on, when to start again, when to give up.

    Attributes:
        max_restarts: How often all ranks are started again after one died, where torchrun did not start them.
        max_nan_steps: Steps in a row whose loss or gradient may be NaN or infinite; each is skipped and counted, and
            the run ends at one more.
        max_failed_saves: Saves in a row that may fail, as on a full disk; the run ends at one more.
        hang_timeout_minutes: A rank that has waited for so long explains who is missing, and the run ends; default: the
            time that a collective may take.
    """

    max_restarts: int = 0
    max_nan_steps: int = 3
    max_failed_saves: int = 3
    hang_timeout_minutes: float | None = None
