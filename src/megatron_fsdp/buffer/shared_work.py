"""Collectives in shared memory that are under way, and sums of what lies there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.mailbox import Mailboxes

_ADDED_AT_ONCE = 1 << 16
"""Elements; what is added up stays in the cache meanwhile."""


class SharedWork(dist.Work):
    """A collective under way.

    Args:
        boxes: The headers.
        channel: Which channel it runs in.
        number: Its message's number.
        read: Reads the parts of the others; gets how long to wait for each.
    """

    def __init__(self, boxes: Mailboxes, channel: int, number: int, read: Callable[[timedelta | None], object]) -> None:
        super().__init__()
        self._boxes, self._channel, self._number = boxes, channel, number
        self._read: Callable[[timedelta | None], object] | None = read
        self._is_finished = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the other ranks, each no longer than `timeout`, and put the result where it belongs; once.

        Raises:
            DistBackendError: Another rank has not come, has ended, or does something else.
        """
        if self._read is not None:
            self._read(timeout)  # where that is interrupted, a second wait reads again
            self._read = None
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether a wait would not have to wait."""
        return self._read is None or self._boxes.is_posted(self._channel, self._number)

    def _finish(self) -> None:
        """Nothing of the others is needed any more."""
        self._boxes.done(self._channel, self._number)
        self._is_finished = True  # last: where Ctrl-C comes before, it is dropped

    def __del__(self) -> None:
        if not self._is_finished:  # nobody waited: others must not be kept from using their memory again
            self._boxes.drop(self._channel, self._number)


class SharedSum(SharedWork):
    """A reduction under way, whose parts are added up where somebody takes the sum.

    Args:
        boxes: The headers.
        channel: Which channel it runs in.
        number: Its message's number.
        read: Waits for the parts of all ranks and gives them, in rank order.
        spare: (shard_numel,) where a sum of the same dtype may be put.
    """

    def __init__(
        self,
        boxes: Mailboxes,
        channel: int,
        number: int,
        read: Callable[[timedelta | None], Sequence[torch.Tensor]],
        spare: torch.Tensor,
    ) -> None:
        rows: list[torch.Tensor] = []
        super().__init__(boxes, channel, number, lambda timeout: rows.extend(read(timeout)))
        self._rows, self._spare = rows, spare

    def _finish(self) -> None:
        """Only when they were added up."""

    def total(self) -> torch.Tensor:
        """The sum (shard_numel,), once: in float32 for 16-bit inputs, else in their dtype.

        It is to be used before the next collective is launched.
        """
        total = add_up(self._rows, self._spare)
        super()._finish()
        return total

    def total_into(self, out: torch.Tensor, factor: float) -> None:
        """Put the sum times a factor into a tensor (shard_numel,) of any floating dtype; in place of `total`."""
        for start in range(0, out.numel(), _ADDED_AT_ONCE):
            part = slice(start, start + _ADDED_AT_ONCE)
            torch.mul(_sum([row[part] for row in self._rows]), factor, out=out[part])
        super()._finish()


def add_up(rows: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Sum two rows or more in order, in float32 if they have 16 bits, else into `out`, which may be one of them."""
    if _is_narrow(rows[0]):
        return _sum(rows)
    if len(rows) == 2:
        return torch.add(*rows, out=out)
    for start in range(0, out.numel(), _ADDED_AT_ONCE):  # in parts, since a row that `out` is may come last
        part = slice(start, start + _ADDED_AT_ONCE)
        torch.add(_sum([row[part] for row in rows[:-1]]), rows[-1][part], out=out[part])
    return out


def _sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two rows or more, in order; a new tensor, in float32 if they have 16 bits."""
    if _is_narrow(rows[0]):
        total = rows[0].to(torch.float32)
        rest = rows[1:]
    else:
        total = rows[0] + rows[1]
        rest = rows[2:]
    for row in rest:
        total.add_(row)
    return total


def _is_narrow(row: torch.Tensor) -> bool:
    return row.dtype.is_floating_point and row.dtype.itemsize < torch.float32.itemsize
