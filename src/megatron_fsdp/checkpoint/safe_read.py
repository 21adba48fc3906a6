"""Read untrusted pickles: as data, without running code from them.

A pickle names classes and functions that the reader imports and calls; the author of the file chooses them. Here every
name is looked up in a table instead, and a name outside it is refused before anything is called.
`torch.load(weights_only=True)` would refuse contents of objects and of the `.metadata` of torch.distributed.checkpoint
(NumPy's arrays, `argparse.Namespace`, classes of Megatron that are not installed), and it lets a file of a kilobyte ask
for any memory (`bytearray(10**11)`): here the cost of reading, in memory and time, is counted, and bounded in
proportion to the size of the file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import pathlib
import pickle
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata

from megatron_fsdp.errors import CheckpointError, words_of

OTHER_PACKAGES = frozenset({"megatron", "transformer_engine", "apex", "modelopt", "nvidia_resiliency_ext", "nemo"})
"""Packages whose classes a checkpoint may name: they are never imported, and their objects are kept as `Opaque`."""

_PLANNING = "torch.distributed.checkpoint."
"""The modules of plans' classes, which some writers store and no reader needs: kept as `Opaque` unless in the table."""

MAX_OBJECT_BYTES = 4 << 30
_MAX_JSON_BYTES = 1 << 30


# ---- files -----------------------------------------------------------------------------------------------------------


def open_file(path: Path, at_most: int = 1 << 62) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading; raise if it has more than `at_most` bytes."""
    file = open(path, "rb", opener=only_regular)  # noqa: SIM115 - Path.open takes no opener
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes > at_most:
        file.close()
        raise OSError(errno.EFBIG, f"it has {nbytes} bytes, and {at_most} is the most that is read", str(path))
    return file


def only_regular(path: str, flags: int) -> int:
    """Open no pipe or socket, which would block, and no device, which may never end; an `opener` of `open`."""
    if stat.S_ISREG(Path(path).stat().st_mode):
        descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # it may be another one by now
            return descriptor
        os.close(descriptor)
    raise OSError(errno.EINVAL, "it is a folder, pipe, socket or device where a file should be", path)


def read_file(path: Path, at_most: int = MAX_OBJECT_BYTES) -> bytes:
    """Return the contents of a regular file."""
    with open_file(path, at_most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def resolve_inside(path: Path, folder: Path) -> Path:
    """Follow the links of an entry of an untrusted folder; raise if it leads out of the folder.

    If the folder is a snapshot in a cache of the hub, its files are links to `blobs` beside the snapshots.
    """
    home, real = folder.resolve(), path.resolve(strict=True)
    places = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(place) for place in places):
        raise CheckpointError(f"{path} is a link that leads out of its folder, to {real}; put the file itself there")
    return real


def read_json(path: Path, at_most: int = _MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(read_file(path, at_most).decode("utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as JSON ({shortened(str(reason))}); it is damaged, restore it from a copy"
        ) from error


def shortened(text: str, most: int = 256) -> str:
    """Return text from a file, cut to the length of a message."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def printable(text: str, most: int = 256) -> str:
    """Return text from a file for a message: short, with control characters escaped."""
    return shortened(text if text.isprintable() else ascii(text), most)


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn any parsing error into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(
            f"there is not enough memory to read {where}; free some, or use another machine"
        ) from error
    except Exception as error:  # damaged bytes raise anything
        reason = printable(words_of(error).partition("\n")[0]) or "no words for it"
        raise CheckpointError(
            f"{where} is damaged and cannot be read ({type(error).__name__}: {reason}); restore it from a copy, or use "
            "an older checkpoint"
        ) from error


# ---- the cost of reading ---------------------------------------------------------------------------------------------

# Files of others can be small and stand for much: a pickle that copies one list a thousand times, lists that hold each
# other, keys whose hashes are equal. Readers count their results beyond the bytes themselves.

SPARE_BYTES = 8 << 20
BYTES_PER_BYTE = 64
"""A file of n bytes may make SPARE_BYTES + n * BYTES_PER_BYTE bytes besides the objects that it names one by one."""
ELEMENT_BYTES = 32
"""The cost of an element of a list or dict."""

SPARE_SECONDS = 5.0
SECONDS_PER_BYTE = 10e-6
"""The same for the time of the processor; honest files take up to 0.6 us for a byte."""

MAX_DEPTH = 100
"""The depth to which names in a checkpoint's key, and parts of an object, may nest."""
TOO_MANY = 1 << 62
"""More elements than any tensor has."""

_MAX_DIMS = 64  # torch's limit
_BETWEEN_LOOKS = 1 << 16  # cost between two looks at the clock
_SHORT = 64  # characters that count as no more than an element
_MAX_KEY_ITEMS, _MAX_KEY_DEPTH, _MAX_KEY_NUMBER = 64, 2, 1 << 64
_PLAIN_KEYS = {float, bool, type(None), torch.dtype, torch.device}
_TEXTS = {str, bytes, bytearray}
_SEQUENCES = {list, tuple, set, frozenset, torch.Size}
_DICTS = (collections.OrderedDict, collections.Counter)
_PART_COSTS: dict[type, int] = {
    **dict.fromkeys(_TEXTS, 1),
    **dict.fromkeys((*_SEQUENCES, dict, *_DICTS), ELEMENT_BYTES),
}


class ReadingBudget:
    """Counts the memory and time of reading some bytes; the error beyond the limit begins with `where`."""

    def __init__(self, nbytes: int, where: str) -> None:
        self._where = where
        self._left = SPARE_BYTES + BYTES_PER_BYTE * nbytes
        self._until_look = _BETWEEN_LOOKS
        self._seconds = SPARE_SECONDS + SECONDS_PER_BYTE * nbytes
        self._begun: float | None = None  # at the first look, which small files do not come to

    def spend(self, nbytes: int) -> None:
        """Count elements that are about to be made, copied, hashed or written."""
        self._left -= nbytes
        if self._left < 0:
            raise CheckpointError(
                f"{self._where} is refused: reading it would take far more memory than its size calls for, as where "
                "parts are copied, or contain each other, again and again; no checkpoint needs that"
            )
        self._until_look -= nbytes
        if self._until_look < 0:
            self._until_look = _BETWEEN_LOOKS
            now = time.thread_time()
            self._begun = now if self._begun is None else self._begun
            if now - self._begun > self._seconds:
                raise CheckpointError(
                    f"{self._where} is refused: reading it takes far longer than its size calls for; no checkpoint "
                    "needs that"
                )

    def spend_on(self, given: Collection[Any]) -> None:
        """Count the argument of a function that may copy it: elements of containers, characters of text."""
        parts = sum(_PART_COSTS[type(part)] * len(part) for part in given if type(part) in _PART_COSTS)
        self.spend(ELEMENT_BYTES * len(given) + parts)

    def spend_on_keys(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Yield keys one by one, each counted before it is hashed and compared with others of its hash."""
        for key in keys:
            if type(key) is not str or len(key) > _SHORT:  # hashes of text are salted, so no file can choose equal ones
                self.spend(_key_cost(key))
            yield key


def _key_cost(key: Any, depth: int = 0) -> int:
    """Return the cost of hashing and comparing a key, which may be needed repeatedly.

    Tuples of tuples that name each other take time exponential in the length of their pickle to hash, deep ones end the
    process, and of large numbers and complex ones endless many have one hash.
    """
    if isinstance(key, metadata.MetadataIndex):
        key = (key.fqn, key.offset)
    elif isinstance(key, pathlib.PurePath):
        key = str(key)
    kind = type(key)
    if kind in (tuple, torch.Size) and depth < _MAX_KEY_DEPTH and len(key) <= _MAX_KEY_ITEMS:
        return ELEMENT_BYTES + sum(_key_cost(item, depth + 1) for item in key)
    if kind in (str, bytes):
        return ELEMENT_BYTES + len(key)
    if kind in _PLAIN_KEYS or (kind is int and abs(key) < _MAX_KEY_NUMBER):
        return ELEMENT_BYTES
    raise pickle.UnpicklingError(f"a key of type {kind.__name__}, or one that is too large or nests too deep")


# ---- pickles ---------------------------------------------------------------------------------------------------------


_AS_USUAL = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.GLOBAL),
    *(pickle.STACK_GLOBAL, pickle.BINPERSID, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT),
    *(pickle.MEMOIZE, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINBYTES),
    *(pickle.SHORT_BINBYTES, pickle.BINBYTES8, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.TUPLE3, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
)
"""Operations that picklers write for data since protocol 2, left to Python's machine; others are below or refused."""


class Opaque:
    """A placeholder for an object whose package is not imported: its name, arguments, state and elements."""

    qualified_name = "unknown"
    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        """Keep the arguments; nothing is called."""
        made = super().__new__(cls)
        made.arguments, made.state, made.items = (*args, *kwargs.items()), None, []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.qualified_name}, not read>"


class Operations(dict[int, Callable[[Any], None]]):
    """A table of pickle operations; those that data do not need are refused."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"operation {code:#04x} of pickles is not one that data need")


class RestrictedUnpickler(pickle._Unpickler):
    """An unpickler with a table of allowed names, which fills only objects of data, and counts the objects it makes.

    Python's own in C would also set attributes of classes, and reach back into the registrations of other pickles.
    Operations that can do more with a byte than make one small object (copy what was read before, hash keys) are
    counted by a `ReadingBudget`, and so is the result as a tree, with shared parts counted at each use: walking through
    it afterwards ends in bounded time.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self.stream, self.where = stream, where
        super().__init__(stream)
        nbytes = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        self._file_read = lambda most: stream.read(min(most, nbytes))  # a file reserves all that is asked for
        self._budget = ReadingBudget(nbytes, where)
        self._opaque: dict[tuple[str, str], type[Opaque]] = {}

    def load(self) -> Any:
        """Run the pickle."""
        made = super().load()
        level = [made]
        for _ in range(MAX_DEPTH):
            parts_of_all: list[Any] = []
            for here in level:
                parts = _parts(here)
                contents = here.nbytes if isinstance(here, np.ndarray | np.generic) else 0
                texts = sum(len(part) for part in parts if type(part) in _TEXTS)
                self._budget.spend(ELEMENT_BYTES * (1 + len(parts)) + contents + texts)
                parts_of_all += [part for part in parts if type(part) not in _ATOMS]
            if not parts_of_all:
                return made
            level = parts_of_all
        raise CheckpointError(
            f"{self.where} is refused: what it holds nests more than {MAX_DEPTH} deep, or contains itself; no "
            "checkpoint needs that"
        )

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the entry of the table."""
        name = (module_name, global_name)
        found = _NAMES.get(name) or self._opaque.get(name)
        is_of_others = module_name.startswith(_PLANNING) or module_name.partition(".")[0] in OTHER_PACKAGES
        if found is None and is_of_others:
            found = self._opaque[name] = type(global_name, (Opaque,), {"qualified_name": ".".join(name)})
        if found is None:
            raise CheckpointError(
                f"{self.where} asks to import {printable('.'.join(name))}, which no checkpoint needs; it was not "
                "imported, and the file is refused: do not use it unless you know who wrote it"
            )
        return found

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        _require(type(arguments) is tuple, "a call with something else than a tuple")
        _require(not dataclasses.is_dataclass(function), "a call of a class that picklers make without one")
        self._budget.spend_on(arguments)
        if isinstance(function, type) and function in _KEYED:
            self.stack[-1] = self._keyed(function, *arguments)
        else:
            self.stack[-1] = function(*arguments)

    def _keyed(self, kind: Callable[..., Any], items: Any = ()) -> Any:
        """Make a set or dict of a list's elements, keys or pairs."""
        _require(type(items) in (list, tuple), f"a {type(items).__name__} where a list should stand")
        if kind is not collections.OrderedDict:
            return kind(self._budget.spend_on_keys(items))
        keys = self._budget.spend_on_keys([key for key, _ in items])
        return kind(zip(keys, [value for _, value in items], strict=True))

    def _make(self, kind: Any, arguments: Any, keywords: Any) -> None:
        known = isinstance(kind, type) and (kind in _CLASSES_OF_DATA or issubclass(kind, Opaque))
        _require(known, "an object of something else than a class of data")
        _require(type(arguments) is tuple and type(keywords) is dict, "an object made of something else than a tuple")
        self._budget.spend_on((*arguments, *keywords))
        self.append(kind.__new__(kind, *arguments, **keywords))

    def _build(self) -> None:
        """Set the state of an object; never of a class, a function or a shared object."""
        state, made = self.stack.pop(), self.stack[-1]
        kind = type(made)
        self._budget.spend_on(state if type(state) is tuple else (state,))
        if kind is metadata.TensorProperties or isinstance(made, Opaque):
            made.__setstate__(state)
        elif isinstance(made, np.ndarray):
            _fill_array(made, state)
        elif isinstance(made, np.dtype):
            _fill_dtype(made, state)
        elif kind in _FILLED_BY_DICT and type(state) is dict:
            made.__dict__.update(state)
        else:
            raise pickle.UnpicklingError(f"attributes to set on {kind.__name__}, which takes none")

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        _require(type(target) is list or isinstance(target, Opaque), f"elements for a {type(target).__name__}")
        (target if type(target) is list else target.items).extend(items)

    def _update(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.items.extend(zip(flat[::2], flat[1::2], strict=True))
            return
        _require(type(target) in (dict, *_DICTS), f"items for a {type(target).__name__}")
        for key, value in zip(self._budget.spend_on_keys(flat[::2]), flat[1::2], strict=True):
            target[key] = value

    def _add_items(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        _require(type(target) is set, f"elements for a {type(target).__name__}")
        target.update(self._budget.spend_on_keys(items))

    _ACTIONS: ClassVar[dict[bytes, Callable[[Any], Any]]] = {
        pickle.FRAME: lambda self: self.read(8),  # frames need no care: their contents are read as all else
        pickle.LONG4: lambda _: _require(False, "a whole number of more than 255 bytes, which no checkpoint needs"),
        pickle.REDUCE: lambda self: self._call(),  # which others override
        pickle.NEWOBJ: lambda self: self._make(self.stack.pop(-2), self.stack.pop(), {}),
        pickle.NEWOBJ_EX: lambda self: self._make(self.stack.pop(-3), self.stack.pop(-2), self.stack.pop()),
        pickle.BUILD: _build,
        pickle.APPEND: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM: lambda self: self._update([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS: lambda self: self._update(self.pop_mark()),
        pickle.ADDITEMS: _add_items,
        pickle.FROZENSET: lambda self: self.append(frozenset(self._budget.spend_on_keys(self.pop_mark()))),
    }
    dispatch: ClassVar[dict[int, Any]] = Operations(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _AS_USUAL}
        | {code[0]: action for code, action in _ACTIONS.items()}
    )


def _parts(value: Any) -> Collection[Any]:
    """Return the parts of an object, as far as a reader looks into it."""
    kind = type(value)
    if kind in _SEQUENCES:
        return cast(Collection[Any], value)
    if kind is slice:
        return value.start, value.stop, value.step
    parts = list(vars(value).values()) if kind in _CLASSES_OF_DATA or isinstance(value, Opaque) else []
    return [*parts, *value, *value.values()] if isinstance(value, dict) else parts


_DATACLASSES: tuple[Any, ...] = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    filesystem._StorageInfo,
)
_KEYED = {set, frozenset, collections.OrderedDict}
_ATOMS = {int, float, complex, bool, type(None), torch.dtype, torch.device, torch.layout, *_TEXTS}
_ATOMS |= {torch.Tensor, torch.nn.Parameter}
_FILLED_BY_DICT = {*_DATACLASSES, argparse.Namespace, *_DICTS}
_CLASSES_OF_DATA = {metadata.TensorProperties, *_FILLED_BY_DICT}


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(what)


def _rebuilt(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function of torch that makes a tensor of a storage, for safe arguments only."""

    def made(storage: Any, start: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
        _require(isinstance(storage, torch.storage.TypedStorage), "a tensor of no storage")
        _require(are_lengths(size) and are_lengths(stride) and are_lengths((start,)), "a tensor of other lengths")
        _require(len(size) == len(stride) and (len(rest) < 2 or not rest[1]), "a tensor with hooks, which are code")
        dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
        last = start + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        inside = 0 in size or (last + 1) * dtype.itemsize <= storage._untyped_storage.nbytes()
        _require(inside, "a tensor with elements beyond its storage")
        return rebuild(storage, 0 if 0 in size else start, size, stride, *rest)

    return made


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    _require(isinstance(data, torch.Tensor) and not hooks, "a parameter without data, or with hooks, which are code")
    return torch.nn.Parameter(data.detach(), requires_grad is True and data.is_floating_point())


def are_lengths(values: Any) -> bool:
    """Return True if a value may be the shape, strides or offsets of a tensor."""
    is_shape = isinstance(values, tuple | list) and len(values) <= _MAX_DIMS
    return is_shape and all(type(n) is int and 0 <= n < TOO_MANY for n in values)


def _of(make: Callable[..., Any], *kinds: tuple[type, ...]) -> Callable[..., Any]:
    """Return a function that takes arguments of these types, and no more of them."""

    def made(*arguments: Any) -> Any:
        fits = len(arguments) <= len(kinds) and all(map(lambda given, of: type(given) in of, arguments, kinds))
        _require(fits, f"other arguments than {getattr(make, '__name__', make)} takes")
        return make(*arguments)

    return made


def _bytes(data: Any = "", encoding: str = "latin1") -> bytes:
    """Decode bytes as older pickle protocols store them, as text; other codecs are refused: some import modules."""
    is_right = type(data) in (bytes, str) and encoding in ("latin1", "latin-1")
    _require(is_right, "bytes made of something else than bytes, or text in another encoding than latin1")
    return data.encode("latin1") if type(data) is str else data


def _layout(name: Any) -> torch.layout:
    _require(name == "torch.strided", "a tensor of another layout than torch.strided (dense)")
    return torch.strided


# NumPy trusts the states of its pickled dtypes and arrays: wrong ones end the process. So each is compared with what
# NumPy itself would have written. Numbers and text only.

_SPEC = re.compile(r"[<>=|]?(?:[biuf][1248]|f16|c(?:8|16|32)|[SU]\d{0,9})")
_MOST_DIMS_OF_NUMPY = 32  # before NumPy 2, which reads beyond them
_ARRAY = object()
"""A placeholder for the class of arrays, which pickles name; a call would reserve memory and show its old content."""


def _dtype(spec: Any, *_align_and_copy: Any) -> Any:
    _require(type(spec) is str and _SPEC.fullmatch(spec) is not None, f"NumPy's dtype {spec!a:.50}")
    return np.dtype(spec, copy=True)  # a copy, since its state is to be set


def _fill_dtype(dtype: Any, state: Any) -> None:
    is_right = type(state) is tuple and len(state) == 8 and state == dtype.newbyteorder(state[1]).__reduce__()[2]
    _require(is_right, "NumPy's dtype with fields")
    dtype.__setstate__(state)


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    _require(kind is _ARRAY and shape == (0,) and code in (b"b", "b"), "NumPy's array of another class")
    return np.ndarray((0,), "b")


def _fill_array(array: Any, state: Any) -> None:
    _require(type(state) is tuple and len(state) == 5, "NumPy's array without contents")
    _, shape, dtype, by_columns, raw = state
    is_shape = type(shape) is tuple and len(shape) <= _MOST_DIMS_OF_NUMPY and are_lengths(shape)
    is_right = is_shape and isinstance(dtype, np.dtype) and type(raw) is bytes
    _require(is_right, "NumPy's array of objects")
    _require(math.prod(shape) * dtype.itemsize == len(raw), "NumPy's array of another length than its contents")
    array.__setstate__((1, shape, dtype, bool(by_columns), raw))


def _scalar(dtype: Any, raw: Any) -> Any:
    whole = isinstance(dtype, np.dtype) and type(raw) is bytes and len(raw) == dtype.itemsize
    _require(whole, "NumPy's number of another length than its contents")
    return np.frombuffer(raw, dtype)[0]


# ---- the table of names ----------------------------------------------------------------------------------------------

SIZE = _of(torch.Size, (list, tuple))
_STORAGES = torch.storage._dtype_to_storage_type_map().items()
_NAMES: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*_DATACLASSES, metadata.TensorProperties)},
    **{
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in vars(torch).values()
        if type(dtype) is torch.dtype
    },
    **{("torch", name): dtype for dtype, name in _STORAGES if name[0] != "Q"},  # of storages the dtype is enough
    ("torch", "UntypedStorage"): torch.uint8,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch", "Size"): SIZE,
    ("torch", "device"): _of(torch.device, (str,), (int,)),
    ("torch.serialization", "_get_layout"): _layout,
    ("torch._utils", "_rebuild_tensor"): _rebuilt(torch._utils._rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt(torch._utils._rebuild_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _rebuilt(torch._utils._rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _parameter,
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): _of(metadata._MEM_FORMAT_ENCODING, (int, str)),
    # Holds the true shapes of reformulated tensors besides, as `mcore_data`.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): metadata.Metadata,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): _of(collections.Counter, (dict, type(None))),
    ("argparse", "Namespace"): argparse.Namespace,
    ("_codecs", "encode"): _bytes,
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty_array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{
        (module, name): _of(pathlib.PurePosixPath, *[(str,)] * 256)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
    },
    **{
        (module, name): stands_for
        for module in ("builtins", "__builtin__")
        for name, stands_for in {
            **{kind.__name__: kind for kind in (slice, complex, set, frozenset, range)},
            "xrange": range,
            "bytes": _bytes,
            "bytearray": lambda *given: bytearray(_bytes(*given)),
        }.items()
    },
}
"""The replacements of names in pickles; functions accept the arguments of an honest pickle, and no others."""
