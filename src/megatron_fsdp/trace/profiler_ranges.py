"""Phases as ranges of torch's profiler, while one runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.profiler import record_function

from megatron_fsdp.engine.observer import Phase


class ProfilerRanges:
    """Opens and closes ranges named such as "mfsdp/gather layers.3".

    Args:
        labels: Of all units.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._open: list[tuple[Phase, int, record_function]] = []

    @property
    def is_open(self) -> bool:
        """Whether any is."""
        return bool(self._open)

    def begins(self, phase: Phase, unit: int) -> None:
        """Open one; a profiler runs."""
        opened = record_function(f"mfsdp/{phase.value} {self._labels[unit]}")
        opened.__enter__()
        self._open.append((phase, unit, opened))

    def ends(self, phase: Phase, unit: int) -> None:
        """Close it, if it is open, and what an exception left open inside of it."""
        if any((phase, unit) == opened[:2] for opened in self._open):
            while self._close_last() != (phase, unit):
                pass

    def close(self) -> None:
        """Close all, innermost first."""
        while self._open:
            self._close_last()

    def _close_last(self) -> tuple[Phase, int]:
        phase, unit, opened = self._open.pop()
        opened.__exit__(None, None, None)
        return phase, unit
