"""Tables and figures in Markdown (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def spread(value: Mapping[str, float] | None, factor: float, digits: int) -> str:
    """Such as `1.25 [1.21, 1.31]`; a dash for None."""
    if value is None:
        return "-"
    low, middle, high = (f"{value[key] * factor:.{digits}f}" for key in ("lower", "median", "upper"))
    return f"{middle} [{low}, {high}]"
