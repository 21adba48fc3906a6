"""The environment variables of the hang logs and the debug tools."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.errors import ConfigurationError

LIFETIMES_VARIABLE = "MFSDP_CHECK_LIFETIMES"
VERIFY_VARIABLE = "MFSDP_VERIFY_RANKS"
FOLDER_VARIABLE = "MFSDP_HANG_LOG"
TIMEOUT_VARIABLE = "MFSDP_HANG_TIMEOUT"
VERIFY_TIMEOUT_S = 300.0
"""Default timeout of the comparison of ranks."""
_SWITCH = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class HangSettings:
    """Settings of the log for hangs."""

    folder: Path  # where the ranks keep their logs; one that all of them see, where there is one
    # report when a phase has taken this many seconds without news; None: only when asked
    timeout_s: float | None = None


def checked_timeout(given: float | str, name: str = "timeout_s") -> float:
    """Check a time in seconds, and return it."""
    with suppress(ValueError):
        if 0.0 < (seconds := float(given)) < math.inf:
            return seconds
    raise ConfigurationError(f"{name}={given!r} is not a time to wait; give seconds, more than 0")


def resolve_hang_log(environment: Mapping[str, str] = os.environ) -> HangSettings | None:
    """Read the settings of the log for hangs from the environment; None: no log."""
    folder, seconds = environment.get(FOLDER_VARIABLE, ""), environment.get(TIMEOUT_VARIABLE, "")
    if seconds and not folder:
        raise ConfigurationError(
            f"{TIMEOUT_VARIABLE}={seconds} has no effect without {FOLDER_VARIABLE}; name a folder for the logs too"
        )
    if not folder:
        return None
    return HangSettings(Path(folder), checked_timeout(seconds, TIMEOUT_VARIABLE) if seconds else None)


def resolve_check_lifetimes(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the environment asks for lifetime checks from the start."""
    value = environment.get(LIFETIMES_VARIABLE, "")
    if value not in _SWITCH:
        raise ConfigurationError(f"{LIFETIMES_VARIABLE}={value!r} is not a switch; give 1 or 0")
    return _SWITCH[value]


def resolve_verify_ranks(verify_ranks: bool | float | str | None, environment: Mapping[str, str] = os.environ) -> float:
    """Return the timeout of the comparison of ranks in seconds; 0.0: ranks are not compared."""
    where, value = "verify_ranks", verify_ranks
    if value is None:
        where, given = VERIFY_VARIABLE, environment.get(VERIFY_VARIABLE, "")
        value = _SWITCH.get(given, given)
    if isinstance(value, bool):
        return VERIFY_TIMEOUT_S if value else 0.0
    with suppress(ValueError):
        if 0.0 < (seconds := float(str(value))) < math.inf:
            return seconds
    raise ConfigurationError(f"{where}={value!r} is neither a switch nor a time; give 1, 0 or seconds to wait")
