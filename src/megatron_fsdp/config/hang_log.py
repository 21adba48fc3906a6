"""The settings of logs for hangs, and the environment variables that switch them on."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.errors import ConfigurationError

FOLDER_VARIABLE = "MFSDP_HANG_LOG"
TIMEOUT_VARIABLE = "MFSDP_HANG_TIMEOUT"


@dataclass(frozen=True)
class HangSettings:
    """Settings of a log for hangs.

    Attributes:
        folder: Where the ranks keep their logs; one that all of them see, where there is one.
        timeout_s: Report when a phase has taken this many seconds without news; None: only when asked.
    """

    folder: Path
    timeout_s: float | None = None


def checked_timeout(given: float | str, name: str = "timeout_s") -> float:
    """Return a time in seconds."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0.0 and math.isfinite(seconds)):
        raise ConfigurationError(f"{name}={given!r} is not a time to wait; give seconds, more than 0")
    return seconds


def resolve_hang_log(environment: Mapping[str, str] = os.environ) -> HangSettings | None:
    """Read the settings from the environment; None: keep no log."""
    folder, seconds = environment.get(FOLDER_VARIABLE, ""), environment.get(TIMEOUT_VARIABLE, "")
    if seconds and not folder:
        raise ConfigurationError(
            f"{TIMEOUT_VARIABLE}={seconds} has no effect without {FOLDER_VARIABLE}; name a folder for the logs too"
        )
    if not folder:
        return None
    return HangSettings(Path(folder), checked_timeout(seconds, TIMEOUT_VARIABLE) if seconds else None)
