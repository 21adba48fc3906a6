"""Write what happens to a model as a line of text and read what the scheduler wants done as another.

F1>   forward of unit 1 begins           F1<   ... ends; autograd will come back to it
f1<   ... ends, and autograd will not    B1>   backward of unit 1 begins (b1>: and reads no weights)
g1    its first gradient arrives         G1    its gradients are all there
E     the backward is over               W     the weights were changed
R     reset                              P1    weights wanted ahead, where there is room
A1    weights awaited outside of forward
"""

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp.engine.schedule import Operation, ScheduleConfig, Scheduler

_EVENT = re.compile(
    r"(?P<kind>[FfBb])(?P<unit>\d+)(?P<edge>[<>])|(?P<single>[gGPA])(?P<single_unit>\d+)|(?P<bare>[EWR])"
)


@dataclass
class Play:
    """A scheduler and what a caller has to remember for it: the weights_version of each forward until its backward.

    Attributes:
        scheduler: The scheduler under test.
        epochs: For each unit, the epochs of its forwards whose backward has not begun, oldest first.
    """

    scheduler: Scheduler
    epochs: dict[int, list[int]] = field(default_factory=dict)

    def __call__(self, events: str) -> str:
        """Feed events in order; return the operations as text."""
        return " ".join(str(operation) for event in events.split() for operation in self.feed(event))

    def feed(self, event: str) -> tuple[Operation, ...]:
        """Feed one event.

        Raises:
            ValueError: The event is not in the language.
        """
        match = _EVENT.fullmatch(event)
        if match is None:
            raise ValueError(f"{event!r} is not an event; see the table at the top of this file.")
        if match["bare"]:
            return self._bare(match["bare"])
        if match["single"]:
            return self._single(match["single"], int(match["single_unit"]))
        return self._pass(match["kind"], int(match["unit"]), match["edge"])

    def _bare(self, kind: str) -> tuple[Operation, ...]:
        if kind == "E":
            return self.scheduler.backward_ends()
        return self.scheduler.weights_changed() if kind == "W" else self.scheduler.reset()

    def _single(self, kind: str, unit: int) -> tuple[Operation, ...]:
        if kind == "g":
            self.scheduler.gradient_arrives(unit)
            return ()
        if kind == "G":
            return self.scheduler.gradients_ready(unit)
        return self.scheduler.prefetch_requested(unit) if kind == "P" else self.scheduler.weights_requested(unit)

    def _pass(self, kind: str, unit: int, edge: str) -> tuple[Operation, ...]:
        if kind in "Bb":
            waiting = self.epochs.get(unit, [])
            version = waiting.pop() if waiting else self.scheduler._weights_version
            return self.scheduler.backward_begins(unit, version, reads_weights=kind == "B")
        if edge == ">":
            return self.scheduler.forward_begins(unit)
        weights_version = self.scheduler.forward_ends(unit, needs_backward=kind == "F")
        if kind == "F":
            self.epochs.setdefault(unit, []).append(weights_version)
        return ()


def play(units: int = 4, **options: Any) -> Play:
    """A new scheduler for a model of `units` trainable units, the root included; options as in `ScheduleConfig`."""
    return Play(Scheduler(ScheduleConfig(**{"trainable": (True,) * units, **options})))
