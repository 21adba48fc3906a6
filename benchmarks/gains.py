"""What each optimisation gives: the contender that goes without it beside the one that has it (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Spread

SMALL = 0.02
"""Below this gain in all figures, an optimisation has to be worth its place for another reason."""


@dataclass(frozen=True)
class Gain:
    """One optimisation on one workload.

    Attributes:
        name: Of the contender without it.
        title: What it is.
        cpu_s: CPU seconds per step without and with it, medians.
        wall_s: The same by the clock.
        cpu_over: CPU time with it over that without it, in the same round.
        wall_over: The same by the clock.
        sent_bytes: Per step and rank, without and with it, as the engine counts them.
        peak_bytes: Live bytes at the peak, without and with it.
        allocations: In a step, without and with it.
    """

    name: str
    title: str
    cpu_s: tuple[float, float]
    wall_s: tuple[float, float]
    cpu_over: Spread
    wall_over: Spread
    sent_bytes: tuple[int, int]
    peak_bytes: tuple[int, int]
    allocations: tuple[int, int]

    @property
    def largest(self) -> float:
        """The largest part that it saves, of CPU time, time, bytes or the peak."""
        counts = (self.sent_bytes, self.peak_bytes)
        saved = [1 - after / before for before, after in counts if before]
        return max(1 - self.cpu_over.median, 1 - self.wall_over.median, *saved)

    @property
    def is_small(self) -> bool:
        """Whether it gives less than `SMALL` everywhere."""
        return self.largest < SMALL


def gains(document: Mapping[str, Any], listed: Sequence[tuple[str, str, str]]) -> tuple[list[Gain], dict[str, str]]:
    """Read the optimisations out of a comparison.

    Args:
        document: Of a comparison that has both contenders of each.
        listed: Of each the name of the contender without it, what it is, and the name of the contender with it.

    Returns:
        Those that were measured, and by the title of the others why not.
    """
    lines = {line["name"]: line for line in document["contenders"]}
    found, missing = [], {}
    for name, title, base in listed:
        without, whole = lines.get(name), lines.get(base)
        if without is None or whole is None:
            missing[title] = document["absent"].get(name) or document["absent"].get(base) or "it was not asked for"
        elif without["disagrees"] or whole["disagrees"]:
            missing[title] = without["disagrees"] or whole["disagrees"]
        else:
            found.append(_gain(name, title, without, whole))
    return found, missing


def _gain(name: str, title: str, without: Mapping[str, Any], whole: Mapping[str, Any]) -> Gain:
    both = (without, whole)
    return Gain(
        name,
        title,
        (without["cpu_s"]["median"], whole["cpu_s"]["median"]),
        (without["wall_s"]["median"], whole["wall_s"]["median"]),
        Spread(**whole["cpu_over"][name]),
        Spread(**whole["wall_over"][name]),
        _pair([_sent(line) for line in both]),
        _pair([line["live"]["peak"] for line in both]),
        _pair([line["live"]["allocations"] for line in both]),
    )


def _sent(line: Mapping[str, Any]) -> int:
    """What goes over the wire, by the engine's counters or by what is seen below it, whichever is more."""
    sent, moved = line["sent"], line["moved"]
    counted = 0 if sent is None else int(sent["gather_bytes"] + sent["reduce_bytes"])
    return max(counted, 0 if moved is None else int(moved["gloo_bytes"]))


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return values[0], values[1]
