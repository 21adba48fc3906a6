"""What a rank has put into its arena, and how far the others have read: the protocol of shared memory.

Each rank's arena begins with a header that only its owner writes:

    bell     rung after each change that somebody may be waiting for
    gone     1 when the owner has let go of the arena; more when it has failed, and then because of which rank
    token    proves to who opens the arena whose it is (`shared_arena`)

and for each channel: how many messages were posted, with how many of the others' this rank is done, and what the
last `_RING` messages are: kind, bytes, offset in the arena.

Message n of a channel is one collective: every rank posts its part and reads those of the others. Nobody waits to post,
unless another rank is `_RING` messages behind. A failure is final, as with a back end: messages that were posted since
would be taken for others.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import IntEnum
from typing import NoReturn

import torch.distributed as dist

from megatron_fsdp.shm.futex import Bell
from megatron_fsdp.shm.shared_arena import HEADER_BYTES, Arena, Place, has_ended

CHANNELS = ("gather", "reduction")
_BELL, _GONE = 0, 8
"""Words of the header, on cache lines of their own."""
_LET_GO, _FAILED = 1, 2
"""Values of the second; a failure adds the position of the rank that it was because of."""
_POSTED, _DONE, _ENTRIES, _ENTRY_WORDS = 0, 8, 16, 4
_RING = 4096
"""Some schedules start the gathers of all groups of a model before they wait for the first."""
_FIRST_CHANNEL, _CHANNEL_WORDS = 64, _ENTRIES + _RING * _ENTRY_WORDS + 48
_LOOK_S = 0.5
"""How often who waits looks whether the other process still lives."""

assert _FIRST_CHANNEL + len(CHANNELS) * _CHANNEL_WORDS <= HEADER_BYTES // 8


class Kind(IntEnum):
    """What ranks do together by a message."""

    GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3
    BEGINNING_OF_A_PASS = 4
    END_OF_A_PASS = 5
    CHANGE_OF_REQUIRES_GRAD = 6


class Mailboxes:
    """The headers of all ranks.

    Args:
        rank: This one's position on the axis, as everywhere here; messages name ranks as `places` does.
        arenas: By rank.
        places: By rank, for finding out whether a process lives.
        timeout: How long to wait for another rank where nobody says otherwise.
    """

    def __init__(self, rank: int, arenas: Mapping[int, Arena], places: Mapping[int, Place], timeout: timedelta) -> None:
        self._rank = rank
        self._arenas = dict(arenas)  # the memory of what follows
        self._places = places
        self._timeout = timeout
        self._words = {each: arena.words for each, arena in arenas.items()}
        self._bells = {each: Bell(ctypes.addressof(arena.words) + 8 * _BELL) for each, arena in arenas.items()}
        self._own = self._words[rank]
        self._others = tuple(each for each in arenas if each != rank)
        self._finished: tuple[set[int], ...] = tuple(set() for _ in CHANNELS)
        self._dropped: deque[tuple[int, int]] = deque()
        self._failure: str | None = None
        self._owner = os.getpid()

    def next_number(self, channel: int) -> int:
        """The number that the next message of a channel will have; they begin at 1.

        Raises:
            DistBackendError: There will be none, because a collective has failed.
        """
        self._check()
        self._settle()
        return self._own[_base(channel) + _POSTED] + 1

    def post(self, channel: int, kind: int, num_bytes: int, offset: int) -> None:
        """Tell the others of a message that is in the arena.

        Raises:
            DistBackendError: A collective has failed before, this rank waits for too few, or the time is over while
                another rank is further behind than a header can tell.
        """
        base = _base(channel)
        number = self._own[base + _POSTED] + 1
        if number > _RING and not self.is_done(channel, number - _RING):
            self._make_room(channel, number - _RING)
        entry = base + _ENTRIES + number % _RING * _ENTRY_WORDS
        self._own[entry], self._own[entry + 1], self._own[entry + 2] = kind, num_bytes, offset
        self._own[base + _POSTED] = number  # after the entry: who sees this sees that
        self._bells[self._rank].ring()

    def is_posted(self, channel: int, number: int) -> bool:
        """Whether every other rank has posted its message of this number."""
        word = _base(channel) + _POSTED
        return all(self._words[each][word] >= number for each in self._others)

    def read(
        self, channel: int, number: int, sender: int, expected: tuple[int, int], timeout: timedelta | None = None
    ) -> int:
        """Wait until a rank has posted its message of a number.

        Args:
            channel: Which channel.
            number: The message's.
            sender: Whose.
            expected: Kind and bytes of this rank's own message of that number.
            timeout: How long to wait; None: as long as was said at first.

        Returns:
            Where it lies in that rank's arena, in bytes.

        Raises:
            DistBackendError: The time is over, the other rank has ended or gone, or does something else.
        """
        words, base = self._words[sender], _base(channel)
        if words[base + _POSTED] < number:
            self._check()
            what = f"come to {CHANNELS[channel]} {number}"
            self._await(sender, lambda: words[base + _POSTED] >= number, what, _LOOK_S, timeout)
        entry = base + _ENTRIES + number % _RING * _ENTRY_WORDS
        found = words[entry], words[entry + 1]
        if found != expected:
            self._fail(
                sender,
                f"ranks differ in {CHANNELS[channel]} {number}: {self._name(self._rank)} takes part with "
                f"{_told(*expected)}, {self._name(sender)} with {_told(*found)}; {_SAME}",
            )
        return words[entry + 2]

    def done(self, channel: int, number: int) -> None:
        """Tell the others that their messages of a number were read, or will not be."""
        if os.getpid() != self._owner:
            return
        base, finished = _base(channel), self._finished[channel]
        finished.add(number)
        reached = self._own[base + _DONE]
        before = reached
        while reached + 1 in finished:
            reached += 1
            self._own[base + _DONE] = reached  # before it is forgotten: Ctrl-C may come in between
            finished.remove(reached)
        if reached > before:
            self._bells[self._rank].ring()

    def drop(self, channel: int, number: int) -> None:
        """The same of a message that nobody asks for any more; for any thread, and at any point of another call."""
        self._dropped.append((channel, number))

    def is_done(self, channel: int, number: int) -> bool:
        """Whether all ranks, this one too, are done with the messages of a number."""
        word = _base(channel) + _DONE
        return all(words[word] >= number for words in self._words.values())

    def await_done(self, channel: int, number: int) -> None:
        """Wait until all ranks, this one too, are done with the messages of a number.

        Raises:
            DistBackendError: This rank has not waited for its own, the time is over, or another rank has ended or gone.
        """
        self._settle()
        if self.is_done(channel, number):
            return
        self._check()
        word = _base(channel) + _DONE
        if self._own[word] < number:
            raise dist.DistBackendError(
                f"memory of {CHANNELS[channel]} {number} is needed, for which {self._name(self._rank)} has not waited"
            )
        for other in self._others:
            words = self._words[other]
            what = f"finished {CHANNELS[channel]} {number}"
            self._await(other, lambda words=words: words[word] >= number, what, _LOOK_S)  # type: ignore[misc]

    def _settle(self) -> None:
        """Be done with what was dropped."""
        while self._dropped:
            self.done(*self._dropped[0])
            self._dropped.popleft()

    def leave(self) -> None:
        """Tell the others that nothing more will be posted."""
        if not self._own[_GONE]:
            self._own[_GONE] = _LET_GO
        self._bells[self._rank].ring()

    def _make_room(self, channel: int, oldest: int) -> None:
        """Wait until all ranks are done with a message whose place is needed; this one has to be."""
        if self._own[_base(channel) + _DONE] < oldest:
            raise dist.DistBackendError(
                f"{_RING} collectives ({CHANNELS[channel]}) are under way in shared memory and this rank has not "
                "waited for the first; wait for some, or set MFSDP_SHARED_MEMORY=0"
            )
        self.await_done(channel, oldest)

    def _await(
        self, other: int, is_there: Callable[[], bool], what: str, look_s: float, timeout: timedelta | None = None
    ) -> None:
        """Wait until a rank has done something (`what`) that its header tells."""
        bell, place = self._bells[other], self._places[other]
        limit_s = (timeout or self._timeout).total_seconds()
        end_s = time.monotonic() + limit_s
        while True:
            seen = bell.read()
            gone = self._words[other][_GONE]
            if is_there():
                return
            name, what_for = self._name(other), f"{what}, which {self._name(self._rank)} waits for"
            if gone == _LET_GO:
                self._fail(other, f"{name} has let go of its model and has not {what_for}")
            if gone >= _FAILED:
                culprit = gone - _FAILED
                self._fail(culprit, f"{name} has failed, because of {self._name(culprit)}, and has not {what_for}")
            left_s = end_s - time.monotonic()
            if left_s <= 0.0:
                told = f"Timed out after {limit_s:g} s: {name} has not {what_for}, in shared memory"
                if timeout is not None and timeout < self._timeout:
                    raise dist.DistBackendError(told)  # of the caller's patience alone; it may wait again
                self._fail(other, told)
            bell.wait(seen, min(left_s, look_s))
            if bell.read() == seen and has_ended(place) and not is_there():
                self._fail(other, f"{name} (process {place.pid}) has ended and has not {what_for}")

    def _check(self) -> None:
        """Refuse to go on after a failure, and in a process that was forked from this rank's."""
        if self._failure is not None:
            raise dist.DistBackendError(f"a collective in shared memory has failed before: {self._failure}")
        if os.getpid() != self._owner:
            raise dist.DistBackendError(
                f"process {os.getpid()} was forked from {self._name(self._rank)} (process {self._owner}) and cannot "
                "communicate in its place; use the model in the process that sharded it"
            )

    def _fail(self, culprit: int, told: str) -> NoReturn:
        self._failure = told
        self._own[_GONE] = _FAILED + culprit
        self._bells[self._rank].ring()
        raise dist.DistBackendError(told)

    def _name(self, rank: int) -> str:
        return f"rank {self._places[rank].rank}"


def _told(kind: int, num_bytes: int) -> str:
    """A message in words."""
    what = Kind(kind).name.lower().replace("_", " ") if kind in list(Kind) else f"kind {kind}"
    if kind == Kind.BEGINNING_OF_A_PASS:
        return f"the {what} (optimizer steps so far: {num_bytes})"
    return f"{num_bytes} bytes ({what})" if num_bytes else f"the {what}"


_SAME = "every rank has to run the same units in the same order, and to step its optimizer as often"


def _base(channel: int) -> int:
    return _FIRST_CHANNEL + channel * _CHANNEL_WORDS
