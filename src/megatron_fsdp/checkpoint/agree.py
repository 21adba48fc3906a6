"""Steps that all ranks take together: what rank 0 decides, and errors and differences that stop all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp.errors import CheckpointError, ConfigurationError, MegatronFSDPError

Result = TypeVar("Result")

_SHOWN = 8


def together(
    doing: str,
    act: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
) -> Result:
    """Do something on every rank, and go on only if all of them could; one small collective.

    Args:
        doing: What is being done, for the message: "writing runs/a/iter_0000010".
        act: What to do; makes no collective that could be missed by a rank that failed.
        group: The ranks; None: all, or this process alone where torch.distributed is not initialised.
        facts: What has to be the same on every rank, by name; all ranks give some, or none does. They are compared
            before errors are looked at, and only a digest of them is sent unless they differ.

    Returns:
        What `act` returned here.

    Raises:
        CheckpointError: A rank has met an error; names every such rank and what it met, the same on every rank.
        ConfigurationError: Ranks have different facts; says which rank has what, the same on every rank.
        Exception: The error itself, if it is of this library and every rank has met the same.
    """
    error: BaseException | None = None
    result: Result | None = None
    try:
        result = act()
    except (Exception, CheckpointException) as met:  # noqa: BLE001  the others have to hear; torch's is no Exception
        error = met
    raise_together(error, doing, group, facts)
    return cast(Result, result)


def raise_together(
    error: BaseException | None,
    doing: str,
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Let all ranks raise what any of them met; the part of `together` that follows the act.

    Args:
        error: What this rank met; None if all went well.
        doing: As for `together`.
        group: The ranks.
        facts: As for `together`.
    """
    if isinstance(error, CheckpointException):
        error = in_short(error, doing)
    told = None if error is None else f"{type(error).__name__}: {error}"
    found = gather_objects((told, None if facts is None else _digest(facts)), group)
    if facts is not None and len({digest for _, digest in found}) > 1:
        _raise_different(gather_objects(dict(facts), group), error)
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None]
    if not failed:
        return
    if isinstance(error, MegatronFSDPError) and all(text == told for text, _ in found):
        raise error
    raise CheckpointError(f"{doing} failed ({told if len(found) == 1 else '; '.join(failed)})") from error


def in_short(error: CheckpointException, doing: str) -> CheckpointError:
    """Torch's report on what ranks met, the same text on each: its tracebacks are different on every machine."""
    failures = [f"rank {rank}: {type(met).__name__}: {met}" for rank, (met, _) in sorted(error.failures.items())]
    made = CheckpointError(f"{doing} failed ({'; '.join(failures)})")
    made.__cause__ = error
    return made


def decided_by_first(decide: Callable[[], Result], doing: str, group: dist.ProcessGroup | None = None) -> Result:
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
        except (CheckpointError, ConfigurationError) as error:
            kind = CheckpointError if isinstance(error, CheckpointError) else ConfigurationError
            problem, cause = (kind, str(error)), error
        except Exception as error:  # noqa: BLE001  told to the others, then raised
            problem, cause = (CheckpointError, f"{doing} failed ({type(error).__name__}: {error})"), error
    if world_size_of(group) > 1:
        told = [answer, problem]
        dist.broadcast_object_list(told, group=group, group_src=0)
        answer, problem = told
    if problem is not None:
        kind, message = problem
        raise kind(message) from cause
    return cast(Result, answer)


def by_value(values: Sequence[str]) -> str:
    """What ranks have, each value once: "True on rank 0, False on ranks 1, 2".

    Args:
        values: By rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    told = [f"{value} on {_named(having)}" for value, having in list(ranks.items())[:_SHOWN]]
    return ", ".join([*told, "..."] if len(ranks) > _SHOWN else told)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _digest(facts: Mapping[str, str]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest())


def _raise_different(facts: Sequence[Mapping[str, str]], cause: BaseException | None) -> None:
    """What differs, without what was being done: that may name what differs, and so be another text on every rank."""
    names = dict.fromkeys(name for of_rank in facts for name in of_rank)
    values = {name: [of_rank.get(name, "nothing") for of_rank in facts] for name in names}
    differing = [name for name in values if len(set(values[name])) > 1]
    # Of "config" and "config.size", which other classes may not have at all, the first tells more.
    first = [name for name in differing if name.rpartition(".")[0] not in differing]
    told = "; ".join(f"{name} is {by_value(values[name])}" for name in first)
    raise ConfigurationError(f"ranks differ in what they save or load: {told}; give the same on every rank") from cause


def gather_objects(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank has, by rank; this process's alone where torch.distributed is not initialised.

    Raises:
        CheckpointError: There is a group, and torch.distributed has been taken down.
    """
    if world_size_of(group) == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def rank_of(group: dist.ProcessGroup | None = None) -> int:
    """This process among the ranks; errors as of `gather_objects`."""
    return dist.get_rank(group) if _is_up(group) else 0


def world_size_of(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks there are; errors as of `gather_objects`."""
    return dist.get_world_size(group) if _is_up(group) else 1


def _is_up(group: dist.ProcessGroup | None) -> bool:
    """Whether there are ranks; a process whose group is gone must not take itself for the only one."""
    if dist.is_initialized():
        return True
    if group is not None:
        raise CheckpointError(
            "torch.distributed was taken down while a checkpoint was being saved or loaded; close the Checkpointer (or "
            "wait() for it) before destroy_process_group()"
        )
    return False
