"""The compute and activation memory of one rank over one forward and backward, as plain data.

A step of the compute is a row of events: a unit's forward begins (`F1>`), ends (`F1<`), its backward begins (`B1`), and
the backward is over (`E`). A segment lies between two of them. The same events drive the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Event(Enum):
    """The event that begins a segment."""

    STEP_BEGINS = "S"  # only where something is computed before the model's forward
    FORWARD_BEGINS = "F>"  # also of a recomputation, where the unit's own hooks see it
    FORWARD_ENDS = "F<"
    BACKWARD_BEGINS = "B"  # the gradient of an output of the unit is known
    BACKWARD_ENDS = "E"  # autograd has nothing left to do


@dataclass
class Segment:
    """The stretch from one event to the next.

    Activation bytes are all tensors that the step has made and that are still alive: saved for backward, temporary
    results of operators, gradients of activations, and gradients of parameters until they are copied into a bucket.
    Parameters and the inputs of the step are not among them.
    """

    event: Event
    unit: int  # the unit of that event; 0 is the root, also of STEP_BEGINS and BACKWARD_ENDS
    begin_bytes: int  # activation bytes alive when it begins
    peak_bytes: int  # the most alive in it, looked up after each operator; at least `begin_bytes`
    flops: int = 0  # floating point operations of matrix products, attention and convolutions (a multiply-add is two)
    product_flops: int = 0  # those among `flops` that 8-bit formats speed up: products with weights, without attention
    recomputed_flops: int = 0  # those among `flops` that repeat a forward
    moved_bytes: int = 0  # operands read and results written by all operators, as if none was fused or found in a cache
    operators: int = 0  # how many operators ran, views not counted
    # names of the parameters whose gradients arrived in it, in order of arrival
    gradients: list[str] = field(default_factory=list)
    multiplied: set[str] = field(default_factory=set)  # names of the parameters that gave gradients of activations

    def __str__(self) -> str:
        """Return the event in compact form for tests and traces, such as `F3>`, `F3<`, `B3` or `E`."""
        if self.event in (Event.STEP_BEGINS, Event.BACKWARD_ENDS):
            return self.event.value
        kind = self.event.value
        return f"{kind[0]}{self.unit}{kind[1:]}"


@dataclass(frozen=True)
class ComputeProfile:
    """One forward, loss and backward of one rank."""

    unit_names: tuple[str, ...]  # name of each unit's module; the first is "", the root
    segments: tuple[Segment, ...]  # in order of time; the last begins with BACKWARD_ENDS and computes nothing
    input_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak of activation bytes."""
        return max(segment.peak_bytes for segment in self.segments)

    @property
    def kept_bytes(self) -> int:
        """Activation bytes alive when backward begins: saved tensors and results that are still referenced."""
        return self.segments[self.backward_start].begin_bytes

    @property
    def backward_start(self) -> int:
        """The position of the first segment of backward."""
        return next(
            position
            for position, segment in enumerate(self.segments)
            if segment.event in (Event.BACKWARD_BEGINS, Event.BACKWARD_ENDS)
        )

    @property
    def forward_flops(self) -> int:
        """The FLOPs of forward and loss, each once."""
        return sum(segment.flops for segment in self.segments[: self.backward_start])

    @property
    def backward_flops(self) -> int:
        """The FLOPs of backward without recomputation."""
        return sum(segment.flops - segment.recomputed_flops for segment in self.segments[self.backward_start :])

    @property
    def recomputed_flops(self) -> int:
        """The FLOPs of forwards that backward repeats."""
        return sum(segment.recomputed_flops for segment in self.segments)

    @property
    def used(self) -> frozenset[str]:
        """The names of the parameters that got gradients."""
        return frozenset(name for segment in self.segments for name in segment.gradients)

    @property
    def events(self) -> str:
        """All events in compact form, such as `F0> F1> F1< F0< B0 B1 E`."""
        return " ".join(str(segment) for segment in self.segments)


@dataclass(frozen=True)
class Exchange:
    """Collectives (or messages) of model parallelism that the compute of one unit waits for in every microbatch."""

    axis: str  # "tp", "cp", "ep" or "pp"
    unit: str  # name of the unit's module
    sent_bytes: int  # by this rank, in one of them
    in_backward: bool  # whether in backward, else in forward
    count: int = 1
