"""Agreement of ranks: they exchange facts and errors, so that all go on or all raise the same error.

    raise_together  raises the error of any rank, or a difference of facts, on all ranks; `together` is the same around
                    a function, `all_agree` around a block
    ask             the same for other reports, which a judge examines
    decided_by_first  the first rank decides for all
    Companion       compares facts in an all-reduce that ranks make anyway

An error that one rank alone raises would leave the others waiting in their next collective. So errors travel first.
Every agreement begins with a gather over its groups, and a rank that has failed sends its failure there, whatever the
others report: so agreements nest, and an error that leaves a block early is raised by the next of them.
`raise_together` names ranks by their global rank; a judge gets reports in the order of the group's ranks.
Every function here is a collective; `gather_objects` and `gather_over` gather one value of every rank.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatron_fsdp.comm.collectives import default_device, has_values, is_simulated, real_values
from megatron_fsdp.comm.groups import settle_at_exit
from megatron_fsdp.errors import (
    ConfigurationError,
    MegatronFSDPError,
    RankError,
    shortened,
    text_of,
    waits_for,
    words_of,
)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Raised = TypeVar("Raised", bound=BaseException)
Groups = Sequence[dist.ProcessGroup | None]
"""Process groups that together reach all ranks concerned; None is a group of this rank alone."""
Report = TypeVar("Report")
Problem = tuple[type[Exception], str]
"""The error that all ranks raise: its type and text."""
Judge = Callable[[Sequence[Report]], Problem | None]
"""Judges the reports of a group's ranks, in rank order; returns the same problem, or None, on each of them."""

SMALL_BYTES = 1024
"""Bytes of the first message, 8 of which hold the length; larger objects take a second collective."""
_LENGTH_BYTES = 8
_MOST_BYTES = 16 << 30
"""The most bytes that the objects of all ranks may take together; more raises, before memory runs out."""
_OTHER_CALL = (
    "rank {} of a group answered a call of all ranks with {:,} bytes: it is most likely in another call. "
    "All ranks have to make the same calls in the same order; `model.log_for_hangs(FOLDER)` and "
    "`mfsdp hang FOLDER` show where each of them is"
)
_SHOWN = 8
_SHOWN_DIFFERENCES = 3
_clock = itertools.count()


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a rank; it has failed if there is a text, and may be sent instead of a report."""

    rank: int  # global
    doing: str
    words: str | None = None
    is_usage: bool = False  # a ConfigurationError
    kind: type[MegatronFSDPError] | None = None  # of what is raised of it; None: by what was met
    digest: bytes | None = None  # of its facts, where it gave some
    differs: bool = False  # the words are about facts of several ranks


@real_values()
def gather_objects(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """All-gather objects in rank order; one small collective over gloo, where torch's own takes two.

    Raises:
        RankError: A group was given, and torch.distributed has been taken down; or a rank has failed.
    """
    return gather_over([group or dist.group.WORLD] if _is_up(group) else [], value)


def gather_over(groups: Groups, value: Result) -> list[Result]:
    """All-gather objects over one group after another.

    The last group is the most significant one in the order; None adds no rank.
    """
    everyone = _gathered([value], groups)
    _raise_failures(everyone, None, None)
    return everyone


@real_values()
def _gathered(values: list[Any], groups: Groups) -> list[Any]:
    """All-gather lists of objects over one group after another, and join them."""
    for group in groups:
        if group is not None and _is_up(group) and dist.get_world_size(group) > 1:
            values = list(itertools.chain.from_iterable(_gather(values, group)))
    return values


def _gather(value: Result, group: dist.ProcessGroup) -> list[Result]:
    settle_at_exit()
    num_ranks = dist.get_world_size(group)
    if dist.get_backend(group) != dist.Backend.GLOO:  # other back ends need tensors on their own devices
        found: list[Result] = [value] * num_ranks
        dist.all_gather_object(found, value, group=group)
        return found
    data = pickle.dumps(value)
    message = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    messages = _gather_bytes(group, message, SMALL_BYTES)
    lengths = [_LENGTH_BYTES + int.from_bytes(each[:_LENGTH_BYTES], "little") for each in messages]
    if max(lengths) * num_ranks > _MOST_BYTES:
        raise _agreed(RankError(_OTHER_CALL.format(lengths.index(max(lengths)), max(lengths))), num_ranks)
    if max(lengths) > SMALL_BYTES:  # the same decision on every rank
        messages = _gather_bytes(group, message, max(lengths))
    return [pickle.loads(each[_LENGTH_BYTES:length]) for each, length in zip(messages, lengths, strict=True)]


def _gather_bytes(group: dist.ProcessGroup | None, message: bytes, length: int) -> list[bytes]:
    """All-gather the first `length` bytes of every rank's message, padded with zeros."""
    # Cloned: the thread of gloo may be the last to let go of it, and must not free an object of the interpreter.
    sent = torch.frombuffer(bytearray(message[:length].ljust(length, b"\0")), dtype=torch.uint8).clone()
    received = sent.repeat(dist.get_world_size(group), 1)
    dist.all_gather(list(received.unbind()), sent, group=group)
    return [ctypes.string_at(each.data_ptr(), length) for each in received]


def rank_of(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in the group, 0 without torch.distributed; raises as `gather_objects` does."""
    return dist.get_rank(group) if _is_up(group) else 0


def is_first_in(groups: Groups) -> bool:
    """Return True if this process is the first rank of all groups; None is a group of this rank alone."""
    return not any(dist.get_rank(group) for group in groups if group is not None)


def world_size_of(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks, 1 without torch.distributed; raises as `gather_objects` does."""
    return dist.get_world_size(group) if _is_up(group) else 1


def _is_up(group: dist.ProcessGroup | None) -> bool:
    """Return True if torch.distributed is initialised; raise in a process whose group was destroyed."""
    if dist.is_initialized():
        return True
    if group is not None:
        raise RankError(
            "torch.distributed was taken down while ranks of a group still work together; let them finish before "
            "destroy_process_group() (saves in the background by wait(), or by close() of their Checkpointer)"
        )
    return False


def ask(
    reports: Sequence[tuple[dist.ProcessGroup | None, Report]],
    judge: Judge[Report],
    error: BaseException | None = None,
) -> list[list[Report]]:
    """All-gather reports over one group after another, and raise the problem they show, if any; one collective a group.

    Args:
        reports: Groups that together reach all ranks concerned, with this rank's report in each; None is a group of
            this rank alone.
        judge: Examines the reports of one group; its problem is passed on to the ranks of the next ones.
        error: This rank's error, the cause of the one that is raised.

    Returns:
        The reports in each group, in rank order.

    Raises:
        Exception: The first problem that a judge returns, on all ranks.
    """
    found: list[list[Report]] = []
    problem: Problem | None = None
    failed: list[Any] = []
    num_ranks = 1
    for group, report in reports:
        everyone = _gathered(failed or [(problem, report)], [group])
        num_ranks *= _reached([group])
        failed = [each for each in everyone if isinstance(each, _Outcome)]
        if not failed:
            found.append([each for _, each in everyone])
            problem = first_problem([told for told, _ in everyone]) or judge(found[-1])
    try:
        _raise_failures(failed, error, None, num_ranks)
        if problem is not None:
            _raise(problem[0](problem[1]), error, num_ranks)
    finally:
        del error
    return found


def first_problem(problems: Sequence[Problem | None]) -> Problem | None:
    """Return the first problem that a rank reports."""
    return next((problem for problem in problems if problem is not None), None)


def raise_together(
    error: BaseException | None,
    doing: str,
    groups: Groups = (),
    facts: Mapping[str, str] | None = None,
    raises: type[MegatronFSDPError] | None = None,
) -> None:
    """Raise the error of any rank on all of them; one small collective for each group.

    Args:
        error: This rank's error, if any.
        doing: The action, for the message: "writing runs/a/iter_0000010".
        groups: Those of this rank along the dimensions of a mesh, which together reach all ranks concerned;
            None is a group of this rank alone. Without any: all ranks, or this process alone where torch.distributed
            is not initialised.
        facts: Values that have to be the same on every rank of the first group, by name, in one order.
            Compared before errors are looked at, unless a rank of the group gave None; only a digest is sent unless
            they differ.
        raises: The type of the error, unless all ranks met this library's errors, or facts differ.

    Raises:
        ConfigurationError: Facts differ; or, without `raises`, all errors that were met are such. Says which rank has
            what, the same on every rank.
        RankError: Ranks have met errors of other types, without `raises`; the same.
        BaseException: `error` itself, if every rank has met the same, and it is of this library or there is no
            `raises`; or if it is no Exception, such as KeyboardInterrupt, on the ranks that have met it.
    """
    first, *others = groups or [dist.group.WORLD]
    rank, digest = rank_of(), None if facts is None else _digest(facts)
    words = None if error is None else text_of(error)
    outcome = _Outcome(rank, doing, words, isinstance(error, ConfigurationError), raises, digest)
    try:
        with waits_for(f"ranks were to say how {doing} went"):
            reports = _gathered([outcome], [first])
    except RuntimeError as lost:
        raise lost from error
    digests = {getattr(each, "digest", None) for each in reports}
    if len(digests) > 1 and None not in digests:  # the same decision on every rank of the group
        told = differences(dict(_gathered([(rank, dict(facts or {}))], [first])))
        reports.append(_Outcome(rank, doing, told, differs=True))
    everyone = _gathered(reports, others)
    try:
        _raise_failures(everyone, error, raises)
    finally:
        del error


def _raise_failures(
    everyone: Sequence[Any],
    error: BaseException | None,
    raises: type[MegatronFSDPError] | None,
    num_ranks: int | None = None,
) -> None:
    """Raise the failures among the reports, if any; the same error on all ranks with these reports."""
    outcomes = [each for each in everyone if isinstance(each, _Outcome) and each.words is not None]
    if not outcomes:
        return
    different = next((each.words for each in outcomes if each.differs), None)
    if num_ranks is None:
        num_ranks = sum(not (isinstance(each, _Outcome) and each.differs) for each in everyone)
    if different is not None:
        _raise(ConfigurationError(different), error, num_ranks)
    failed = sorted(outcomes, key=lambda each: each.rank)
    is_of_all = len(failed) == num_ranks and len({each.words for each in failed}) == 1
    if error is not None and is_of_all and (raises is None or isinstance(error, MegatronFSDPError)):
        try:
            raise _agreed(error, num_ranks)
        finally:
            del error
    kind = failed[0].kind or (ConfigurationError if all(each.is_usage for each in failed) else RankError)
    words = "; ".join(f"rank {each.rank}: {each.words}" if num_ranks > 1 else str(each.words) for each in failed)
    _raise(kind(f"{failed[0].doing} failed ({shortened(words)})"), error, num_ranks)


def _raise(made: Exception, error: BaseException | None, num_ranks: int) -> NoReturn:
    """Raise the common error, or this rank's own if that ends the process (`SystemExit`, Ctrl-C)."""
    try:
        if error is not None and not isinstance(error, Exception):
            raise _agreed(error, num_ranks)
        raise _agreed(made, num_ranks) from error
    finally:
        del made, error  # else an error and this frame of its traceback would keep each other alive


def _agreed(error: Raised, num_ranks: int) -> Raised:
    """Mark an error as known to a number of ranks."""
    with suppress(AttributeError):  # frozen ones are told twice
        error.__agreed__ = next(_clock), num_ranks  # type: ignore[attr-defined]
    return error


@contextmanager
def all_agree(
    doing: str,
    groups: Groups = (),
    raises: type[MegatronFSDPError] | None = None,
    facts: Mapping[str, str] | None = None,
) -> Iterator[dict[str, str]]:
    """Run a block on every rank, then raise its error, or a difference of facts, on all ranks.

    Inside, further agreements over the same groups are allowed, but until the last of them no other collective: a rank
    that leaves early with an error reports it in the next agreement. An error that these ranks have all raised passes.

    `facts` have to be the same on every rank, also if the block fails; without them, those that the block adds to the
    dictionary it is given, unless it fails. `groups` and `raises` are as for `raise_together`.
    """
    began, error, added = next(_clock), None, dict[str, str]()
    try:
        yield added
    except GeneratorExit:  # who stops early has not failed
        raise
    except BaseException as met:
        since, num_ranks = getattr(met, "__agreed__", (-1, 0))
        if since > began and num_ranks >= _reached(groups):
            raise
        error = met
    try:
        raise_together(error, doing, groups, added if facts is None and error is None else facts, raises)
    finally:
        del error


def together(
    doing: str,
    act: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
    raises: type[MegatronFSDPError] | None = None,
) -> Result:
    """Run a function on every rank under `all_agree`; return only if it succeeded on all of them."""
    with all_agree(doing, over(group), raises, facts):
        return act()


def agreed(
    doing: str, groups_of: Callable[..., Groups], raises: type[MegatronFSDPError] | None = None
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Run a function under `all_agree` (a decorator): an error on one rank is raised on all.

    `groups_of` finds the groups from the arguments, of which it must expect anything.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                groups = groups_of(*args, **kwargs)
            except TypeError:  # arguments that no signature takes: the function names them
                groups = ()
            with all_agree(doing, groups, raises):
                return function(*args, **kwargs)

        return call

    return decorate


def over(group: object) -> Groups:
    """Return the groups of an argument `group`: itself, or all ranks if it is None or no group."""
    return (group,) if isinstance(group, dist.ProcessGroup) else ()


def default_if_all(groups: Groups) -> tuple[dist.ProcessGroup, ...]:
    """Return the default group where groups together reach all ranks, or there are none; else these groups.

    So a rank whose arguments name no group meets the others where these are all ranks.
    """
    if dist.is_initialized() and _reached(groups) == dist.get_world_size():
        return (dist.group.WORLD,)  # type: ignore[return-value]
    return tuple(group for group in groups if group is not None)


def device_over(groups: Groups) -> torch.device:
    """Return the device of small tensors that groups communicate."""
    takes_cpu = all(dist.get_backend(group) == dist.Backend.GLOO for group in groups)
    return torch.device("cpu") if takes_cpu else default_device()


def group_of(*_: object, group: object = None, **__: object) -> Groups:
    """Return the groups of the ranks that call a function with the keyword `group`."""
    return over(group)


def _reached(groups: Groups) -> int:
    found = groups or [dist.group.WORLD]
    return math.prod(dist.get_world_size(group) for group in found if group is not None and _is_up(group))


def by_value(values: Iterable[tuple[int, str]]) -> str:
    """List each value once with its ranks, from pairs: "True on rank 0, False on ranks 1, 2"."""
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


def differences(everyone: Mapping[int, Mapping[str, str]]) -> str:
    """Return a message about the facts that differ between ranks, or an empty one."""
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    values = {name: {rank: facts.get(name, "nothing") for rank, facts in everyone.items()} for name in names}
    differing = [name for name in values if len(set(values[name].values())) > 1]
    # Of "config" and "config.size" keep the first: other classes may not have the second at all.
    first = [name for name in differing if name.rpartition(".")[0] not in differing]
    shown = [shortened(f"{name} is {by_value(values[name].items())}") for name in first[:_SHOWN_DIFFERENCES]]
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
    problem: Problem | None = None
    cause: BaseException | None = None
    if rank_of(group) == 0:
        try:
            answer = decide()
        except BaseException as error:  # noqa: BLE001  sent to the others, then raised
            known = (raises, ConfigurationError)
            kind = next((kind for kind in known if isinstance(error, kind)), raises)
            told = words_of(error) if isinstance(error, known) else f"{doing} failed ({text_of(error)})"
            problem, cause = (kind, told), error
    try:
        ask([(group or dist.group.WORLD, problem)], first_problem, cause)
    finally:
        del cause
    if world_size_of(group) > 1:
        sent = [answer]
        dist.broadcast_object_list(sent, group=group, group_src=0)
        answer = sent[0]
    return answer


# ---- facts that travel along ---------------------------------------------------------------------------------------


_MARKS = 12
_BITS = 4  # small, so that sums of squares over 74,000 ranks are exact in float32


@dataclass(frozen=True)
class Companion:
    """Facts that have to be the same on all ranks, compared in an all-reduce that is made anyway.

    A few small numbers d of a digest travel along: in a sum each with its square, since N ranks have the same exactly
    where N * sum(d^2) = sum(d)^2, and in a maximum each with -d. So an agreement costs no message, and no wait.
    """

    doing: str
    facts: Mapping[str, str]
    groups: tuple[dist.ProcessGroup, ...]  # over which the numbers travel
    error: Exception | None = None  # what this rank has met before, so that it asks for nothing

    def marks(self, like: torch.Tensor, is_max: bool = False) -> torch.Tensor:
        """Return the hashes of the facts as numbers to reduce, on the device and in the dtype of a tensor."""
        told = self.facts if self.error is None else {"error": text_of(self.error)}
        number = int.from_bytes(_digest(told), "little") & (1 << _MARKS * _BITS) - 1
        shifts = torch.arange(0, _MARKS * _BITS, _BITS, device=like.device)  # there, as a graph may be captured
        marks = torch.full_like(shifts, number) >> shifts & (1 << _BITS) - 1
        return torch.cat([marks, -marks if is_max else marks * marks]).to(like.dtype)

    def check(self, reduced: torch.Tensor, is_max: bool = False) -> torch.Tensor:
        """Raise on all ranks if the reduced numbers show a failure or a difference.

        Returns:
            1, or NaN where facts differ and the host cannot know without a wait for the device.
        """
        if any(map(is_simulated, self.groups)):
            return torch.ones_like(reduced[0])
        num_ranks = math.prod(map(dist.get_world_size, self.groups))
        first, second = reduced.double().chunk(2)
        are_same = (first == -second if is_max else first * first == num_ranks * second).all()
        is_odd = self.error is not None or (reduced.is_cpu and has_values(reduced) and not are_same.item())
        if is_odd and reduced.is_cpu and num_ranks > 1:
            raise_together(self.error, self.doing, self.groups)
            told = differences(dict(gather_over(self.groups, (rank_of(), self.facts))))
            raise _agreed(ConfigurationError(told), num_ranks)
        if self.error is not None:
            raise self.error
        return torch.ones_like(first[0]).masked_fill(~are_same, math.nan)
