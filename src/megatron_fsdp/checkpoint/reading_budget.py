"""What reading a file may cost: memory and time in proportion to its size, whatever the file says.

Files of others can be small and stand for much: a pickle that copies one list a thousand times, lists that hold each
other, keys whose hashes are equal. Readers count what they make beyond the bytes themselves.
"""

from __future__ import annotations

import collections
import enum
import pathlib
import pickle
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

SPARE_BYTES = 8 << 20
BYTES_PER_BYTE = 64
"""A file of n bytes may make SPARE_BYTES + n * BYTES_PER_BYTE bytes besides the objects that it names one by one."""
ELEMENT_BYTES = 32
"""What an element of a list or dict counts."""

SPARE_SECONDS = 5.0
SECONDS_PER_BYTE = 10e-6
"""The same for the time of the processor; honest files take up to 0.6 us for a byte."""

MAX_DEPTH = 100
"""How deep the names in a key of a checkpoint may nest."""
MAX_DIMS = 64
"""What torch allows a tensor."""

_BETWEEN_LOOKS = 1 << 16  # what is spent between two looks at the clock
_SHORT = 64  # characters that count as no more than an element
_MAX_KEY_ITEMS, _MAX_KEY_DEPTH, _MAX_KEY_NUMBER = 64, 2, 1 << 64
_PLAIN_KEYS = frozenset({float, bool, type(None), torch.dtype, torch.device})
_TEXTS = (str, bytes, bytearray)
_CONTAINERS = (list, tuple, set, frozenset, dict, torch.Size, collections.OrderedDict, collections.Counter)
_ELEMENT_COSTS: dict[type, int] = {**dict.fromkeys(_TEXTS, 1), **dict.fromkeys(_CONTAINERS, ELEMENT_BYTES)}


class OverBudgetError(Exception):
    """A file asks for more memory or time than files of its size need."""


class ReadingBudget:
    """Counts what reading some bytes makes, and its time."""

    def __init__(self, nbytes: int) -> None:
        self._left = SPARE_BYTES + BYTES_PER_BYTE * nbytes
        self._until_look = _BETWEEN_LOOKS
        self._seconds = SPARE_SECONDS + SECONDS_PER_BYTE * nbytes
        self._begun: float | None = None  # at the first look, which small files do not come to

    def spend(self, nbytes: int) -> None:
        """Count something that is about to be made, copied, hashed or written out."""
        self._left -= nbytes
        if self._left < 0:
            raise OverBudgetError(
                "reading it would take far more memory than its size calls for, as where parts are copied, or contain "
                "each other, again and again; no checkpoint needs that"
            )
        self._until_look -= nbytes
        if self._until_look < 0:
            self._until_look = _BETWEEN_LOOKS
            now = time.thread_time()
            self._begun = now if self._begun is None else self._begun
            if now - self._begun > self._seconds:
                raise OverBudgetError("reading it takes far longer than its size calls for; no checkpoint needs that")

    def spend_on(self, given: Collection[Any]) -> None:
        """Count what is handed to a function that may copy it: elements of containers, characters of text."""
        cost = ELEMENT_BYTES * len(given)
        for part in given:
            each = _ELEMENT_COSTS.get(type(part))
            if each is not None:
                cost += each * len(part)
        self.spend(cost)

    def spend_on_keys(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Yield keys one by one, each counted before it is hashed and compared with others of its hash."""
        for key in keys:
            if type(key) is not str or len(key) > _SHORT:  # nobody can choose texts of one hash
                self.spend(key_cost(key))
            yield key


def key_cost(key: Any, depth: int = 0) -> int:
    """Return what hashing and comparing something counts, which may be asked for again and again.

    Tuples of tuples that name each other take time exponential in the length of their pickle to hash, deep ones end the
    process, and of large numbers and complex ones endless many have one hash.
    """
    kind = type(key)
    if kind is int and -_MAX_KEY_NUMBER < key < _MAX_KEY_NUMBER:
        return ELEMENT_BYTES
    if kind is str or kind is bytes:
        return ELEMENT_BYTES + len(key)
    if kind is MetadataIndex:
        return key_cost((key.fqn, key.offset), depth)
    if isinstance(key, pathlib.PurePath):
        return ELEMENT_BYTES + len(str(key))
    if (kind is tuple or kind is torch.Size) and depth < _MAX_KEY_DEPTH and len(key) <= _MAX_KEY_ITEMS:
        return ELEMENT_BYTES + sum(key_cost(item, depth + 1) for item in key)
    if kind in _PLAIN_KEYS or isinstance(key, enum.Enum):
        return ELEMENT_BYTES
    raise pickle.UnpicklingError(f"a key of type {kind.__name__}, or one that is too large or nests too deep")


def text_cost(value: Any) -> int:
    """Return what a text counts where it is met again; 0 for short ones and for what is no text."""
    return len(value) if type(value) in _TEXTS and len(value) > _SHORT else 0
