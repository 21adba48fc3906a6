"""Read pickles from files that we did not write: data only, from a short list of classes, and never code.

A pickle names classes and functions that the reader imports and calls; whoever wrote the file chooses them. Here every
name is looked up in a table instead, and one that is not there is refused by name, before anything is called.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import pathlib
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import IO, Any, NoReturn

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_fsdp.checkpoint.data_unpickler import DataUnpickler, Keyed
from megatron_fsdp.checkpoint.data_unpickler import Opaque as Opaque
from megatron_fsdp.checkpoint.reading_budget import OverBudgetError, shortened
from megatron_fsdp.errors import CheckpointError

Names = Mapping[tuple[str, str], Any]

FOREIGN_PACKAGES = frozenset({"megatron", "transformer_engine", "apex", "modelopt", "nvidia_resiliency_ext", "nemo"})
"""Packages whose classes may stand in a checkpoint: never imported, what was stored of them is kept as `Opaque`."""


class RestrictedUnpickler(DataUnpickler):
    """An unpickler that knows a table of names and no others."""

    names: Names = MappingProxyType({})
    where: str = "a pickle"

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The entry of the table.

        Raises:
            CheckpointError: There is none; names the global and the file.
        """
        found = self.names.get((module_name, global_name))
        if found is not None:
            return found
        if module_name.partition(".")[0] in FOREIGN_PACKAGES:
            return type(global_name, (Opaque,), {"qualified_name": f"{module_name}.{global_name}"})
        asked = printable(f"{module_name}.{global_name}")
        raise CheckpointError(
            f"{self.where} asks to import {asked}, which no checkpoint needs; it was not imported, "
            "and the file is refused: do not use it unless you know who wrote it"
        )


def unpickler_for(names: Names, where: str) -> type[RestrictedUnpickler]:
    """A class of unpicklers bound to a table."""
    return type("_BoundUnpickler", (RestrictedUnpickler,), {"names": names, "where": where})


def load_restricted(stream: IO[bytes], where: str, names: Names | None = None) -> Any:
    """Read one pickle.

    Args:
        stream: At its begin.
        where: Names the file in messages.
        names: Table of (module, name) -> object; None: what `.metadata` of torch.distributed.checkpoint needs.

    Raises:
        CheckpointError: It names something off the table, or cannot be read.
    """
    bound = unpickler_for(metadata_names() if names is None else names, where)
    return reading(where, lambda: bound(io.BytesIO(stream.read())).load())


def reading(where: str, read: Callable[[], Any]) -> Any:
    """Call a reader of bytes that may be anything; whatever fails in it is a problem of the file.

    Raises:
        CheckpointError: It failed.
    """
    try:
        return read()
    except CheckpointError:
        raise
    except OverBudgetError as error:
        raise CheckpointError(f"{where} is refused: {error}") from error
    except MemoryError as error:
        raise CheckpointError(
            f"there is not enough memory to read {where}; free some, or use another machine"
        ) from error
    except Exception as error:  # damaged bytes raise anything
        raise CheckpointError(
            f"{where} is damaged and cannot be read ({type(error).__name__}: {_first_line(error)}); restore it from a "
            "copy, or use an older checkpoint"
        ) from error


def _first_line(error: BaseException) -> str:
    try:
        line = (str(error)[:1000].splitlines() or [""])[0]
    except ValueError:  # of a number with more digits than Python prints
        return "no words for it"
    return printable(line)


def printable(text: str, most: int = 256) -> str:
    """Text from a file as it may stand in a message: short, what would steer a terminal written as escapes."""
    return shortened(text if text.isprintable() else ascii(text), most)


def plain_names() -> dict[tuple[str, str], Any]:
    """Names that are harmless anywhere: containers, dtypes, shapes, devices, paths."""
    names: dict[tuple[str, str], Any] = {
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
        ("torch.serialization", "_get_layout"): _layout_by_name,
        ("collections", "OrderedDict"): Keyed(collections.OrderedDict),
        ("collections", "Counter"): _counter,
        ("_codecs", "encode"): _latin1_bytes,
        ("argparse", "Namespace"): argparse.Namespace,
    }
    names |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _dtypes()}
    builtins: dict[str, Any] = {"slice": slice, "complex": _complex, "bytearray": _bytearray, "bytes": _no_bytes}
    builtins |= {"set": Keyed(set), "frozenset": Keyed(frozenset)}
    names["__builtin__", "xrange"] = range  # what protocol 2 calls it
    for name, stands_for in {**builtins, "range": range}.items():
        names["builtins", name] = names["__builtin__", name] = stands_for
    for module in ("pathlib", "pathlib._local"):
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"):
            names[module, kind] = _path
    return names


def metadata_names() -> dict[tuple[str, str], Any]:
    """What a `.metadata` of torch.distributed.checkpoint consists of; Megatron's additions are read as `Opaque`."""
    names = plain_names()
    kept: list[Any] = [
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
        planner.SavePlan,
        planner.WriteItem,
        planner.TensorWriteData,
        planner.BytesIOWriteData,
    ]
    names |= {(kind.__module__, kind.__name__): kind for kind in kept}
    for enumeration in (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType):
        names[enumeration.__module__, enumeration.__name__] = _member_of(enumeration)
    for module in ("megatron.core.dist_checkpointing.strategies.torch",):
        names[module, "MCoreMetadata"] = MCoreMetadata
        names[module, "MCoreSavePlan"] = MCoreSavePlan
    return names


class MCoreMetadata(metadata.Metadata):
    """Stands for Megatron's class of this name; `mcore_data` holds the true shapes of reformulated tensors."""

    mcore_data: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class MCoreSavePlan(planner.SavePlan):
    """Stands for Megatron's class of this name."""

    mcore_data: dict[str, Any] | None = None


def _dtypes() -> list[torch.dtype]:
    return [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


# What stands for classes and functions in pickles: takes what an honest pickle gives, and nothing that would make the
# result larger than the pickle or slow to make.


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(f"{what} made of something else than it is made of")


def _size(lengths: Any = ()) -> torch.Size:
    _require(isinstance(lengths, list | tuple) and all(type(length) is int for length in lengths), "a torch.Size")
    return torch.Size(lengths)


def _device(*arguments: Any) -> torch.device:
    _require(0 < len(arguments) <= 2 and type(arguments[0]) is str, "a torch.device")
    return torch.device(*arguments)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    _require(counts is None or type(counts) is dict, "a Counter")
    return collections.Counter(counts)


def _complex(*parts: Any) -> complex:
    _require(all(type(part) is float for part in parts), "a complex number")
    return complex(*parts)


def _bytearray(data: Any = b"", encoding: str | None = None) -> bytearray:
    _require(type(data) is bytes or (type(data) is str and encoding is not None), "a bytearray")
    return bytearray(data) if type(data) is bytes else bytearray(_latin1_bytes(data, str(encoding).replace("-", "")))


def _no_bytes(*arguments: Any) -> bytes:
    """How protocol 2 stores b""."""
    _require(not arguments, "bytes")
    return b""


def _path(*parts: Any) -> pathlib.PurePosixPath:
    _require(all(type(part) is str for part in parts), "a path")
    return pathlib.PurePosixPath(*parts)


def _member_of(enumeration: type[enum.Enum]) -> Callable[[Any], enum.Enum]:
    def member(value: Any) -> enum.Enum:
        _require(type(value) in (int, str), f"a {enumeration.__name__}")
        return enumeration(value)

    return member


def _layout_by_name(name: str) -> torch.layout:
    if name != "torch.strided":
        raise CheckpointError(f"a tensor of layout {name} is not supported; only dense (torch.strided) tensors are")
    return torch.strided


def _latin1_bytes(text: str, encoding: str = "latin1") -> bytes:
    """How older pickle protocols store bytes; other codecs are refused, since some import modules."""
    if encoding != "latin1":
        _refuse_codec(encoding)
    return text.encode("latin1")


def _refuse_codec(encoding: str) -> NoReturn:
    raise CheckpointError(f"text in encoding {encoding!a:.50} is not what a pickle of bytes uses; the file is refused")
