"""The raw log of a recording: tuples in the order they were noted, cut into steps.

What is noted while a model trains is a plain tuple, `(BEGIN, mark, ...)`, since a named one takes several times as long
to make; `decode` names its parts afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_fsdp.comm.lanes import Moment
from megatron_fsdp.engine.observer import Phase

Counts = tuple[int, int, int, int]
"""Gathers, reductions, bytes of gathers, bytes of reductions of one axis so far."""


class Begin(NamedTuple):
    """A phase begins."""

    mark: Any
    phase: Phase | str
    unit: int
    memory: int | None


class End(NamedTuple):
    """It is over."""

    mark: Any
    phase: Phase | str
    unit: int


class Told(NamedTuple):
    """A moment of a collective; with the counters of all axes where it is about to be, or just was, launched."""

    mark: Any
    number: int
    moment: Moment
    lane: str
    sent: tuple[Counts, ...] | None


class Done(NamedTuple):
    """The back end reports that a collective is done."""

    mark: int
    number: int


class Broken(NamedTuple):
    """The model was reset: nothing that has begun ends."""

    mark: Any


Record = Begin | End | Told | Done | Broken
Raw = tuple[Any, ...]
"""A kind, then the fields of its record."""

BEGIN, END, TOLD, DONE, BROKEN = range(5)
_RECORDS: tuple[type[Begin | End | Told | Done | Broken], ...] = (Begin, End, Told, Done, Broken)


def decode(raw: Raw) -> Record:
    """The record of a plain tuple."""
    return _RECORDS[raw[0]](*raw[1:])


def encode(record: Record) -> Raw:
    """The plain tuple of a record."""
    return (_RECORDS.index(type(record)), *record)


@dataclass
class StepLog:
    """The records of one step.

    Attributes:
        index: Which one, counted from the start of the recording.
        start: A mark before all others of the step.
        records: As plain tuples, in the order they were noted.
        is_cut: Whether there was no room for all.
    """

    index: int
    start: Any
    records: list[Raw] = field(default_factory=list)
    is_cut: bool = False
