"""A debug switch: ranks compare each collective before they launch it.

Ranks that gather or reduce different units mix their data or deadlock. With the switch on, every all-gather, reduction,
agreement and norm, and the end of every forward that gathered, are announced to the other ranks first, over a process
group of their own, and where announcements differ every rank raises the same error. The number of optimizer steps is
compared as well: a rank that skips one has weights that do not match the others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from megatron_fsdp.comm.collectives import Moment
from megatron_fsdp.comm.groups import destroy_with, duplicate_group, shared_name, timeout_of
from megatron_fsdp.engine.observer import Observer, Phase
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.sharding.units import ROOT_UNIT


class Event(Enum):
    """An action that ranks announce; the value is its verb in messages."""

    GATHER = "gathers"
    REDUCE = "reduces"
    END_FORWARD = "ends its forward"
    BREAK_OFF = "breaks off its forward with an exception"
    END_BACKWARD = "ends its backward"
    AGREE = "follows a change of requires_grad, or compares arguments"
    NORM = "takes the norm of all gradients"
    WHOLE = "gathers or sends whole tensors"


_EVENTS = list(Event)  # by their numbers in a row
_OF_PHASE = {Phase.AGREE: Event.AGREE, Phase.NORM: Event.NORM, Phase.WHOLE: Event.WHOLE}


class Announcement(NamedTuple):
    """The next action of one rank."""

    event: Event
    unit: int  # the root for what concerns all
    num_bytes: int  # of the gathered weights or of the bucket on this rank
    in_backward: bool  # a backward is running; shown, not compared
    steps: int  # how often the weights were changed so far, which is once in a step of an optimizer

    def describe(self, units: Sequence[Unit]) -> str:
        """Describe the action as the predicate of a sentence about one rank."""
        if self.event not in (Event.GATHER, Event.REDUCE):
            return self.event.value
        phase = "backward" if self.in_backward else "forward"
        return f"{self.event.value} {units[self.unit].label} ({self.num_bytes} bytes) in {phase}"


class RankVerifier(Observer):
    """An observer that compares the next action of all ranks of one model. Collective to make.

    Where the order of reductions is fixed, only the first of a backward is compared. Gradients may come in another
    order on each rank there, so a rank that waits for the others with its second reduction could withhold its first
    sums over the outer axis, which the others need to get that far: a deadlock.
    """

    def __init__(
        self, group: dist.ProcessGroup, units: Sequence[Unit], timeout_s: float, order_is_fixed: bool, join: str
    ) -> None:
        self._order_is_fixed, self._units, self._timeout_s = order_is_fixed, units, timeout_s
        self._cure = f"{join} (mfsdp docs debugging)"
        self._ranks = dist.get_process_group_ranks(group)  # global ones, in order
        self._me = dist.get_rank(group)  # this rank's place among them
        # A gloo group of its own. torch names one by the number of groups, ambiguous after groups were destroyed.
        self._group = duplicate_group(group, shared_name("rows", group), "gloo", timeout_of(group))
        destroy_with(self, [self._group])
        # Ranks start together: a slow start does not count against the first exchange.
        dist.barrier(group=self._group)
        self._last: Announcement | None = None
        self._lost: str | None = None
        self.forgets()

    def forgets(self) -> None:
        """Reset all counts. Ranks that were lost stay lost: a message may still be in flight."""
        self._steps = self._open_forwards = 0
        self._gathered_in_forward = self._is_broken = self._has_reduced = False
        self._to_reduce: int | None = None  # the unit whose reduction has begun and has sent nothing yet

    def begins(self, phase: Phase, unit: int) -> None:
        """Announce a collective phase; a reduction only once it communicates."""
        if phase is Phase.UNSHARD:
            num_bytes = self._units[unit].all_gather_bytes
            if num_bytes:
                self._gathered_in_forward |= not _in_backward()
                self._compare(Event.GATHER, unit, num_bytes)
        elif phase is Phase.REDUCE:
            self._to_reduce = unit
        elif phase is Phase.FORWARD:
            self._open_forwards += 1
            self._has_reduced = False
        elif phase is Phase.INSTALL:
            self._steps += 1
        elif phase in _OF_PHASE:
            ends_backward = phase is Phase.AGREE and _in_backward()
            self._compare(Event.END_BACKWARD if ends_backward else _OF_PHASE[phase])

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None) -> None:  # noqa: ARG002
        """Announce a reduction before its first collective.

        A bucket that a reduction borrows may first send another unit's sums over the outer axis. Ranks do so where
        memory is short, at moments of their own.
        """
        if self._to_reduce is not None and moment is Moment.LAUNCHES and stream == "reduce":
            unit, self._to_reduce = self._to_reduce, None
            if not (self._has_reduced and self._order_is_fixed):
                self._compare(Event.REDUCE, unit, self._units[unit].bucket_bytes)
            self._has_reduced = True

    def ends(self, phase: Phase, unit: int) -> None:  # noqa: ARG002
        """Announce the end of the outermost forward if it gathered; other ends concern no other rank."""
        if phase is Phase.REDUCE:
            self._to_reduce = None
        elif phase is Phase.FORWARD:
            self._leave_forward(Event.END_FORWARD)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:  # noqa: ARG002
        """Announce that the outermost forward failed, unless by an error of communication."""
        self._is_broken |= phase in (Phase.UNSHARD, Phase.WAIT, Phase.REDUCE)
        if phase is Phase.FORWARD:
            with suppress(ScheduleError):  # it would hide the error
                self._leave_forward(Event.BREAK_OFF)

    def _leave_forward(self, event: Event) -> None:
        self._open_forwards -= 1
        if not self._open_forwards and self._gathered_in_forward and not _in_backward() and not self._is_broken:
            self._gathered_in_forward = False
            self._compare(event)

    def _compare(self, event: Event, unit: int = ROOT_UNIT, num_bytes: int = 0) -> None:
        """Exchange announcements, and raise unless all are equal."""
        if self._lost is not None:
            raise ScheduleError(self._lost)
        mine = Announcement(event, unit, num_bytes, _in_backward(), self._steps)
        everyone = self._exchange(mine)
        if len({each._replace(in_backward=False) for each in everyone}) == 1:
            self._last = mine
            return
        self._gathered_in_forward = False
        raise ScheduleError(self._mismatch(everyone))

    def _exchange(self, mine: Announcement) -> list[Announcement]:
        """Return the announcements of all ranks, in order."""
        row = torch.tensor([_EVENTS.index(mine.event), *mine[1:]])
        rows = [row.clone() for _ in self._ranks]
        peers = [place for place in range(len(self._ranks)) if place != self._me]
        absent: list[int] = []
        cause: RuntimeError | None = None
        try:
            arriving = {p: dist.irecv(rows[p], src=self._ranks[p], group=self._group) for p in peers}
            sent = [dist.isend(row, dst=self._ranks[p], group=self._group) for p in peers]
        except RuntimeError as error:
            self._lose(peers, mine, error)
        for place, work in arriving.items():
            try:
                assert work is not None
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                absent.append(place)
                cause = error
        if absent:
            self._lose(absent, mine, cause)
        for done in sent:
            assert done is not None
            done.wait()
        return [
            Announcement(_EVENTS[event], unit, num_bytes, bool(back), steps)
            for event, unit, num_bytes, back, steps in map(torch.Tensor.tolist, rows)
        ]

    def _lose(self, absent: Sequence[int], mine: Announcement, cause: BaseException | None) -> NoReturn:
        did = "nothing yet"
        if self._last is not None:
            did = f"the last thing all ranks did was: each {self._last.describe(self._units)}"
        self._lost = (
            f"rank {_listed(self._ranks[p] for p in absent)} did not come within {self._timeout_s:g} s while rank "
            f"{self._ranks[self._me]} {mine.describe(self._units)} ({did}); {self._cure}"
        )
        raise ScheduleError(self._lost) from cause

    def _mismatch(self, everyone: Sequence[Announcement]) -> str:
        steps: dict[int, list[int]] = {}
        doing: dict[str, list[int]] = {}
        for rank, announcement in zip(self._ranks, everyone, strict=True):
            steps.setdefault(announcement.steps, []).append(rank)
            doing.setdefault(announcement.describe(self._units), []).append(rank)
        if len(steps) > 1:
            counts = ", ".join(f"{number} on rank {_listed(those)}" for number, those in sorted(steps.items()))
            return (
                f"ranks differ in the number of optimizer steps: {counts}, so their weights do not belong together; "
                "every rank has to step its optimizer as often (mfsdp docs debugging)"
            )
        parts = sorted(doing.items(), key=lambda item: (len(item[1]), item[1]))
        actions = " while ".join(f"rank {_listed(ranks)} {what}" for what, ranks in parts)
        return f"{actions}; {self._cure}"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
