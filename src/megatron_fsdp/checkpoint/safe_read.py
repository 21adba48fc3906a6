"""Read files that we did not write: as data, without running code from them.

Tensors are read by `torch.load(weights_only=True)`. Objects, and the `.metadata` of torch.distributed.checkpoint, hold
more than that takes (NumPy's arrays, `argparse.Namespace`, classes of Megatron that are not installed). A pickle names
classes and functions that the reader imports and calls; whoever wrote the file chooses them. Here every name is looked
up in a table instead, and one that is not there is refused by name, before anything is called.

Neither bounds the memory and the time that a hostile file makes reading take.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import os
import pathlib
import pickle
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar, cast

import numpy as np
import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_fsdp.errors import CheckpointError

FOREIGN_PACKAGES = frozenset({"megatron", "transformer_engine", "apex", "modelopt", "nvidia_resiliency_ext", "nemo"})
"""Packages whose classes may stand in a checkpoint: never imported, what was stored of them is kept as `Opaque`."""

MAX_DIMS = 64
"""What torch allows a tensor."""
_MAX_JSON_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 20


# ---- files -----------------------------------------------------------------------------------------------------------


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: It is something else, or cannot be opened.
    """
    return open(path, "rb", opener=only_regular)  # Path.open takes no opener


def only_regular(path: str, flags: int) -> int:
    """Open no pipe or socket, which would be waited for, and no device, which may never end; an `opener` of `open`."""
    _require_regular(path, Path(path).stat())
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _require_regular(path, os.fstat(descriptor))  # it may be another one by now
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a folder, pipe, socket or device where a file should be", path)


def read_json(path: Path, at_most: int = _MAX_JSON_BYTES) -> Any:
    """What a JSON file holds.

    Raises:
        CheckpointError: It is larger than `at_most` bytes, no regular file, no JSON, or cannot be read.
    """
    try:
        with open_file(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > at_most:
                raise ValueError(f"it has {nbytes} bytes, and {at_most} is the most that is read")
            return json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as JSON ({shortened(str(told))}); it is damaged, restore it from a copy"
        ) from error


def shortened(text: str, most: int = 256) -> str:
    """Text from a file, no longer than a message should be."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def printable(text: str, most: int = 256) -> str:
    """Text from a file as it may stand in a message: short, what would steer a terminal written as escapes."""
    return shortened(text if text.isprintable() else ascii(text), most)


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Inside, bytes are read that may be anything: whatever fails is a problem of the file.

    Args:
        where: Names the file (and the entry) in messages.

    Raises:
        CheckpointError: Something failed.
    """
    try:
        yield
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(
            f"there is not enough memory to read {where}; free some, or use another machine"
        ) from error
    except Exception as error:  # damaged bytes raise anything
        raise CheckpointError(
            f"{where} is damaged and cannot be read ({type(error).__name__}: {_in_a_line(error)}); restore it from a "
            "copy, or use an older checkpoint"
        ) from error


def _in_a_line(error: BaseException) -> str:
    try:
        text = str(error)[:2000]
    except ValueError:  # of a number with more digits than Python prints
        return "no words for it"
    reason = re.search(r"WeightsUnpickler error: (.*)", text)  # torch puts advice for its own users before
    return printable((reason[1] if reason else text).partition("\n")[0]) or "no words for it"


def _refusal(where: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{where} asks to import {printable(name)}, which no checkpoint needs; it was not imported, and the file is "
        "refused: do not use it unless you know who wrote it"
    )


# ---- tensors and objects ---------------------------------------------------------------------------------------------


class Window(io.RawIOBase):
    """Some bytes of a file, as a file.

    Args:
        file: Open for reading, with a place of its own.
        start: First byte.
        length: In bytes.
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place in the window."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, origin + offset)
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        """Read up to the end of the window."""
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(target)  # type: ignore[attr-defined]
        self._place += count
        return count


def load_tensor(stream: IO[bytes], where: str, *, check: bool = False) -> torch.Tensor:
    """Read one tensor to the CPU.

    Args:
        stream: With the bytes of one `torch.save`, and nothing else.
        where: Names the file (and the entry) in messages.
        check: Compare with the CRC-32 in the file, where there is one.

    Raises:
        CheckpointError: It is something else, or damaged.
    """
    with reading(where):
        if check:
            _require_sound_archive(stream, where)
        found = load_weights(stream, where, "cpu")
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{where} holds a {type(found).__name__} where a tensor should be; the file is damaged")
    if found.layout is torch.strided and found.nbytes > found.untyped_storage().nbytes():
        raise CheckpointError(f"{where} holds a tensor with fewer elements than its shape {tuple(found.shape)} has")
    return found.detach()


def load_weights(stream: IO[bytes], where: str, map_location: str) -> Any:
    """`torch.load(weights_only=True)`, which names what it refuses as other readers do."""
    try:
        return torch.load(stream, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        if name is None:
            raise
        raise _refusal(where, name[1]) from None  # torch would advise to allow it


def load_object(raw: bytes, where: str) -> Any:
    """Read one object; tensors in it come to the CPU.

    Containers, numbers, text, tensors, NumPy arrays and `argparse.Namespace` are read as they are. Objects of packages
    such as Megatron are kept as `Opaque`. Nothing is imported.

    Args:
        raw: Of one `torch.save`.
        where: Names the file (and the entry) in messages.

    Raises:
        CheckpointError: It names a class or function off the list, is not of the zip format that torch writes since
            1.6, holds TorchScript, or is damaged.
    """
    with reading(where):
        stream = io.BytesIO(raw)
        _require_sound_archive(stream, where)
        return _load_archive(stream, where)


def load_object_file(path: Path) -> Any:
    """As `load_object`, of a file whose tensors stay on disk until they are looked at (a private memory map).

    Raises:
        CheckpointError: As of `load_object`, or the file cannot be opened.
    """
    where = str(path)
    try:
        with open_file(path) as file, reading(where):
            nbytes = os.fstat(file.fileno()).st_size
            return _load_archive(
                file, where, cast(torch.UntypedStorage, torch.UntypedStorage.from_file(where, False, nbytes))
            )
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error


def _require_sound_archive(stream: IO[bytes], where: str) -> None:
    """Compare what an archive of `torch.save` holds with its CRC-32s; torch itself does not look at them."""
    try:
        with zipfile.ZipFile(stream) as archive:
            for record in archive.infolist():
                if record.CRC:  # torch can leave it out
                    with archive.open(record) as contents:
                        while contents.read(_BLOCK_BYTES):  # compares at the end
                            pass
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{where} is not an archive of torch.save (zip format) as it was written: {printable(str(error))}; restore "
            "it from a copy"
        ) from error
    stream.seek(0)


def _load_archive(stream: IO[bytes], where: str, mapped: torch.UntypedStorage | None = None) -> Any:
    """Read an archive by the table of names.

    `torch.load` would take the table as `pickle_module`, but it also runs TorchScript and reads older formats, and it
    refuses any table where an environment variable wants `weights_only`.
    """
    if not zipfile.is_zipfile(stream):
        raise CheckpointError(f"{where} is not an archive of torch.save (zip format); save it again with torch.save")
    stream.seek(0)
    with serialization._open_zipfile_reader(stream) as archive:
        if archive.has_record("constants.pkl"):
            raise CheckpointError(f"{where} holds TorchScript, which is code; a checkpoint does not need it: refused")
        bound = type("Unpickler", (RestrictedUnpickler,), {"where": where})
        return serialization._load(archive, "cpu", SimpleNamespace(Unpickler=bound), overall_storage=mapped)


# ---- pickles ---------------------------------------------------------------------------------------------------------


class Opaque:
    """What is left of an object whose class belongs to a package that is not imported: its name and its data.

    Attributes:
        qualified_name: Module and class.
        arguments: What it was made with.
        state: What was set on it; None if nothing was.
        items: Elements, where it was a kind of list or dict.
    """

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

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Keep an element."""
        self.items.append(item)

    def __repr__(self) -> str:
        return f"<{self.qualified_name}, not read>"


class RestrictedUnpickler(pickle._Unpickler):
    """An unpickler that knows a table of names and no others, and fills objects of data only.

    Python's own in C would also set attributes of classes, and reach back into what other pickles have registered.
    """

    where = "a pickle"
    stack: list[Any]

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The entry of the table.

        Raises:
            CheckpointError: There is none; names the global and the file.
        """
        found = _names().get((module_name, global_name))
        if found is not None:
            return found
        if module_name.partition(".")[0] in FOREIGN_PACKAGES:
            return type(global_name, (Opaque,), {"qualified_name": f"{module_name}.{global_name}"})
        raise _refusal(self.where, f"{module_name}.{global_name}")

    def get_extension(self, code: int) -> Any:
        """Refuse a number that stands for a name."""
        raise pickle.UnpicklingError(f"extension {code}, which no checkpoint needs")

    def _build(self) -> None:
        """Give an object its state; never a class, a function or a shared object."""
        state, made = self.stack.pop(), self.stack[-1]
        kind = type(made)
        if kind in _FILLED_BY_THEMSELVES or isinstance(made, Opaque):
            made.__setstate__(state)
        elif kind in _STATES_OF_NUMPY:
            _STATES_OF_NUMPY[kind](made, state)
        elif kind in _FILLED_BY_DICT and type(state) is dict:
            made.__dict__.update(state)
        else:
            raise pickle.UnpicklingError(f"attributes to set on {kind.__name__}, which takes none")

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}


def load_metadata(raw: bytes, where: str) -> Any:
    """Read the pickle in the `.metadata` of torch.distributed.checkpoint; Megatron's additions are kept as `Opaque`.

    Args:
        raw: All of the file.
        where: Names it in messages.

    Raises:
        CheckpointError: It names something off the table, or cannot be read.
    """
    with reading(where):
        unpickler = RestrictedUnpickler(io.BytesIO(raw))
        unpickler.where = where
        return unpickler.load()


class MCoreMetadata(metadata.Metadata):
    """Stands for Megatron's class of this name; `mcore_data` holds the true shapes of reformulated tensors."""

    mcore_data: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class MCoreSavePlan(planner.SavePlan):
    """Stands for Megatron's class of this name."""

    mcore_data: dict[str, Any] | None = None


_DATACLASSES: tuple[Any, ...] = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
    planner.SavePlan,
    planner.WriteItem,
    planner.TensorWriteData,
    planner.BytesIOWriteData,
)
_FILLED_BY_THEMSELVES = {metadata.TensorProperties}
_FILLED_BY_DICT = {*_DATACLASSES, MCoreMetadata, MCoreSavePlan, argparse.Namespace, collections.OrderedDict}


@functools.cache
def _names() -> dict[tuple[str, str], Any]:
    """What stands for the names in pickles; functions take what an honest pickle gives, and nothing else."""
    kept = [*_DATACLASSES, metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING, planner.WriteItemType]
    names: dict[tuple[str, str], Any] = {(kind.__module__, kind.__name__): kind for kind in kept}
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    names |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in dtypes}
    names |= {("torch._utils", name): getattr(torch._utils, name) for name in _TENSOR_FUNCTIONS}
    for kind in (MCoreMetadata, MCoreSavePlan):
        names["megatron.core.dist_checkpointing.strategies.torch", kind.__name__] = kind
    names |= {
        ("torch", "Size"): _of_a_list(torch.Size),
        ("torch", "device"): torch.device,
        ("torch", "UntypedStorage"): torch.UntypedStorage,
        ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
        ("torch.serialization", "_get_layout"): serialization._get_layout,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "Counter"): _counter,
        ("_codecs", "encode"): _latin1_bytes,
        ("argparse", "Namespace"): argparse.Namespace,
        ("numpy", "ndarray"): _ARRAY,
        ("numpy", "dtype"): _dtype,
    }
    builtins: dict[str, Any] = {"slice": slice, "complex": complex, "bytearray": _bytearray, "bytes": _no_bytes}
    builtins |= {"set": _of_a_list(set), "frozenset": _of_a_list(frozenset), "range": range, "xrange": range}
    for name, stands_for in builtins.items():
        names["builtins", name] = names["__builtin__", name] = stands_for
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"):
            names[module, name] = pathlib.PurePosixPath
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[module, "_reconstruct"], names[module, "scalar"] = _empty_array, _scalar
    return names


_TENSOR_FUNCTIONS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(what)


def _of_a_list(kind: Callable[..., Any]) -> Callable[..., Any]:
    def made(items: Any = ()) -> Any:
        _require(type(items) in (list, tuple), f"a {type(items).__name__} where a list should stand")
        return kind(items)

    return made


def _counter(counts: Any = None) -> collections.Counter[Any]:
    _require(counts is None or type(counts) is dict, "a Counter of something else than a dict")
    return collections.Counter(counts)


def _bytearray(data: Any = b"", encoding: str = "latin-1") -> bytearray:
    _require(type(data) in (bytes, str), "a bytearray of something else than bytes")
    return bytearray(data if type(data) is bytes else _latin1_bytes(data, encoding.replace("-", "")))


def _no_bytes(*arguments: Any) -> bytes:
    """How protocol 2 stores b""."""
    _require(not arguments, "bytes of something")
    return b""


def _latin1_bytes(text: str, encoding: str = "latin1") -> bytes:
    """How older pickle protocols store bytes; other codecs are refused, since some import modules."""
    if encoding != "latin1":
        raise CheckpointError(f"text in encoding {encoding!a:.50} is not what a pickle of bytes uses; refused")
    return text.encode("latin1")


# NumPy trusts the states of its pickled dtypes and arrays: wrong ones end the process. So each is compared with what
# NumPy itself would have written. Numbers and text only.

_SPEC = re.compile(r"[<>=|]?(?:[biuf][1248]|f16|c(?:8|16|32)|[SU]\d{0,9})")
_ARRAY = object()
"""Stands for the class of arrays, which pickles name; called, it would reserve memory and show what was in it."""


def _dtype(spec: Any, *_align_and_copy: Any) -> Any:
    _require(type(spec) is str and _SPEC.fullmatch(spec) is not None, f"NumPy's dtype {spec!a:.50}")
    return np.dtype(spec, copy=True)  # a copy, since its state is to be set


def _fill_dtype(dtype: Any, state: Any) -> None:
    sizes = (dtype.itemsize, dtype.alignment) if dtype.kind in "SU" else (-1, -1)
    flags = 8 if dtype.kind == "U" else 0
    holds = type(state) is tuple and len(state) == 8 and state[0] == 3 and state[1] in ("<", ">", "=", "|")
    _require(holds and state[2:7] == (None, None, None, *sizes) and state[7] in (0, flags), "NumPy's dtype with fields")
    dtype.__setstate__(state)


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    _require(kind is _ARRAY and shape == (0,) and code in (b"b", "b"), "NumPy's array of another class")
    return np.ndarray((0,), "b")


def _fill_array(array: Any, state: Any) -> None:
    _require(type(state) is tuple and len(state) == 5, "NumPy's array without contents")
    _, shape, dtype, by_columns, raw = state
    shaped = type(shape) is tuple and all(type(n) is int and 0 <= n < 1 << 62 for n in shape) and len(shape) <= 32
    _require(shaped and isinstance(dtype, np.dtype) and type(raw) is bytes, "NumPy's array of objects")
    _require(math.prod(shape) * dtype.itemsize == len(raw), "NumPy's array of another length than its contents")
    array.__setstate__((1, shape, dtype, bool(by_columns), raw))


def _scalar(dtype: Any, raw: Any) -> Any:
    whole = isinstance(dtype, np.dtype) and type(raw) is bytes and len(raw) == dtype.itemsize
    _require(whole, "NumPy's number of another length than its contents")
    return np.frombuffer(raw, dtype)[0]


_STATES_OF_NUMPY: dict[type, Callable[[Any, Any], None]] = {
    np.ndarray: _fill_array,
    **{type(np.dtype(code)): _fill_dtype for code in "?bBhHiIlLqQefdgFDGSU"},
}
