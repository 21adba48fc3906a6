"""Open a `torch_dist` checkpoint of any generation: its tensors in their true shapes, its common state, its objects."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_fsdp.checkpoint.convert.common_state import CommonState
from megatron_fsdp.checkpoint.convert.entries import Entry, Move
from megatron_fsdp.checkpoint.convert.legacy import Cells, read_true_box
from megatron_fsdp.checkpoint.convert.partial import SparingReader
from megatron_fsdp.checkpoint.convert.plan import COMMON, Source, needed_objects
from megatron_fsdp.checkpoint.data_unpickler import Opaque
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.objects import load_object
from megatron_fsdp.checkpoint.reading_budget import open_file, read_json
from megatron_fsdp.errors import CheckpointError

_COMMON_KEY = f"{COMMON}/shard_0_1"
_TRUE_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class TorchDistSource:
    """An opened checkpoint.

    Attributes:
        folder: Its metadata and objects.
        reader: Reads its tensors.
        content: What a plan is made from.
        cells: Key -> how it was cut, for tensors that are stored as flattened cells.
    """

    folder: CheckpointFolder
    reader: SparingReader
    content: Source
    cells: Mapping[str, Cells]

    @classmethod
    def open(cls, path: Path) -> TorchDistSource:
        """Open one.

        Raises:
            CheckpointError: It is not a complete `torch_dist` checkpoint, is damaged, or holds what is not read.
        """
        _require_marker(path)
        folder = CheckpointFolder(path)
        cells = _find_cells(folder)
        entries = [
            Entry(key, cells[key].shape if key in cells else tuple(entry.shape), entry.dtype)
            for key, entry in folder.tensors.items()
        ]
        wanted = needed_objects(folder.objects)
        objects = {key: without_opaque(_only(folder.read_object(key))) for key in wanted}
        common = CommonState.of(without_opaque(_read_common(folder, path)))
        return cls(folder, SparingReader(folder), Source(entries, list(folder.objects), common, objects), cells)

    def read(self, move: Move) -> Tensor:
        """The elements of a move, in its shape, contiguous."""
        if move.source in self.cells:

            def stored(offsets: Any, lengths: Any) -> Tensor:
                return self.reader.read_box(move.source, offsets, lengths)

            found = read_true_box(self.cells[move.source], stored, move.offsets, move.lengths)
        else:
            found = self.reader.read_box(move.source, move.offsets, move.lengths)
        return found.reshape(move.shape)


def without_opaque(value: Any) -> Any:
    """A copy in which text stands for objects of classes that are not here, so that anyone can read it."""
    if isinstance(value, Opaque):
        return f"{value.qualified_name}({', '.join(map(str, value.arguments))})"
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**{name: without_opaque(inner) for name, inner in vars(value).items()})
    if isinstance(value, Mapping):
        return {without_opaque(key): without_opaque(inner) for key, inner in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(without_opaque(inner) for inner in value)
    return value


def _require_marker(path: Path) -> None:
    marker = path / "metadata.json"
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the iter_* folder of a torch_dist checkpoint")
    if not marker.is_file():
        inner = sorted(child.name for child in path.iterdir() if (child / "metadata.json").is_file())
        hint = f"; did you mean {path / inner[-1]}?" if inner else ""
        raise CheckpointError(
            f"{path} has no metadata.json, which torch_dist writes last: it is no torch_dist checkpoint, or an "
            f"incomplete one{hint}"
        )
    told = read_json(marker)
    backend = told.get("sharded_backend") if isinstance(told, dict) else None
    if backend != "torch_dist":
        raise CheckpointError(f"{marker} says that the format is {backend!r}; only torch_dist can be converted")


def _read_common(folder: CheckpointFolder, path: Path) -> Any:
    if _COMMON_KEY in folder.objects:
        return _only(folder.read_object(_COMMON_KEY))
    old = path / "common.pt"
    if not old.is_file():
        raise CheckpointError(f"{path} has neither {_COMMON_KEY} nor common.pt; the checkpoint is incomplete")
    with open_file(old) as stream:
        return load_object(stream, str(old))


def _only(content: Any) -> Any:
    """Megatron wraps each object into a list of one."""
    return content[0] if isinstance(content, list) and len(content) == 1 else content


def _find_cells(folder: CheckpointFolder) -> dict[str, Cells]:
    told = getattr(folder.metadata, "mcore_data", None) or {}
    if not isinstance(told, Mapping):
        raise CheckpointError(
            f"{folder.path}: mcore_data is a {type(told).__name__}, not a dict; the metadata is damaged"
        )
    found: dict[str, Cells] = {}
    for key, entry in folder.tensors.items():
        about = told.get(key)
        shape = about.get(_TRUE_SHAPE) if isinstance(about, Mapping) else None
        if shape is not None:
            found[key] = Cells.of(key, tuple(entry.shape), tuple(int(size) for size in shape))
    return found
