"""A debug switch: before anything is communicated, ranks compare what they are about to do.

Ranks that gather or reduce different things mix their data or wait for each other for good. With the switch on, every
gather and reduction, the end of every forward that gathered and of every backward that reduces are announced to the
other ranks first, over a process group of their own, and where announcements differ every rank raises the same error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from megatron_fsdp.errors import ConfigurationError, ScheduleError

VARIABLE = "MFSDP_VERIFY_RANKS"
DEFAULT_TIMEOUT_S = 300.0


class Deed(IntEnum):
    """What a rank can be about to do."""

    GATHER = 0
    REDUCE = 1
    END_FORWARD = 2
    END_BACKWARD = 3
    BREAK_OFF = 4


@dataclass(frozen=True)
class Announcement:
    """What one rank is about to do.

    Attributes:
        deed: What.
        unit: To which unit; the root where a pass ends.
        num_bytes: Size of the gathered weights or of the bucket on this rank.
        in_backward: Whether a backward is under way; told, not compared.
    """

    deed: Deed
    unit: int
    num_bytes: int
    in_backward: bool

    def agrees_with(self, other: Announcement) -> bool:
        """Whether both may go on together."""
        return (self.deed, self.unit, self.num_bytes) == (other.deed, other.unit, other.num_bytes)

    def told(self, labels: Sequence[str]) -> str:
        """In words, as the predicate of a sentence about one rank."""
        if self.deed is Deed.END_FORWARD:
            return "ends its forward"
        if self.deed is Deed.END_BACKWARD:
            return "ends its backward"
        if self.deed is Deed.BREAK_OFF:
            return "breaks off its forward with an exception"
        verb = "gathers" if self.deed is Deed.GATHER else "reduces"
        phase = "backward" if self.in_backward else "forward"
        return f"{verb} {labels[self.unit]} ({self.num_bytes} bytes) in {phase}"


def resolve_verify_ranks(verify_ranks: bool | float | None, environment: Mapping[str, str] = os.environ) -> float:
    """How long to wait for a rank, in seconds; 0.0: ranks are not compared.

    Args:
        verify_ranks: The argument: True, False, seconds to wait for a rank, or None to ask the environment.
        environment: Where `MFSDP_VERIFY_RANKS` may be: 1 for on, 0 for off, or seconds.

    Raises:
        ConfigurationError: Neither a switch nor a number of seconds.
    """
    value: object = verify_ranks
    if verify_ranks is None:
        value = environment.get(VARIABLE, "0")
        value = {"0": False, "": False, "1": True}.get(str(value), value)
    if isinstance(value, bool):
        return DEFAULT_TIMEOUT_S if value else 0.0
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        where = VARIABLE if verify_ranks is None else "verify_ranks"
        raise ConfigurationError(f"{where}={value!r} is neither a switch nor a time; give 1, 0 or seconds to wait")
    return seconds


class RankVerifier:
    """Compares announcements over the ranks of one model. Collective to make.

    Args:
        group: The ranks.
        labels: Name of each unit.
        timeout_s: How long to wait for a rank.
    """

    def __init__(self, group: dist.ProcessGroup, labels: Sequence[str], timeout_s: float) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._me = dist.get_rank(group)
        self._labels = tuple(labels)
        self._timeout_s = timeout_s
        self._group = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)
        self._last: Announcement | None = None
        self._lost: str | None = None
        self._gathered_in_forward = False

    def gather(self, unit: int, num_bytes: int) -> None:
        """This rank is about to gather a unit's weights."""
        in_backward = torch._C._current_graph_task_id() != -1
        self._gathered_in_forward |= not in_backward
        self._compare(Announcement(Deed.GATHER, unit, num_bytes, in_backward))

    def reduce(self, unit: int, num_bytes: int) -> None:
        """This rank is about to reduce a unit's gradients."""
        self._compare(Announcement(Deed.REDUCE, unit, num_bytes, in_backward=True))

    def end_forward(self, failed: bool) -> None:
        """The outermost forward is over. Told where it gathered; one that did not concerns nobody else.

        Args:
            failed: By an exception, which goes on here; only the other ranks are stopped.
        """
        if not self._gathered_in_forward:
            return
        self._gathered_in_forward = False
        deed = Deed.BREAK_OFF if failed else Deed.END_FORWARD
        with suppress(*([ScheduleError] if failed else [])):
            self._compare(Announcement(deed, 0, 0, in_backward=False))

    def end_backward(self) -> None:
        """A backward that reduces is over."""
        self._compare(Announcement(Deed.END_BACKWARD, 0, 0, in_backward=True))

    def _compare(self, mine: Announcement) -> None:
        """Exchange announcements and go on only if all are the same.

        Raises:
            ScheduleError: They differ (the same message on every rank), or a rank did not come.
        """
        if self._lost is not None:
            raise ScheduleError(self._lost)
        everyone = self._exchange(mine)
        first = everyone[0]
        if all(other.agrees_with(first) for other in everyone):
            self._last = mine
            return
        self._gathered_in_forward = False
        raise ScheduleError(self._mismatch(everyone))

    def _exchange(self, mine: Announcement) -> list[Announcement]:
        row = torch.tensor([mine.deed, mine.unit, mine.num_bytes, mine.in_backward], dtype=torch.int64)
        rows = [row.clone() for _ in self._ranks]
        peers = [position for position in range(len(self._ranks)) if position != self._me]
        absent: list[int] = []
        try:
            arriving = {p: dist.irecv(rows[p], src=self._ranks[p], group=self._group) for p in peers}
            sent = [dist.isend(row, dst=self._ranks[p], group=self._group) for p in peers]
        except RuntimeError as error:
            self._lose(peers, mine, error)
        cause: RuntimeError | None = None
        for position, work in arriving.items():
            try:
                assert work is not None
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                absent.append(position)
                cause = error
        if cause is not None:
            self._lose(absent, mine, cause)
        for done in sent:
            assert done is not None
            done.wait()
        return [
            Announcement(Deed(deed), unit, num_bytes, bool(back)) for deed, unit, num_bytes, back in map(_ints, rows)
        ]

    def _lose(self, absent: Sequence[int], mine: Announcement, cause: Exception) -> None:
        last = (
            f"the last thing all ranks did was: each {self._last.told(self._labels)}" if self._last else "nothing yet"
        )
        self._lost = (
            f"rank {_listed(self._ranks[p] for p in absent)} did not come within {self._timeout_s:g} s while rank "
            f"{self._ranks[self._me]} {mine.told(self._labels)} ({last}); every rank has to call the same units in the "
            "same order, and one that has nothing to compute calls model.take_part (docs/ranks.md)"
        )
        raise ScheduleError(self._lost) from cause

    def _mismatch(self, everyone: Sequence[Announcement]) -> str:
        doing: dict[str, list[int]] = {}
        for rank, announcement in zip(self._ranks, everyone, strict=True):
            doing.setdefault(announcement.told(self._labels), []).append(rank)
        parts = sorted(doing.items(), key=lambda item: (len(item[1]), item[1]))
        told = " while ".join(f"rank {_listed(ranks)} {what}" for what, ranks in parts)
        return (
            f"{told}; every rank has to call the same units in the same order, and one that has nothing to compute "
            "with a unit calls model.take_part(unit, hidden) in its place (docs/ranks.md)"
        )


def _ints(row: torch.Tensor) -> tuple[int, int, int, int]:
    deed, unit, num_bytes, back = row.tolist()
    return deed, unit, num_bytes, back


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
