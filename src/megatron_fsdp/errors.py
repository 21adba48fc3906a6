"""The exceptions of this library: one small family, each also a standard type; warnings, and what may be printed."""

from __future__ import annotations

import sys
import unicodedata
import warnings

_NOT_THE_USER = (__name__.partition(".")[0], "dataclasses", "contextlib")
"""Top-level modules whose frames are skipped: ours, and those that call us for the user (`with`, `replace`)."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the first caller outside of this package.

    Args:
        message: What was adjusted or ignored, and what to write instead.
        category: Category of the warning.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def has_control_characters(text: str) -> bool:
    """Return whether a text cannot be printed or written as it is: control characters steer terminals."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


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
        super().__init__(message if len(message) <= 2000 else f"{message[:1500]} [...] {message[-300:]}")


class TraceError(MegatronFSDPError, ValueError):
    """A trace cannot be recorded, written or read; names the file and what is wrong with it."""
