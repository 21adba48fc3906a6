"""`megatron_fsdp.comm.agreement` for work on checkpoints: what ranks meet is raised as a CheckpointError on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp.comm import agreement
from megatron_fsdp.errors import CheckpointError

Result = TypeVar("Result")


def together(
    doing: str,
    act: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
) -> Result:
    """Run a function on every rank, and return only if it succeeded on all of them; one small collective."""

    def run() -> Result:
        try:
            return act()
        except CheckpointException as error:  # no Exception, so it would leave the other ranks waiting
            raise in_short(error, doing) from error

    return agreement.together(doing, run, group, facts, CheckpointError)


def decided_by_first(decide: Callable[[], Result], doing: str, group: dist.ProcessGroup | None = None) -> Result:
    """Call a function on rank 0 and return its result on all ranks; one broadcast."""
    return agreement.decided_by_first(decide, doing, group, CheckpointError)


def in_short(error: CheckpointException, doing: str) -> CheckpointError:
    """Return torch's report on what ranks met without its tracebacks, which differ from machine to machine."""
    failures: Mapping[int, Any] = error.failures
    failed = [f"rank {rank}: {type(met).__name__}: {met}" for rank, (met, _) in sorted(failures.items())]
    made = CheckpointError(f"{doing} failed ({'; '.join(failed) or type(error).__name__})")
    made.__cause__ = error
    return made
