"""A clock and two simulated wires: one for the ranks of the sharding axis, one for those of the outer axis.

Collectives of one wire follow one another in the order in which they are started, as gathers and reductions of one rank
share its link. The clock is that of the compute side; waiting for a collective moves it, and what it moves is exposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Wire(Enum):
    """Whose collectives."""

    INNER = "inner"
    OUTER = "outer"


Cost = Callable[[Wire, int, bool], float]
"""(wire, bytes that one rank sends, whether of experts) to seconds."""


@dataclass(frozen=True)
class Transfer:
    """One collective.

    Attributes:
        wire: Where.
        purpose: "gather", "reduce", "gather across" or "reduce across".
        unit: For which unit.
        sent_bytes: By this rank.
        start_s: When it begins to travel.
        end_s: When it is done.
    """

    wire: Wire
    purpose: str
    unit: int
    sent_bytes: int
    start_s: float
    end_s: float


@dataclass
class Wires:
    """The clock and the wires.

    Attributes:
        cost: Duration of a collective.
        now_s: The clock of the compute side.
        exposed_s: How long it has waited for collectives.
        transfers: All so far, in the order of their start.
    """

    cost: Cost
    now_s: float = 0.0
    exposed_s: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    _free_s: dict[Wire, float] = field(default_factory=lambda: dict.fromkeys(Wire, 0.0))

    def compute(self, seconds: float) -> None:
        """The compute side works."""
        self.now_s += seconds

    def send(self, wire: Wire, purpose: str, unit: int, sent_bytes: int, is_expert: bool) -> Callable[[], None]:
        """Start a collective behind those of the same wire.

        Returns:
            What waits for it.
        """
        if not sent_bytes:
            return lambda: None
        start = max(self.now_s, self._free_s[wire])
        end = start + self.cost(wire, sent_bytes, is_expert)
        self._free_s[wire] = end
        self.transfers.append(Transfer(wire, purpose, unit, sent_bytes, start, end))

        def wait() -> None:
            self.exposed_s += max(0.0, end - self.now_s)
            self.now_s = max(self.now_s, end)

        return wait
