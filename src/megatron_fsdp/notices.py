"""Warnings that point at the user's line, however many of our own frames lie between."""

from __future__ import annotations

import sys
import warnings

_NOT_THE_USER = (__name__.partition(".")[0], "dataclasses", "contextlib")
"""Top-level modules that call us on behalf of somebody else: in `dataclasses.replace`, at the start of a `with`."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn on behalf of the first caller outside of this package.

    Args:
        message: What was adjusted or ignored, and what to write instead.
        category: Of the warning.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
