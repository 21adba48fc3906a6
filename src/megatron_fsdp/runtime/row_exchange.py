"""A few numbers from every rank to every rank, with a time limit that names who did not come."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.own_group import go_with, twin_of


class AbsentError(RuntimeError):
    """Some ranks did not come in time.

    Attributes:
        positions: Which, by their place in the group.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__(f"ranks at {list(positions)} did not come")
        self.positions = tuple(positions)


class RowExchange:
    """Exchanges rows over a gloo group of its own, which goes with it. Collective to make.

    Args:
        group: The ranks.
        timeout_s: How long to wait for a rank.

    Attributes:
        ranks: Their global ranks, in order.
        me: This rank's place among them.
        timeout_s: As given.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.me = dist.get_rank(group)
        self.timeout_s = timeout_s
        # torch names a group by how many there are, which groups that were taken down make ambiguous.
        told = [f"megatron_fsdp_rows_{uuid.uuid4().hex}" if self.me == 0 else None]
        dist.broadcast_object_list(told, group=group, group_src=0)
        self._group = twin_of(group, str(told[0]), backend="gloo")
        go_with(self, [self._group])
        # Ranks leave together: a slow start is not charged to the first exchange, and no rank takes its side of the
        # group down while another still connects.
        dist.barrier(group=self._group)

    def __call__(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The rows of all ranks, in order.

        Args:
            row: This rank's, of the same shape and dtype on all of them; on the CPU.

        Raises:
            AbsentError: Ranks did not come in time; its cause is what the back end said.
        """
        rows = [row.clone() for _ in self.ranks]
        peers = [position for position in range(len(self.ranks)) if position != self.me]
        absent: list[int] = []
        try:
            arriving = {p: dist.irecv(rows[p], src=self.ranks[p], group=self._group) for p in peers}
            sent = [dist.isend(row, dst=self.ranks[p], group=self._group) for p in peers]
        except RuntimeError as error:
            raise AbsentError(peers) from error
        cause: RuntimeError | None = None
        for position, work in arriving.items():
            try:
                assert work is not None
                work.wait(timedelta(seconds=self.timeout_s))
            except RuntimeError as error:
                absent.append(position)
                cause = error
        if cause is not None:
            raise AbsentError(absent) from cause
        for done in sent:
            assert done is not None
            done.wait()
        return rows
