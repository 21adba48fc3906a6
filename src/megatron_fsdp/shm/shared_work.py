"""Collectives in shared memory that are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_fsdp.comm.local_sums import add_up, add_up_into
from megatron_fsdp.shm.mailbox import Mailboxes


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
        add_up_into(self._rows, out, factor)
        super()._finish()
