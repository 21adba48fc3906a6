"""Read pickles from files that we did not write: data only, from a short list of classes, and never code.

A pickle names classes and functions that the reader imports and calls; whoever wrote the file chooses them. Here every
name is looked up in a table instead, and one that is not there is refused by name, before anything is called.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import pickle
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_fsdp.errors import CheckpointError

Names = Mapping[tuple[str, str], Any]

FOREIGN_PACKAGES = frozenset({"megatron", "transformer_engine", "apex", "modelopt", "nvidia_resiliency_ext", "nemo"})
"""Packages whose classes may stand in a checkpoint: never imported, what was stored of them is kept as `Opaque`."""


class Opaque:
    """What is left of an object whose class belongs to a package that is not imported: its name and its data.

    Attributes:
        qualified_name: Module and class.
        arguments: What it was made with.
        state: What was set on it; None if nothing was.
        items: Elements, where it was a kind of list or dict.
    """

    qualified_name = "unknown"

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        """Keep the arguments; nothing is called."""
        made = super().__new__(cls)
        made.arguments = (*args, *kwargs.items())
        made.state = None
        made.items = []
        return made

    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Take an element, as lists do."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Take elements, as lists do."""
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.qualified_name}, not read>"


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that knows a table of names and no others."""

    names: ClassVar[Names] = {}
    where: ClassVar[str] = "a pickle"

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
        raise CheckpointError(
            f"{self.where} asks to import {module_name}.{global_name}, which no checkpoint needs; it was not imported, "
            "and the file is refused: do not use it unless you know who wrote it"
        )


def unpickler_for(names: Names, where: str) -> type[RestrictedUnpickler]:
    """A class of unpicklers bound to a table, as `torch.load` wants it."""
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
    unpickler = unpickler_for(metadata_names() if names is None else names, where)(stream)
    return reading(where, unpickler.load)


def reading(where: str, read: Callable[[], Any]) -> Any:
    """Call a reader of bytes that may be anything; whatever fails in it is a problem of the file.

    Raises:
        CheckpointError: It failed.
    """
    try:
        return read()
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes raise anything
        raise CheckpointError(
            f"{where} is damaged and cannot be read ({type(error).__name__}: {_first_line(error)}); restore it from a "
            "copy, or use an older checkpoint"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def plain_names() -> dict[tuple[str, str], Any]:
    """Names that are harmless anywhere: containers, dtypes, shapes, devices, paths."""
    names: dict[tuple[str, str], Any] = {
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.serialization", "_get_layout"): _layout_by_name,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "Counter"): collections.Counter,
        ("_codecs", "encode"): _latin1_bytes,
        ("argparse", "Namespace"): argparse.Namespace,
    }
    names |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _dtypes()}
    names |= {("builtins", kind.__name__): kind for kind in (set, frozenset, slice, complex, bytearray, range)}
    names |= {("__builtin__", kind.__name__): kind for kind in (set, frozenset, slice, complex, bytearray, range)}
    for module in ("pathlib", "pathlib._local"):
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"):
            names[module, kind] = pathlib.PurePosixPath
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
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
        planner.SavePlan,
        planner.WriteItem,
        planner.WriteItemType,
        planner.TensorWriteData,
        planner.BytesIOWriteData,
    ]
    names |= {(kind.__module__, kind.__name__): kind for kind in kept}
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
    raise CheckpointError(f"text in encoding {encoding!r} is not what a pickle of bytes uses; the file is refused")
