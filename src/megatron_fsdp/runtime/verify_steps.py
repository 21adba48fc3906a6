"""The cheaper debug switch: once a step, ranks compare a hash of all that they gathered and reduced since the last.

Where ranks exchanged data of different units without noticing, the step ends with an error on every rank that names the
first difference, and not with wrong weights. Where they wait for one another, they stop to wait after half of the time
limit, and compare then: ranks that are stuck meet those that are at the end of their backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist

from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.runtime.rolling_hash import fold
from megatron_fsdp.runtime.row_exchange import AbsentError, RowExchange
from megatron_fsdp.runtime.verify_ranks import Announcement, Deed, tell_steps

_REMEMBERED = 1 << 14
_FIELDS = 4
_NOTHING = -1

Operation = tuple[int, int, int, int]
"""Deed, unit, bytes, and whether a backward was under way (told, not compared)."""


class StepVerifier:
    """Takes the place of a `RankVerifier`. Collective to make.

    Args:
        group: The ranks.
        labels: Name of each unit.
        timeout_s: How long to wait for a rank.
    """

    def __init__(self, group: dist.ProcessGroup, labels: Sequence[str], timeout_s: float) -> None:
        self._exchange = RowExchange(group, timeout_s)
        self._labels = tuple(labels)
        self._since: deque[Operation] = deque(maxlen=_REMEMBERED)  # since ranks last agreed
        self._count = 0
        self._hash = 0
        self._agreed = 0  # operations until then
        self._steps = 0  # of optimizers
        self._lost: str | None = None
        self.wait_limit: timedelta | None = timedelta(seconds=timeout_s / 2)  # those at the end wait for the whole

    def gather(self, unit: int, num_bytes: int) -> None:
        """This rank is about to gather a unit's weights."""
        self._note(Deed.GATHER, unit, num_bytes)

    def reduce(self, unit: int, num_bytes: int) -> None:
        """This rank is about to reduce a unit's gradients."""
        self._note(Deed.REDUCE, unit, num_bytes)

    def end_forward(self, failed: bool) -> None:
        """Nothing is compared here."""

    def note_step(self) -> None:
        """An optimizer of the model has stepped."""
        self._steps += 1

    def change(self) -> None:
        """`requires_grad` of some parameter was changed: compare at once.

        Raises:
            ScheduleError: As `end_backward`.
        """
        self._note(Deed.CHANGE, 0, 0)
        self.end_backward()

    def communication_failed(self, error: RuntimeError) -> None:
        """Compare: it may have failed because ranks did different things.

        Raises:
            ScheduleError: They did; the same message on every rank.
        """
        try:
            self.end_backward()
        except ScheduleError as found:
            if self._lost is None:
                raise ScheduleError(str(found)) from error
            error.add_note(self._lost)

    def forget(self) -> None:
        """The model was brought to rest; ranks may have been stopped at different points."""
        self._since.clear()
        self._count = self._hash = self._agreed = self._steps = 0

    def end_backward(self) -> None:
        """A backward that reduces is over: compare.

        Raises:
            ScheduleError: Ranks did different things (the same message on every rank), or a rank did not come.
        """
        if self._lost is not None:
            raise ScheduleError(self._lost)
        try:
            mine = torch.tensor([self._count, self._hash, self._agreed, self._steps])
            rows = [row.tolist() for row in self._exchange(mine)]
            if all(row == rows[0] for row in rows):
                self._since.clear()
                self._agreed = self._count
                return
            if told := tell_steps(self._exchange.ranks, [row[3] for row in rows]):
                raise ScheduleError(told)
            told = self._first_difference(max(len(self._since), max(row[0] - row[2] for row in rows)))
        except AbsentError as error:
            self._lose(error.positions)
            raise ScheduleError(self._lost) from error.__cause__
        raise ScheduleError(
            f"{told}; every rank has to call the same units in the same order, and one that has nothing to compute "
            "with a unit calls model.take_part(unit, hidden) in its place (docs/ranks.md)"
        )

    def _note(self, deed: Deed, unit: int, num_bytes: int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        self._count += 1
        self._hash = fold(self._hash, deed, unit, num_bytes)
        self._since.append((deed, unit, num_bytes, in_backward))

    def _first_difference(self, count: int) -> str:
        """Exchange what was done since ranks agreed. All ranks see the same rows, so all say the same."""
        count = min(count, _REMEMBERED)
        table = torch.full((count, _FIELDS), _NOTHING, dtype=torch.int64)
        if self._since:
            table[: len(self._since)] = torch.tensor(list(self._since), dtype=torch.int64)
        by_rank = [[tuple(row) for row in rows.tolist() if row[0] != _NOTHING] for rows in self._exchange(table)]
        for place, operations in enumerate(zip_longest(*by_rank)):
            if len({operation[:3] if operation is not None else None for operation in operations}) > 1:
                return self._told(place, operations)
        return f"ranks did different things before the last {count} operations, which is as far as they remember"

    def _told(self, place: int, operations: Sequence[Operation | None]) -> str:
        doing: dict[str, list[int]] = {}
        for rank, operation in zip(self._exchange.ranks, operations, strict=True):
            what = "did nothing more"
            if operation is not None:
                deed, unit, num_bytes, back = operation
                what = Announcement(Deed(deed), unit, num_bytes, bool(back)).told(self._labels)
            doing.setdefault(what, []).append(rank)
        parts = sorted(doing.items(), key=lambda item: (len(item[1]), item[1]))
        told = " while ".join(f"rank {', '.join(map(str, ranks))} {what}" for what, ranks in parts)
        return f"operation {place + 1} since ranks last agreed differs: {told}"

    def _lose(self, positions: Sequence[int]) -> None:
        absent = ", ".join(str(self._exchange.ranks[position]) for position in positions)
        last = "nothing"
        if self._since:
            deed, unit, num_bytes, back = self._since[-1]
            last = Announcement(Deed(deed), unit, num_bytes, bool(back)).told(self._labels)
        self._lost = (
            f"rank {absent} did not come to compare within {self._exchange.timeout_s:g} s of rank "
            f"{self._exchange.ranks[self._exchange.me]}, which did {len(self._since)} operations since ranks last "
            f"agreed (the last: it {last}); MFSDP_VERIFY_RANKS=1 finds the first difference between ranks "
            "(docs/ranks.md), MFSDP_HANG_LOG=DIR what the other rank does (docs/hangs.md)"
        )
