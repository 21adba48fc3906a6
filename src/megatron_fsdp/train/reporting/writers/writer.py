"""What writes a run's numbers down, whatever it writes to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord

_WHO = re.compile(r"(?<=://)[^/?#\s\"'<>]*@")


class Writer(Protocol):
    """Writes on the first rank only. What a method raises does not end the run (`Careful`)."""

    def start(self, progress: Progress) -> None:
        """Begin, or go on after these steps: what stands there of later steps goes, since they happen again."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Take the steps since the last call."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take a held-out loss."""

    def close(self) -> None:
        """Write what is left, and end."""


class Careful:
    """A writer that never fails: training is worth more than its log."""

    def __init__(self, make: Callable[[], Writer], target: str, say: Callable[[str], None]) -> None:
        """Pass everything on to what `make` returns at the start, and say once if `target` could not be written."""
        self._make = make
        self._target = target
        self._say = say
        self._writer: Writer | None = None
        self._has_warned = False

    def start(self, progress: Progress) -> None:
        """See `Writer`."""
        self._try(lambda: self._begin(progress))

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """See `Writer`."""
        if (writer := self._writer) is not None:
            self._try(lambda: writer.on_steps(records))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See `Writer`."""
        if (writer := self._writer) is not None:
            self._try(lambda: writer.on_evaluation(evaluation))

    def close(self) -> None:
        """See `Writer`."""
        if self._writer is not None:
            self._try(self._writer.close)

    def _begin(self, progress: Progress) -> None:
        writer = self._make()
        writer.start(progress)
        self._writer = writer

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever a tracker or a disk raises, training goes on
            if not self._has_warned:
                self._has_warned = True
                told = without_passwords(str(error))
                self._say(f"{self._target} cannot be written ({told}): training goes on, with gaps in it or without it")


def without_passwords(text: str) -> str:
    """Return a text without the users and passwords of the addresses that it quotes."""
    return _WHO.sub("", text)
