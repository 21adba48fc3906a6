"""The exceptions of this library: one small family, each also a standard type; warnings, and what may be printed."""

from __future__ import annotations

import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NOT_THE_USER = (__name__.partition(".")[0], "torch", "dataclasses", "contextlib", "functools")
"""Top-level modules whose frames are skipped: ours, and those that call us for the user (`with`, decorators)."""


def warn_caller(message: str, category: type[Warning] = UserWarning, *, is_first: bool | None = None) -> None:
    """Warn at the line of the user that has led here, on the first of the ranks, which all would say the same.

    Args:
        message: What was adjusted or ignored, and what to write instead.
        category: Category of the warning.
        is_first: Whether this rank is the first of those; None: of all ranks, as far as there are any yet.
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
    """Return whether a text cannot be printed or written as it is: control characters steer terminals."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def shortened(text: str, most: int = 2000) -> str:
    """Return the beginning and the end of a text that is longer than so many characters; others as they are."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]} [...] {text[-most * 3 // 20 :]}"


def text_of(error: BaseException) -> str:
    """Return type and text of an error, of a bounded length, whatever its `__str__` does."""
    try:
        text = shortened(str(error))
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    except Exception as met:  # noqa: BLE001 - also what has no text has to be told
        return f"{type(error).__name__}, whose text cannot be had ({type(met).__name__})"


@contextmanager
def waits_for(what: str) -> Iterator[None]:
    """Add to an error of a collective in a block, such as that of a time limit, what this rank was waiting for."""
    try:
        yield
    except RuntimeError as lost:
        if not isinstance(lost, MegatronFSDPError):
            lost.add_note(
                f"while {what}, which every rank has to call; one has not come: it may have raised an error of its own "
                "(see what it printed), or does something else (MFSDP_HANG_LOG=DIR names it)"
            )
        raise


class MegatronFSDPError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigurationError(MegatronFSDPError, ValueError):
    """An argument, or a combination of arguments, cannot be honoured."""


class MissingPackageError(ConfigurationError, ImportError):
    """A feature needs a package that is not installed, or a later version of it; names the extra that brings it."""


class CollectiveArgumentError(ConfigurationError, AssertionError):
    """Tensors of a public collective do not fit together; an AssertionError too, as the published function raises."""


class ParallelSizeError(ConfigurationError, AssertionError):
    """A parallel size does not fit the strategy, the world or the model; also both types that clients may expect."""


class NotSupportedYetError(MegatronFSDPError, NotImplementedError):
    """An argument is part of the API but this version does not implement it; leave it at its default."""


class ScheduleError(MegatronFSDPError, RuntimeError):
    """The order of forward, backward and step calls cannot be continued (a bug, or a use that cannot work)."""


class ShardOperationError(MegatronFSDPError, RuntimeError):
    """An operation needs elements that other ranks hold, or mixes tensors that are cut differently."""


class RankError(MegatronFSDPError, RuntimeError):
    """One or more ranks met a problem; raised with the same message on every rank."""


class NonFiniteGradientError(MegatronFSDPError, ValueError):
    """A gradient holds NaN or infinity; raised with the same message on every rank."""


class NonFiniteWeightError(MegatronFSDPError, ValueError):
    """A weight is NaN or infinite where its weight format cannot hold that."""


class LargeGradientError(MegatronFSDPError, ValueError):
    """A gradient is far larger than any before of its parameter; raised with the same message on every rank."""


class NonFiniteNormError(NonFiniteGradientError, RuntimeError):
    """The norm of all gradients is NaN or infinite; a RuntimeError too, as torch's own clipping raises."""


class LifetimeError(MegatronFSDPError, RuntimeError):
    """Memory was used in a state in which it must not be; names unit, memory and state. Raised by a debug switch."""


class CheckpointError(MegatronFSDPError, RuntimeError):
    """A checkpoint cannot be written, read or trusted; names the file or tensor and what is wrong with it.

    Files may hold names and numbers of any length: of a long message the beginning and the end are kept.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class TraceError(MegatronFSDPError, ValueError):
    """A trace cannot be recorded, written or read; names the file and what is wrong with it."""
