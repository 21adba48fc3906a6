"""Which checkpoints may go."""

from __future__ import annotations

from collections.abc import Iterable


def to_prune(iterations: Iterable[int], pointed: int, keep_last: int | None) -> list[int]:
    """The iterations that nobody keeps, oldest first.

    Kept are the `keep_last` newest up to the one pointed to. What is newer than that belongs to a run that was given
    up for an earlier checkpoint; it is left to the user.

    Args:
        iterations: All whole ones.
        pointed: The one that the pointer names.
        keep_last: How many to keep; None: all.
    """
    if keep_last is None:
        return []
    upto = sorted(iteration for iteration in set(iterations) | {pointed} if iteration <= pointed)
    return upto[:-keep_last]
