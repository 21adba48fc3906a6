"""The exceptions of this library, each also a standard type; warnings, and bounded texts of errors."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import threading
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")

_NOT_THE_USER = (__name__.partition(".")[0], "torch", "dataclasses", "contextlib", "functools")
"""Top-level modules whose frames are skipped: ours, and those through which users call us (`with`, decorators)."""


@dataclass(frozen=True)
class Remedies:
    """The remedies that messages of the engine name: calls of the interface by which a model was sharded."""

    reset: str = "reset() on the model"  # to call after an exception
    join: str = (  # of ranks that sent different things
        "every rank has to call the same units in the same order, and one that has nothing to compute with a unit "
        "calls model.join(unit, hidden) instead, or give fully_shard ranks_may_skip_units=True"
    )
    sync: str = (  # of gradients that nothing has reduced
        "(no_sync, or sync_model_each_microbatch=False), so nothing was updated; connect it with "
        "fully_shard_optimizer or DistributedOptimizer, or call finish_grad_sync first"
    )


WRAPPER_REMEDIES = Remedies()


def warn_caller(message: str, category: type[Warning] = UserWarning, *, is_first: bool | None = None) -> None:
    """Warn at the user's line, on the first rank only.

    Args:
        message: What was adjusted or ignored, and what to write instead.
        category: Category of the warning.
        is_first: True on the first of the ranks concerned; None: the first of all ranks, if there are any yet.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        is_first = distributed.get_rank() == 0 if is_first is None else is_first
        if not is_first and not str(distributed.get_backend()).startswith(("fake", "simulated_")):  # alone as well
            return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def has_control_characters(text: str) -> bool:
    """Return True if a text has control characters, which steer terminals."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def shortened(text: str, most: int = 2000) -> str:
    """Shorten a long text to its beginning and end."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]} [...] {text[-most * 3 // 20 :]}"


def text_of(error: BaseException) -> str:
    """Return an error's type and text, of a bounded length, whatever its `__str__` does."""
    text = words_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def words_of(error: BaseException) -> str:
    """Return an error's text, of a bounded length, whatever its `__str__` does."""
    try:
        return shortened(str(error))
    except Exception as met:  # noqa: BLE001 - also what has no text has to be told
        return f"its text cannot be had ({type(met).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return words_of(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def waits_for(what: str) -> Iterator[None]:
    """Add the operation that this rank was waiting for to errors of communication, such as timeouts."""
    try:
        yield
    except RuntimeError as lost:
        if not isinstance(lost, MegatronFSDPError):
            missing = missing_ranks(lost, f"while {what}")
            lost.add_note(
                f"while {what}, which every rank has to call; {missing}one has not come: it may have raised an error "
                "of its own (see what it printed), or does something else (MFSDP_HANG_LOG=DIR names it)"
            )
        raise


@contextmanager
def explains_restarts() -> Iterator[None]:
    """Add the cure to errors of ranks that torchrun has started again and that do not find each other."""
    try:
        yield
    except RuntimeError as lost:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and _OWN_STORE not in os.environ:
            lost.add_note(
                f"torchrun has started these ranks again, and they may have found addresses of those that have died; "
                f"set {_OWN_STORE}=1 for torchrun, so that each start has a store of its own"
            )
        raise


_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_PATIENCE_S = 2.0  # between the first and the last rank that waits for another one
_MOST_ASKED = 64  # each asks for all others, of one store


def missing_ranks(error: BaseException, where: str) -> str:
    """Return a sentence about the ranks that fail in a collective about now, and those that do not.

    They meet in the store by which they found each other, once for an error, and tell each other `where` they are.
    Empty for too many ranks, or without a store.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    ranks = range(distributed.get_world_size() if distributed is not None and distributed.is_initialized() else 1)
    if not 1 < len(ranks) <= _MOST_ASKED or hasattr(error, "__met__"):
        return ""
    error.__met__ = True  # type: ignore[attr-defined]
    me, found, until = distributed.get_rank(), dict[int, str](), time.time() + _PATIENCE_S

    def meet() -> None:
        keys = [f"megatron_fsdp/fails/{rank}" for rank in ranks]
        with suppress(Exception):  # a store that has ended
            store = distributed.distributed_c10d._get_default_store()
            store.set(keys[me], f"{time.time()} {where}")
            while len(found) < len(ranks) and time.time() < until:
                time.sleep(_PATIENCE_S / 20)
                for rank in ranks:
                    if rank not in found and store.check([keys[rank]]):
                        at, _, place = store.get(keys[rank]).decode().partition(" ")
                        if abs(time.time() - float(at)) < 10 * _PATIENCE_S:  # else of an error before
                            found[rank] = place

    asking = threading.Thread(target=meet, daemon=True)  # the process that holds the store may be stopped
    asking.start()
    asking.join(2 * _PATIENCE_S)
    places = ", ".join(f"rank {rank} {place}" for rank, place in sorted([*found.items()])[:8])
    gone = ", ".join(str(rank) for rank in ranks if rank not in found)
    if me not in found:
        return ""
    return f"missing: rank {gone}; waiting: {places}; " if gone else f"all ranks met such an error ({places}); "


def check_keys(names: Iterable[str]) -> None:
    """Raise for names that could not be keys of a checkpoint."""
    for name in filter(has_control_characters, names):
        raise ConfigurationError(f"{name!a} holds control characters, which no key of a checkpoint may; rename it")


class MegatronFSDPError(Exception):
    """Base class of this library's errors."""


class ConfigurationError(MegatronFSDPError, ValueError):
    """An argument, or a combination of arguments, cannot be honoured."""


class MissingPackageError(ConfigurationError, ImportError):
    """A feature needs a package, or a later version of it; names the extra to install."""


class CollectiveArgumentError(ConfigurationError, AssertionError):
    """The tensors of a public collective do not fit together; also an AssertionError, as in the published package."""


class ParallelSizeError(ConfigurationError, AssertionError):
    """A parallel size does not fit the strategy, the world or the model; also of the types that clients expect."""


class NotSupportedYetError(MegatronFSDPError, NotImplementedError):
    """An argument is part of the API but this version does not implement it; leave it at its default."""


class ScheduleError(MegatronFSDPError, RuntimeError):
    """The order of forward, backward and step calls cannot be continued (a bug, or a use that cannot work)."""


class CallOrderError(ScheduleError, AssertionError):
    """A call of Megatron's training loop came at a time that forbids it; also of the type that Megatron raises."""


class ShardOperationError(MegatronFSDPError, RuntimeError):
    """An operation needs elements that other ranks hold, or mixes tensors that are cut differently."""


class RankError(MegatronFSDPError, RuntimeError):
    """One or more ranks failed; raised with the same message on every rank."""


class NonFiniteGradientError(MegatronFSDPError, ValueError):
    """A gradient holds NaN or infinity; raised with the same message on every rank."""


class NonFiniteWeightError(MegatronFSDPError, ValueError):
    """A weight is NaN or infinite, which its weight format cannot hold."""


class LargeGradientError(MegatronFSDPError, ValueError):
    """A gradient is far larger than any before of its parameter; raised with the same message on every rank."""


class NonFiniteNormError(NonFiniteGradientError, RuntimeError):
    """The norm of all gradients is NaN or infinite; also a RuntimeError, as torch's own clipping raises."""


class LifetimeError(MegatronFSDPError, RuntimeError):
    """Memory was used in a state that forbids it; names unit, memory and state. Raised by a debug switch."""


class CheckpointError(MegatronFSDPError, RuntimeError):
    """A checkpoint cannot be written, read or trusted; names the file or tensor and the fault.

    Files may hold names and numbers of any length: of a long message the beginning and the end are kept.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class TraceError(MegatronFSDPError, ValueError):
    """A trace cannot be recorded, written or read; names the file and the fault."""


# ---- arguments that are misspelt or missing --------------------------------------------------------------------------


def nearest_name(given: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return a suggestion for a name that does not exist, to end a message with."""
    names = list(known)
    nearest = difflib.get_close_matches(str(given), names, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else otherwise or f"the fields are {', '.join(names)}."


def explains_arguments(
    **cures: str,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Make a function's errors suggest a name for an unknown keyword, and the cure for a missing argument.

    Its signature stays readable by `inspect`. The errors are TypeErrors, as Python's own.

    Args:
        cures: What a caller who leaves out a required argument may want, by name of the argument.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for given in kwargs:
                if given not in signature.parameters:
                    hint = nearest_name(given, signature.parameters, f"see help({name}).")
                    raise TypeError(f"{name}() has no argument {given!r}; {hint}")
            bound = signature.bind_partial(*args, **kwargs).arguments
            for missing, cure in cures.items():
                if missing not in bound:
                    raise TypeError(f"{name}() was called without {missing!r}; {cure}")
            return function(*args, **kwargs)

        return call

    return decorate


def explains_fields(cls: type[_Class]) -> type[_Class]:
    """Apply `explains_arguments` to a dataclass."""
    cls.__init__ = explains_arguments()(cls.__init__)  # type: ignore[method-assign]
    return cls
