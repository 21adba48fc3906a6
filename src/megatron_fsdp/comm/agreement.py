"""The questions that ranks ask each other, so that all go on or all raise the same error.

    raise_together  may all go on, and did all do the same?  What a rank met, and facts that differ, are raised on all;
                    `together` is the same around a function, `all_agree` around a block
    ask             the same for other reports: a judge says what is wrong with them
    decided_by_first  the first rank decides for all

An error that one rank alone raises would leave the others waiting in their next collective. So errors travel first.
`raise_together` names ranks by their global rank; a judge is told reports in the order of the group's ranks.
Every function here is a collective; `gather_objects` and `gather_over` gather one value of every rank.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, RankError

Result = TypeVar("Result")
Report = TypeVar("Report")
Problem = tuple[type[Exception], str]
"""What all ranks raise: the type of an error, and its text."""
Judge = Callable[[Sequence[Report]], Problem | None]
"""Says what is wrong with the reports of a group's ranks, in rank order; decides the same on each of them."""

SMALL_BYTES = 1024
"""Size of the first message; objects that do not fit, with the 8 bytes of their length, take a second collective."""
_LENGTH_BYTES = 8
_SHOWN = 8
_SHOWN_DIFFERENCES = 3


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


def ask(
    reports: Sequence[tuple[dist.ProcessGroup | None, Report]], judge: Judge[Report], error: Exception | None = None
) -> list[list[Report]]:
    """Gather the reports of ranks over one group after another, and raise what is wrong; one collective for each group.

    Args:
        reports: Groups that together reach all ranks that are to know, and what this rank reports in each; None is a
            group of this rank alone.
        judge: Looks at the reports of one group; what it finds is passed on to the ranks of the next ones.
        error: What this rank met, the cause of what is raised.

    Returns:
        The reports in each group, in rank order.

    Raises:
        Exception: What the first judge to find something has found, on all ranks.
    """
    found: list[list[Report]] = []
    problem: Problem | None = None
    for group, report in reports:
        everyone = [(problem, report)] if group is None else gather_objects((problem, report), group)
        found.append([each for _, each in everyone])
        problem = first_problem([told for told, _ in everyone]) or judge(found[-1])
    if problem is None:
        return found
    raise problem[0](problem[1]) from error


def first_problem(problems: Sequence[Problem | None]) -> Problem | None:
    """Judge by the first problem that a rank reports."""
    return next((problem for problem in problems if problem is not None), None)


def raise_together(
    error: Exception | None,
    doing: str,
    groups: Sequence[dist.ProcessGroup | None] = (),
    facts: Mapping[str, str] | None = None,
    raises: type[MegatronFSDPError] | None = None,
) -> None:
    """Raise on all ranks what any of them met; one small collective for each group.

    Args:
        error: What this rank met; None if all went well.
        doing: What was being done, for the message: "writing runs/a/iter_0000010".
        groups: Those of this rank along the dimensions of a mesh, which together reach all ranks that are to know;
            None is a group of this rank alone. Without any: all ranks, or this process alone where torch.distributed
            is not initialised.
        facts: What has to be the same on every rank of the first group, by name, in an order that its ranks share.
            Compared before errors are looked at, unless a rank of the group gave None; only a digest is sent unless
            they differ.
        raises: The type of what is raised, but for what all have met of this library, and for facts that differ.

    Raises:
        ConfigurationError: Facts differ; or, without `raises`, all errors that were met are such. Says which rank has
            what, the same on every rank.
        RankError: Ranks have met errors of other types, without `raises`; the same.
        Exception: `error` itself, if every rank has met the same, and it is of this library or there is no `raises`.
    """
    first, *others = groups or [dist.group.WORLD]
    rank, told = rank_of(), None if error is None else f"{type(error).__name__}: {error}"
    report = rank, told, isinstance(error, ConfigurationError), None if facts is None else _digest(facts)
    reports = gather_over([first], report)
    digests = {digest for *_, digest in reports}
    differences = None
    if len(digests) > 1 and None not in digests:  # the same decision on every rank of the group
        differences = _differences(dict(gather_over([first], (rank, dict(facts or {})))))
    failed = [report for report in reports if report[1] is not None]
    everyone = gather_over(others, (differences, failed, len(reports)))
    for different, _, _ in everyone:
        if different is not None:
            raise ConfigurationError(different) from error
    failed = sorted(itertools.chain.from_iterable(failed for _, failed, _ in everyone))
    if not failed:
        return
    num_ranks = sum(num_ranks for *_, num_ranks in everyone)
    is_of_all = len(failed) == num_ranks and {text for _, text, *_ in failed} == {told}
    if error is not None and is_of_all and (raises is None or isinstance(error, MegatronFSDPError)):
        raise error
    kind = raises or (ConfigurationError if all(is_usage for *_, is_usage, _ in failed) else RankError)
    of_ranks = "; ".join(f"rank {rank}: {text}" for rank, text, *_ in failed)
    raise kind(f"{doing} failed ({of_ranks if num_ranks > 1 else told})") from error


def together(
    doing: str,
    act: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
    raises: type[MegatronFSDPError] | None = None,
) -> Result:
    """Run a function on every rank, and return only if it succeeded on all of them; raises as `raise_together` does.

    Args:
        doing: What is being done, for the message.
        act: The function; makes no collective, which a rank that failed would miss.
        group: The ranks; None: all.
        facts: What has to be the same on every rank.
        raises: As for `raise_together`.
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = act()
    except Exception as met:  # noqa: BLE001 - the other ranks must raise, too
        error = met
    raise_together(error, doing, [] if group is None else [group], facts, raises)
    return cast(Result, result)


@contextmanager
def all_agree(
    doing: str, groups: Sequence[dist.ProcessGroup | None] = (), raises: type[MegatronFSDPError] | None = None
) -> Iterator[dict[str, str]]:
    """Run a block on every rank; then `raise_together` its error, if any, and what differs of facts that it adds."""
    error: Exception | None = None
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception as met:  # noqa: BLE001 - the other ranks must raise, too
        error = met
    raise_together(error, doing, groups, None if error is not None else facts, raises)


def by_value(values: Iterable[tuple[int, str]]) -> str:
    """List the values of ranks, given in pairs, each value once: "True on rank 0, False on ranks 1, 2"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    parts = [f"{value} on {_named(having)}" for value, having in list(ranks.items())[:_SHOWN]]
    return ", ".join([*parts, "..."] if len(ranks) > _SHOWN else parts)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _digest(facts: Mapping[str, str]) -> bytes:
    return hashlib.blake2b(repr(list(facts.items())).encode(), digest_size=8).digest()


def _differences(everyone: Mapping[int, Mapping[str, str]]) -> str:
    """Say which facts of the ranks differ; the message leaves out what was being done, which may differ, too."""
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    values = {name: {rank: facts.get(name, "nothing") for rank, facts in everyone.items()} for name in names}
    differing = [name for name in values if len(set(values[name].values())) > 1]
    # Of "config" and "config.size" keep the first: other classes may not have the second at all.
    first = [name for name in differing if name.rpartition(".")[0] not in differing]
    shown = [f"{name} is {by_value(values[name].items())}" for name in first[:_SHOWN_DIFFERENCES]]
    if len(first) > _SHOWN_DIFFERENCES:
        shown.append(f"{len(first) - _SHOWN_DIFFERENCES} more differ")
    if not differing:
        names_there = next(found for found in zip(*everyone.values(), strict=True) if len({*found}) > 1)
        shown = [f"the order, from {by_value(zip(everyone, names_there, strict=True))}"]
    return f"ranks differ: {'; '.join(shown)}; give the same on every rank"


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
