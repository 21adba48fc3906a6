"""Remember what happened in one pass, or step, and foretell what comes next in the following one. Pure."""

from __future__ import annotations


class RecordedOrder:
    """The order of one kind of pass (forward or backward): recorded each time, replayed the next time.

    The first pass foretells nothing. A pass that leaves the recorded order foretells nothing more until it ends; what
    it did is what the next pass is compared with.
    """

    def __init__(self) -> None:
        self._expected: list[int] = []
        self._current: list[int] = []
        self._on_track = True

    def begin(self) -> None:
        """Start a pass."""
        self._current = []
        self._on_track = True

    def end(self) -> None:
        """End the pass; what it needed is what the next one is expected to need."""
        self._expected = self._current
        self._current = []

    def note(self, unit: int) -> None:
        """Unit `unit` is needed now (a repeat of the unit needed last is not a new need)."""
        if self._current and self._current[-1] == unit:
            return
        position = len(self._current)
        self._on_track = self._on_track and position < len(self._expected) and self._expected[position] == unit
        self._current.append(unit)

    def upcoming(self, count: int) -> tuple[int, ...]:
        """The next `count` units, nearest first; empty once the pass has left the recorded order."""
        if not self._on_track or not self._current:
            return ()
        position = len(self._current)
        return tuple(self._expected[position : position + count])


class StepLength:
    """How many backwards come between two changes of the weights; each step foretells the next one.

    Ranks run the same backwards, so they foretell the same. Where a step is longer or shorter than the one before it,
    what was foretold is wrong once.
    """

    def __init__(self) -> None:
        self._expected = 0  # nothing is known of the first step
        self._backwards = 0

    def note_backward(self) -> bool:
        """A backward is over; returns whether it is expected to be the last of its step."""
        self._backwards += 1
        return self._backwards == self._expected

    def note_step(self) -> None:
        """The weights have changed; without a backward before it that was no step."""
        self._expected = self._backwards or self._expected
        self._backwards = 0
