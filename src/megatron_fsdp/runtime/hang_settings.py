"""Whether a model keeps a log for hangs, where, and when to speak up."""

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
    """A log for hangs.

    Attributes:
        folder: Where the ranks keep their logs; one that all of them see, where there is one.
        timeout_s: Explain when a phase has been under way for so long without news; None: only when asked.
    """

    folder: Path
    timeout_s: float | None = None


def check_timeout(timeout_s: float | None, name: str = "timeout_s") -> None:
    """Refuse times that are none.

    Raises:
        ConfigurationError: Not positive, or not finite.
    """
    if timeout_s is not None and not (timeout_s > 0.0 and math.isfinite(timeout_s)):
        raise ConfigurationError(f"{name}={timeout_s!r} is no time to wait; give seconds, more than 0")


def resolve_hang_log(environment: Mapping[str, str] = os.environ) -> HangSettings | None:
    """What the environment says; None: keep no log.

    Args:
        environment: Where `MFSDP_HANG_LOG` may name a folder, and `MFSDP_HANG_TIMEOUT` seconds.

    Raises:
        ConfigurationError: The time is no positive number, or there is one without a folder.
    """
    folder, seconds = environment.get(FOLDER_VARIABLE, ""), environment.get(TIMEOUT_VARIABLE, "")
    if not folder:
        if seconds:
            raise ConfigurationError(
                f"{TIMEOUT_VARIABLE}={seconds} has no effect without {FOLDER_VARIABLE}; name a folder for the logs too"
            )
        return None
    timeout_s = None
    if seconds:
        try:
            timeout_s = float(seconds)
        except ValueError:
            timeout_s = math.nan
        if not (timeout_s > 0.0 and math.isfinite(timeout_s)):
            raise ConfigurationError(f"{TIMEOUT_VARIABLE}={seconds!r} is no time to wait; give seconds, more than 0")
    return HangSettings(Path(folder), timeout_s)
