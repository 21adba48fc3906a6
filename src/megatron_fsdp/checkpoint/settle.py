"""Steps that all ranks take together: what rank 0 decides, and errors that are everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp.checkpoint.ranks import raise_together, rank_of, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError

Answer = TypeVar("Answer")

SaveErrors = (Exception, CheckpointException)
"""What a save may raise; torch's own exception of checkpoints is no `Exception`."""


def decided_by_first(decide: Callable[[], Answer], doing: str, group: dist.ProcessGroup | None = None) -> Answer:
    """What rank 0 finds or does, on all ranks; one broadcast.

    Args:
        decide: Called on rank 0 only; what it returns is pickled.
        doing: What is being done, for the message.
        group: The ranks; None: all, or this process alone.

    Raises:
        CheckpointError: Rank 0 has met an error; the same on every rank.
        ConfigurationError: Rank 0 has met this one.
    """
    answer: Any = None
    problem: tuple[type[CheckpointError | ConfigurationError], str] | None = None
    cause: Exception | None = None
    if rank_of(group) == 0:
        try:
            answer = decide()
        except CheckpointError as error:
            problem, cause = (CheckpointError, str(error)), error
        except ConfigurationError as error:
            problem, cause = (ConfigurationError, str(error)), error
        except Exception as error:  # noqa: BLE001  told to the others, then raised
            problem, cause = (CheckpointError, f"{doing} failed ({type(error).__name__}: {error})"), error
    if world_size_of(group) > 1:
        told = [answer, problem]
        dist.broadcast_object_list(told, group=group, group_src=0)
        answer, problem = told
    if problem is not None:
        kind, message = problem
        raise kind(message) from cause
    return answer


def raise_settled(error: BaseException | None, doing: str, group: dist.ProcessGroup | None = None) -> None:
    """`raise_together`, which puts torch's report on all ranks in short.

    Args:
        error: What this rank met; None if all went well.
        doing: What was being done, for the message.
        group: The ranks; None: all, or this process alone.

    Raises:
        CheckpointError: A rank has met an error; the same message on every rank.
        Exception: As of `raise_together`.
    """
    if isinstance(error, CheckpointException):
        made = CheckpointError(f"{doing} failed ({failures_in_words(error)})")
        made.__cause__ = error
        error = made
    raise_together(error, doing, group)


def failures_in_words(error: CheckpointException) -> str:
    """What ranks met, the same text on each, without the tracebacks, which are different on every machine."""
    return "; ".join(f"rank {rank}: {type(met).__name__}: {met}" for rank, (met, _) in sorted(error.failures.items()))
