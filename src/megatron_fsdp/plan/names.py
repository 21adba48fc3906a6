"""Suggestions for names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(given: str, known: Iterable[str]) -> str:
    """End of an error message: the nearest known name, and all of them.

    Args:
        given: What does not exist.
        known: What does.
    """
    names = list(known)
    nearest = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}choose one of {', '.join(names)}"
