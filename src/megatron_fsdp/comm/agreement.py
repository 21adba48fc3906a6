"""Two questions that ranks ask each other, so that all go on or all raise the same error.

    agree           did all ranks do the same?  Facts are compared before a model is sharded or changed; `all_agree` is
                    the same around a block.
    raise_together  may all go on?  What a rank met is raised on all, after work that each did by itself; `together` and
                    `decided_by_first` are the same around a function, run by every rank or by the first.

An error that one rank alone raises would leave the others waiting in their next collective. So errors travel first.
Every function here is a collective; `gather_objects` and `gather_over` gather one value of every rank.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, RankError

Result = TypeVar("Result")

SMALL_BYTES = 1024
"""Size of the first message; objects that do not fit, with the 8 bytes of their length, take a second collective."""
_LENGTH_BYTES = 8
_SHOWN = 8


@real_values()
def gather_objects(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Return the values of all ranks, in rank order; one small collective over gloo, where torch's own takes two.

    Raises:
        RankError: A group was given, and torch.distributed has been taken down.
    """
    if not _is_up(group) or dist.get_world_size(group) == 1:
        return [value]
    if dist.get_backend(group) != dist.Backend.GLOO:  # other back ends need tensors on their own devices
        found: list[Result] = [value] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
        return found
    data = pickle.dumps(value)
    message = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    messages = _gather_bytes(group, message, SMALL_BYTES)
    lengths = [_LENGTH_BYTES + int.from_bytes(each[:_LENGTH_BYTES], "little") for each in messages]
    if max(lengths) > SMALL_BYTES:  # the same decision on every rank
        messages = _gather_bytes(group, message, max(lengths))
    return [pickle.loads(each[_LENGTH_BYTES:length]) for each, length in zip(messages, lengths, strict=True)]


def gather_over(groups: Sequence[dist.ProcessGroup | None], value: Result) -> list[Result]:
    """Return the values of all ranks that the groups reach together, gathered over one after another.

    The last group is the most significant one in the order; None adds no rank.
    """
    everyone = [value]
    for group in groups:
        if group is not None:
            everyone = list(itertools.chain.from_iterable(gather_objects(everyone, group)))
    return everyone


def _gather_bytes(group: dist.ProcessGroup | None, message: bytes, length: int) -> list[bytes]:
    """Gather the first `length` bytes of every rank's message, padded with zeros."""
    # Cloned: the thread of gloo may be the last to let go of it, and must not free an object of the interpreter.
    sent = torch.frombuffer(bytearray(message[:length].ljust(length, b"\0")), dtype=torch.uint8).clone()
    received = torch.empty(dist.get_world_size(group), length, dtype=torch.uint8, device="cpu")
    dist.all_gather(list(received.unbind()), sent, group=group)
    return [bytes(each.tolist()) for each in received]


def rank_of(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in the group, 0 without torch.distributed; raises as `gather_objects` does."""
    return dist.get_rank(group) if _is_up(group) else 0


def world_size_of(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks, 1 without torch.distributed; raises as `gather_objects` does."""
    return dist.get_world_size(group) if _is_up(group) else 1


def _is_up(group: dist.ProcessGroup | None) -> bool:
    """Return whether there are ranks; a process whose group is gone must not take itself for the only one."""
    if dist.is_initialized():
        return True
    if group is not None:
        raise RankError(
            "torch.distributed was taken down while ranks of a group still work together; let them finish before "
            "destroy_process_group() (saves in the background by wait(), or by close() of their Checkpointer)"
        )
    return False


def agree(
    groups: Sequence[dist.ProcessGroup | None], error: Exception | None = None, facts: Sequence[str] = ()
) -> None:
    """Compare facts and errors over groups of ranks, one group after another; the error of one rank stops all of them.

    One small collective for each group, and a second one to say which facts differ.

    Args:
        groups: The ranks; None for a single one.
        error: What this rank found wrong.
        facts: What has to be the same in the first group, one readable line each, in an order that its ranks share.

    Raises:
        ConfigurationError: On every rank, with the same message, where ranks differ.
        Exception: `error` itself, where every rank found the same.
    """
    for position, group in enumerate(groups):
        if group is not None:
            error = _problem_in(group, error, facts if position == 0 and error is None else ())
    if error is not None:
        raise error


@contextmanager
def all_agree(groups: Sequence[dist.ProcessGroup | None]) -> Iterator[list[str]]:
    """Run a block on every rank; after it `agree` on its error, if any, and on the facts that it adds to the list."""
    error: Exception | None = None
    facts: list[str] = []
    try:
        yield facts
    except (MegatronFSDPError, TypeError) as met:
        error = met
    agree(groups, error, facts)


def _problem_in(group: dist.ProcessGroup, error: Exception | None, facts: Sequence[str]) -> Exception | None:
    """Return why the ranks of a group cannot go on together: the error here if all have that one; None: they can."""
    everyone = gather_objects((None if error is None else str(error), _digest(facts)), group)
    errors = [found for found, _ in everyone]
    if error is not None and all(found == errors[0] for found in errors):
        return error
    if any(found is not None for found in errors):
        message = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(errors) if found is not None)
        return ConfigurationError(
            f"some ranks of the group cannot go on ({message}); give every rank the same model and arguments"
        )
    if len({digest for _, digest in everyone}) == 1:
        return None
    of_ranks = gather_objects(list(facts), group)
    differences = (
        (rank, *pair)
        for rank, other in enumerate(of_ranks)
        for pair in itertools.zip_longest(of_ranks[0], other, fillvalue="nothing more")
    )
    rank, expected, found = next(place for place in differences if place[1] != place[2])
    return ConfigurationError(
        f"ranks of the group disagree: rank 0 has {expected!r}, rank {rank} has {found!r}; give every rank the same "
        "model and arguments"
    )


def raise_together(
    error: Exception | None,
    doing: str,
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
    raises: type[MegatronFSDPError] = RankError,
) -> None:
    """Raise on all ranks what any of them met; one small collective.

    Args:
        error: What this rank met; None if all went well.
        doing: What was being done, for the message: "writing runs/a/iter_0000010".
        group: The ranks; None: all, or this process alone where torch.distributed is not initialised.
        facts: As for `together`.
        raises: The error to raise on all ranks.

    Raises:
        MegatronFSDPError: A rank has met an error; names every such rank and what it met, the same on every rank.
        ConfigurationError: Ranks have different facts.
        Exception: `error` itself, if it is of this library and every rank has met the same.
    """
    message = None if error is None else f"{type(error).__name__}: {error}"
    found = gather_objects((message, None if facts is None else _digest(sorted(facts.items()))), group)
    if facts is not None and len({digest for _, digest in found}) > 1:
        _raise_different(gather_objects(dict(facts), group), error)
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None]
    if not failed:
        return
    if isinstance(error, MegatronFSDPError) and all(text == message for text, _ in found):
        raise error
    raise raises(f"{doing} failed ({message if len(found) == 1 else '; '.join(failed)})") from error


def together(
    doing: str,
    act: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
    raises: type[MegatronFSDPError] = RankError,
) -> Result:
    """Run a function on every rank, and return only if it succeeded on all of them; one small collective.

    Args:
        doing: As for `raise_together`.
        act: The function; makes no collective, which a rank that failed would miss.
        group: The ranks.
        facts: What has to be the same on every rank, by name; all ranks give some, or none does. They are compared
            before errors are looked at, and only a digest of them is sent unless they differ.
        raises: As for `raise_together`.

    Raises:
        MegatronFSDPError: A rank has met an error; names every such rank and what it met, the same on every rank.
        ConfigurationError: Ranks have different facts; says which rank has what, the same on every rank.
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = act()
    except Exception as met:  # noqa: BLE001 - the other ranks must raise, too
        error = met
    raise_together(error, doing, group, facts, raises)
    return cast(Result, result)


def by_value(values: Sequence[str]) -> str:
    """List the values of the ranks, each value once: "True on rank 0, False on ranks 1, 2"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = [f"{value} on {_named(having)}" for value, having in list(ranks.items())[:_SHOWN]]
    return ", ".join([*parts, "..."] if len(ranks) > _SHOWN else parts)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _digest(facts: Sequence[object]) -> bytes:
    return hashlib.blake2b(repr(list(facts)).encode(), digest_size=8).digest()


def _raise_different(facts: Sequence[Mapping[str, str]], cause: BaseException | None) -> None:
    """Raise what differs; the message leaves out what was being done, which may differ between ranks."""
    names = dict.fromkeys(name for of_rank in facts for name in of_rank)
    values = {name: [of_rank.get(name, "nothing") for of_rank in facts] for name in names}
    differing = [name for name in values if len(set(values[name])) > 1]
    # Of "config" and "config.size" keep the first: other classes may not have the second at all.
    first = [name for name in differing if name.rpartition(".")[0] not in differing]
    message = "; ".join(f"{name} is {by_value(values[name])}" for name in first)
    raise ConfigurationError(
        f"ranks differ in what they save or load: {message}; give the same on every rank"
    ) from cause


def decided_by_first(
    decide: Callable[[], Result],
    doing: str,
    group: dist.ProcessGroup | None = None,
    raises: type[MegatronFSDPError] = RankError,
) -> Result:
    """Call a function on rank 0 and return its result on all ranks; one broadcast.

    Raises:
        MegatronFSDPError: Rank 0 has met an error, which is of type `raises` unless it is a ConfigurationError; the
            same on every rank.
    """
    answer: Any = None
    problem: tuple[type[Exception], str] | None = None
    cause: Exception | None = None
    if rank_of(group) == 0:
        try:
            answer = decide()
        except Exception as error:  # noqa: BLE001  sent to the others, then raised
            known = (raises, ConfigurationError)
            kind = next((kind for kind in known if isinstance(error, kind)), raises)
            told = str(error) if isinstance(error, known) else f"{doing} failed ({type(error).__name__}: {error})"
            problem, cause = (kind, told), error
    if world_size_of(group) > 1:
        sent = [answer, problem]
        dist.broadcast_object_list(sent, group=group, group_src=0)
        answer, problem = sent
    if problem is not None:
        raise problem[0](problem[1]) from cause
    return answer
