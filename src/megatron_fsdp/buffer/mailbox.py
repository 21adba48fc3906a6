"""What a rank has put into its arena, and how far the others have read: the protocol of shared memory.

Each rank's arena begins with a header that only its owner writes:

    bell     rung after each change that somebody may be waiting for
    gone     1 when the owner has let go of the arena

and for each channel: how many messages were posted, with how many of the others' this rank is done, and what the
last `_RING` messages are: kind, bytes, offset in the arena.

Message n of a channel is one collective: every rank posts its part and reads those of the others. Nobody waits to post.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from megatron_fsdp.buffer.futex import Bell
from megatron_fsdp.buffer.shared_arena import HEADER_BYTES, Arena, Place, started_at

CHANNELS = ("gather", "reduction")
_BELL, _GONE = 0, 8
"""Words of the header, on cache lines of their own."""
_FIRST_CHANNEL, _CHANNEL_WORDS = 64, 1024
_POSTED, _DONE, _ENTRIES, _ENTRY_WORDS = 0, 8, 16, 4
_RING = 128
_LOOK_S = 0.5
"""How often who waits looks whether the other process still lives."""

assert _FIRST_CHANNEL + len(CHANNELS) * _CHANNEL_WORDS <= HEADER_BYTES // 8
assert _ENTRIES + _RING * _ENTRY_WORDS <= _CHANNEL_WORDS


class Mailboxes:
    """The headers of all ranks.

    Args:
        rank: This one.
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

    def next_number(self, channel: int) -> int:
        """The number that the next message of a channel will have; they begin at 1."""
        return self._own[_base(channel) + _POSTED] + 1

    def post(self, channel: int, kind: int, num_bytes: int, offset: int) -> None:
        """Tell the others of a message that is in the arena.

        Raises:
            DistBackendError: Another rank is further behind than a header can tell.
        """
        base = _base(channel)
        number = self._own[base + _POSTED] + 1
        if number > _RING and not self.is_done(channel, number - _RING):
            raise dist.DistBackendError(
                f"{_RING} collectives ({CHANNELS[channel]}) are under way in shared memory and a rank has waited for "
                "none; wait for some first"
            )
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
            self._await(channel, number, sender, timeout or self._timeout)
        entry = base + _ENTRIES + number % _RING * _ENTRY_WORDS
        found = words[entry], words[entry + 1]
        if found != expected:
            raise dist.DistBackendError(
                f"ranks differ in {CHANNELS[channel]} {number}: rank {self._rank} takes part with {expected[1]} bytes "
                f"(kind {expected[0]}), rank {sender} with {found[1]} bytes (kind {found[0]}); {_SAME}"
            )
        return words[entry + 2]

    def done(self, channel: int, number: int) -> None:
        """Tell the others that their messages of a number were read, or will not be."""
        base, finished = _base(channel), self._finished[channel]
        finished.add(number)
        reached = self._own[base + _DONE]
        while reached + 1 in finished:
            reached += 1
            finished.remove(reached)
        self._own[base + _DONE] = reached

    def is_done(self, channel: int, number: int) -> bool:
        """Whether all ranks, this one too, are done with the messages of a number."""
        word = _base(channel) + _DONE
        return all(words[word] >= number for words in self._words.values())

    def leave(self) -> None:
        """Tell the others that nothing more will be posted."""
        self._own[_GONE] = 1
        self._bells[self._rank].ring()

    def _await(self, channel: int, number: int, sender: int, timeout: timedelta) -> None:
        words, bell, word = self._words[sender], self._bells[sender], _base(channel) + _POSTED
        limit_s = timeout.total_seconds()
        end_s = time.monotonic() + limit_s
        while True:
            seen = bell.read()
            is_gone = words[_GONE]
            if words[word] >= number:
                return
            what = f"{CHANNELS[channel]} {number}, which rank {self._rank} waits for"
            if is_gone:
                raise dist.DistBackendError(f"rank {sender} has let go of its model before {what}")
            left_s = end_s - time.monotonic()
            if left_s <= 0.0:
                raise dist.DistBackendError(
                    f"Timed out after {limit_s:g} s: rank {sender} has not come to {what}, in shared memory"
                )
            bell.wait(seen, min(left_s, _LOOK_S))
            place = self._places[sender]
            if bell.read() == seen and started_at(place.pid) != place.started and words[word] < number:
                raise dist.DistBackendError(f"rank {sender} (process {place.pid}) has ended before {what}")


_SAME = "every rank has to run the same units in the same order"


def _base(channel: int) -> int:
    return _FIRST_CHANNEL + channel * _CHANNEL_WORDS
