"""What goes wrong on one rank stops all of them, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron_fsdp.errors import CheckpointError, MegatronFSDPError

Result = TypeVar("Result")


def raise_together(error: BaseException | None, doing: str, group: dist.ProcessGroup | None = None) -> None:
    """Let all ranks raise what any of them met; one small collective.

    Args:
        error: What this rank met; None if all went well.
        doing: What was being done, for the message: "writing runs/a/iter_0000010".
        group: The ranks; None: all, or this process alone where torch.distributed is not initialised.

    Raises:
        CheckpointError: A rank has met an error; names every such rank and what it met, the same on every rank.
        Exception: `error` itself, if it is of this library and every rank has met the same.
    """
    told = None if error is None else f"{type(error).__name__}: {error}"
    everyone = gather_objects(told, group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
    if not failed:
        return
    if isinstance(error, MegatronFSDPError) and all(text == told for text in everyone):
        raise error
    raise CheckpointError(f"{doing} failed ({told if len(everyone) == 1 else '; '.join(failed)})") from error


def together(doing: str, act: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Do something on every rank, and go on only if all of them could; one small collective.

    Args:
        doing: As for `raise_together`.
        act: What to do; makes no collective that could be missed by a rank that failed.
        group: The ranks.

    Returns:
        What `act` returned here.

    Raises:
        CheckpointError: As `raise_together`.
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = act()
    except Exception as met:  # noqa: BLE001 - the other ranks have to hear of it
        error = met
    raise_together(error, doing, group)
    return cast(Result, result)


def gather_objects(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank has, by rank; this process's alone where torch.distributed is not initialised."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def rank_of(group: dist.ProcessGroup | None = None) -> int:
    """This process among the ranks."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size_of(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks there are."""
    return dist.get_world_size(group) if dist.is_initialized() else 1
