"""What goes wrong on one rank stops all of them, with the same message."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_fsdp.errors import CheckpointError


def raise_together(error: BaseException | None, doing: str, group: dist.ProcessGroup | None = None) -> None:
    """Let all ranks raise what any of them met; one small collective.

    Args:
        error: What this rank met; None if all went well.
        doing: What was being done, for the message: "writing runs/a/iter_0000010".
        group: The ranks; None: all, or this process alone where torch.distributed is not initialised.

    Raises:
        CheckpointError: A rank has met an error; names every such rank and what it met, the same on every rank.
    """
    told = None if error is None else f"{type(error).__name__}: {error}"
    everyone = gather_objects(told, group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
    if failed:
        alone = len(everyone) == 1
        raise CheckpointError(f"{doing} failed ({told if alone else '; '.join(failed)})") from error


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
