"""How much of a text is trained on, held out, or left aside. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class Split:
    """Shares of a text, which add up to 1.

    Attributes:
        training: To train on.
        held_out: To evaluate on.
        aside: For a later test; not read.
    """

    training: float
    held_out: float
    aside: float = 0.0


def parse_split(text: str) -> Split:
    """Read `--split`: two or three numbers, in whatever unit.

    Raises:
        ConfigurationError: They are not numbers, or leave nothing to train on or to hold out.
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    total = sum(parts)
    is_possible = len(parts) in (2, 3) and all(part >= 0 for part in parts) and 0 < total < math.inf
    if not is_possible or min(part / total for part in parts[:2]) <= 0:
        raise ConfigurationError(
            f"invalid --split {text}: give two numbers above 0, to train on and to hold out, such as 95,5, and "
            "a third for what is left aside, if you like"
        )
    return Split(parts[0] / total, parts[1] / total, (parts[2] if len(parts) == 3 else 0.0) / total)
