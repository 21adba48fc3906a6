"""Work that one rank of each machine does while the others wait, for as long as it takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

import torch.distributed as dist

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.failures import OutOfMemoryError
from megatron_fsdp.train.launch.ranks import Rank, reduce_values

_TOLD: Mapping[str, type[Exception]] = {kind.__name__: kind for kind in (ConfigurationError, OutOfMemoryError)}
"""Errors whose words are for the user."""
BEAT_S = 5.0  # well below the time limit of a collective, which the work may exceed by far


def is_first_here(rank: Rank) -> bool:
    """Whether this is the first rank of its machine, by torchrun's environment; without it, of all ranks."""
    return int(os.environ.get("LOCAL_RANK", rank.index)) == 0


def work_on_machines(rank: Rank, work: Callable[[], None]) -> None:
    """Let the first rank of each machine do something; collective, and over when all have done it.

    The ranks meet every few seconds, so that no collective runs into its time limit however long the work takes.

    Raises:
        ConfigurationError: Some machine's work raised it; every rank raises the same.
        OutOfMemoryError: Likewise.
        RuntimeError: Some machine's work raised something else, named with its rank; or the launcher is gone.
    """
    task = _Task(work) if is_first_here(rank) else None
    while True:
        if task is not None:
            task.join(BEAT_S)
        rank.require_launcher()
        is_pending = task is not None and task.is_alive()
        if reduce_values(rank, [float(is_pending)], "max") == [0.0]:
            break
    error = None if task is None else task.error
    kind = next((name for name, each in _TOLD.items() if isinstance(error, each)), "")
    said = None if error is None else (kind, str(error) if kind else f"rank {rank.index}: {error!r}")
    answers: list[tuple[str, str] | None] = [None] * rank.count
    dist.all_gather_object(answers, said)
    for name, words in filter(None, answers):
        raise _TOLD.get(name, RuntimeError)(words) from error


def require_same(rank: Rank, value: str | None, error: str | None, what: str) -> None:
    """Check that all ranks have the same; collective.

    Args:
        rank: This process.
        value: Short; None where there is an error.
        error: What went wrong on this rank.
        what: Names the value, and says at the end what to do.

    Raises:
        ConfigurationError: On every rank, with the first rank's error, or with the ranks that have each value.
    """
    found: list[tuple[str | None, str | None]] = [(None, None)] * rank.count
    dist.all_gather_object(found, (value, error))
    problems = {problem: index for index, (_, problem) in enumerate(found) if problem is not None}
    for problem, index in problems.items():
        is_common = len(problems) == 1 and all(theirs is not None for _, theirs in found)
        raise ConfigurationError(problem if is_common else f"rank {index}: {problem}")
    ranks_of: dict[str, list[str]] = {}
    for index, (theirs, _) in enumerate(found):
        ranks_of.setdefault(str(theirs), []).append(str(index))
    if len(ranks_of) > 1:
        groups = "; ".join(f"{theirs} on ranks {', '.join(ranks)}" for theirs, ranks in ranks_of.items())
        raise ConfigurationError(what.format(groups))


def goes_on_without_others(rank: Rank, *, is_asked: bool) -> bool:
    """Whether ranks that saved and end do so only since another machine leaves; collective.

    torchrun takes ranks that end with 0 for done. So those of a machine whose agent was not asked to end must not, or
    the run would be over; started again, they go on without the machine that leaves.

    Args:
        rank: This process.
        is_asked: Whether this process was asked to end.

    Returns:
        The same on all ranks of a machine; False where its agent would not start them again.
    """
    agent = os.environ.get("GROUP_RANK", "0")
    found: list[tuple[str, bool]] = [("", False)] * rank.count
    dist.all_gather_object(found, (agent, is_asked))
    starts, limit = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return starts < limit and not any(was_asked for theirs, was_asked in found if theirs == agent)


class _Task(threading.Thread):
    """A thread that keeps what was raised; it does not outlive the process."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="preparation", daemon=True)
        self._work = work
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """See `Thread`."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001  # every rank has to hear of it
            self.error = error
