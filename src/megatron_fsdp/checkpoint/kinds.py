"""The kind of a checkpoint folder, and what it holds beside tensors: the common state and files of Megatron."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megatron_fsdp.checkpoint.archive import load_object
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.manifest import FILE_NAME
from megatron_fsdp.checkpoint.safe_read import read_file, read_json
from megatron_fsdp.errors import CheckpointError

MARKER = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
GROUP_META = "optimizer.param_to_group_meta."

_SLOTS = (".exp_avg", ".exp_avg_sq", ".momentum_buffer", ".max_exp_avg_sq", ".fp32_param")
_BACKEND = "torch_dist"
_SHARDED_OBJECT = re.compile(r"/shard_[\d.]+_[\d.]+\Z")  # how torch_dist names objects
_FLAT_NAMES = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")
_DEPTH = 12
_TITLES = {
    "torch_dist": "torch_dist (Megatron-LM)",
    "fsdp_dtensor": "fsdp_dtensor (Megatron-FSDP)",
    "dcp": "torch.distributed.checkpoint",
}


@dataclass(frozen=True)
class Kind:
    """The kind of a checkpoint.

    `format` is `torch_dist` (Megatron-LM), `fsdp_dtensor` (Megatron-FSDP, this library's own too) or `dcp` (any other).
    `generation` of torch_dist is `G1` (flattened ranges in `mcore_data`), `G2` (`common.pt`) or `G3` (common state as
    an object), else None. `optimizer` is `none`, `model_space` (one tensor per slot and model tensor), `bucket_space`
    (flat buckets, which only the run that wrote them understands) or `per_parameter` (`<parameter>.<slot>`). Keys of a
    chained one carry `chained_<n>.` of several optimizers; one with a manifest is this library's.
    """

    format: str
    generation: str | None
    optimizer: str
    is_chained: bool
    has_manifest: bool

    @property
    def title(self) -> str:
        """The kind in words."""
        parts = [_TITLES[self.format]]
        parts += [f"generation {self.generation}"] if self.generation else []
        parts += ["with manifest"] if self.has_manifest else []
        return ", ".join(parts)


def recognise(folder: CheckpointFolder) -> Kind:
    """Recognise the kind of an open folder, from names alone."""
    tensors, objects = folder.tensors.keys(), folder.objects.keys()
    has_file, has_object = (folder.path / COMMON_FILE).is_file(), COMMON_KEY in objects
    name, generation = "dcp", None
    if has_file or has_object or read_marker(folder.path).get("sharded_backend") == _BACKEND:
        name = _BACKEND
        if getattr(folder.metadata, "mcore_data", None):
            generation = "G1"
        elif has_object or has_file:
            generation = "G3" if has_object else "G2"
    elif any(key.startswith("model.module.") for key in tensors) or any(key.startswith(GROUP_META) for key in objects):
        name = "fsdp_dtensor"
    if any(".bucket_idx_" in key or "optimizer.distributed." in key for key in tensors):
        optimizer = "bucket_space"
    elif name == _BACKEND:
        optimizer = "model_space" if any("optimizer.state." in key for key in tensors) else "none"
    else:
        optimizer = "per_parameter" if any(key.endswith(_SLOTS) for key in tensors) else "none"
    return Kind(
        format=name,
        generation=generation,
        optimizer=optimizer,
        is_chained=any(key.startswith("chained_") for key in tensors),
        has_manifest=(folder.path / FILE_NAME).is_file(),
    )


def read_marker(folder: Path) -> dict[str, Any]:
    """Read `metadata.json`; empty if there is none."""
    path = folder / MARKER
    if not path.is_file():
        return {}
    found = read_json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} where an object of names and values should be")
    return found


# ---- the common state ------------------------------------------------------------------------------------------------


def read_common(folder: CheckpointFolder) -> dict[str, Any]:
    """Read the common state: of torch_dist Megatron's dict, else the objects of the same names."""
    if COMMON_KEY in folder.objects:
        where, found = COMMON_KEY, folder.read_object(COMMON_KEY)
        if isinstance(found, list) and len(found) == 1:  # Megatron wraps objects in a list
            found = found[0]
    elif (folder.path / COMMON_FILE).is_file():
        where, found = str(folder.path / COMMON_FILE), read_common_file(folder)
    else:
        return {name: folder.read_object(name) for name in _FLAT_NAMES if name in folder.objects}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} holds a {type(found).__name__} where the common state (a dict) should be")
    return {str(key): value for key, value in found.items()}


def read_common_file(folder: CheckpointFolder) -> Any:
    """Read `common.pt`, as Megatron's generations G1 and G2 have it."""
    path = folder.path / COMMON_FILE
    try:
        return load_object(read_file(path), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def as_json(value: Any, depth: int = _DEPTH) -> Any:
    """Convert any object to JSON: numbers, text, lists and objects; anything else as a short description."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}, {dtype_name(value.dtype)}"
    if isinstance(value, torch.dtype):
        return str(value)
    if depth == 0:
        return f"({type(value).__name__})"
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(inner, depth - 1) for inner in value]
    shape = getattr(value, "shape", None)
    text = f"array of shape {shape}" if shape else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


# ---- files beside the tensors ----------------------------------------------------------------------------------------


class SideFileProblem(NamedTuple):
    """What is wrong with one file: whether it is there, its name, and the reason in words."""

    state: Literal["missing", "damaged"]
    name: str
    reason: str


def side_file_problems(folder: CheckpointFolder) -> list[SideFileProblem]:
    """List what is missing or damaged of the files that Megatron writes with every `torch_dist` checkpoint."""
    found = []
    has_marker, backend = (folder.path / MARKER).is_file(), None
    try:
        backend = read_marker(folder.path).get("sharded_backend")
    except CheckpointError as error:
        found.append(SideFileProblem("damaged", MARKER, str(error)))
    has_common = COMMON_KEY in folder.objects or (folder.path / COMMON_FILE).is_file()
    has_flattened = bool(getattr(folder.metadata, "mcore_data", None))
    names_objects = any(_SHARDED_OBJECT.search(key) for key in folder.objects)
    if not (backend == _BACKEND or has_common or has_flattened or names_objects):
        return found
    if not has_marker:
        reason = "a torch_dist checkpoint has it, and it is written last: the save did not finish, or it was lost"
        found.append(SideFileProblem("missing", MARKER, reason))
    elif not found and backend != _BACKEND:
        said = ascii(backend)[:100]
        found.append(SideFileProblem("damaged", MARKER, f"says that the format is {said}, and this is {_BACKEND}"))
    if not has_common:
        reason = f"iteration, arguments and parameter groups are neither there nor in {COMMON_KEY}"
        found.append(SideFileProblem("missing", COMMON_FILE, reason))
    return found
