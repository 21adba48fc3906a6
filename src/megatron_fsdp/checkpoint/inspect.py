"""Inspect a checkpoint: its kind, Megatron's common state and files, its keys, and parts of its tensors."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megatron_fsdp.checkpoint.archive import load_object
from megatron_fsdp.checkpoint.folder import CheckpointFolder, whole_box
from megatron_fsdp.checkpoint.manifest import FILE_NAME
from megatron_fsdp.checkpoint.safe_read import read_file, read_json
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

SCHEMA_VERSION = 1
SMALL = 1000
"""Tensors of up to this many elements are shown whole."""
CORNER = 6
"""The indices of each dimension that are shown of larger tensors."""
BLOCK = 1 << 18
"""Elements that are converted to float64 at a time."""

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
        """The kind as a title."""
        generation = f", generation {self.generation}" if self.generation else ""
        return f"{_TITLES[self.format]}{generation}{', with manifest' if self.has_manifest else ''}"


def recognise(folder: CheckpointFolder) -> Kind:
    """Recognise the kind of an open folder, from names alone."""
    tensors, objects = folder.tensors.keys(), folder.objects.keys()
    has_file, has_object = (folder.path / COMMON_FILE).is_file(), COMMON_KEY in objects
    name, generation = "dcp", None
    if has_file or has_object or read_marker(folder.path).get("sharded_backend") == _BACKEND:
        name = _BACKEND
        has_ranges = getattr(folder.metadata, "mcore_data", None)
        generation = "G1" if has_ranges else "G3" if has_object else "G2" if has_file else None
    elif any(key.startswith("model.module.") for key in tensors) or any(key.startswith(GROUP_META) for key in objects):
        name = "fsdp_dtensor"
    if any(".bucket_idx_" in key or "optimizer.distributed." in key for key in tensors):
        optimizer = "bucket_space"
    elif name == _BACKEND:
        optimizer = "model_space" if any("optimizer.state." in key for key in tensors) else "none"
    else:
        optimizer = "per_parameter" if any(key.endswith(_SLOTS) for key in tensors) else "none"
    is_chained = any(key.startswith("chained_") for key in tensors)
    return Kind(name, generation, optimizer, is_chained, (folder.path / FILE_NAME).is_file())


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
    """Read the common state: Megatron's dict of torch_dist, else the objects of the same names."""
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
    """Read `common.pt`, as in Megatron's generations G1 and G2."""
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
    """A missing or damaged file: its state, its name, and the reason."""

    state: Literal["missing", "damaged"]
    name: str
    reason: str


def side_file_problems(folder: CheckpointFolder) -> Iterator[SideFileProblem]:
    """Yield the missing or damaged files among those that Megatron writes with every `torch_dist` checkpoint."""
    marker: Mapping[str, Any] | None = None
    try:
        marker = read_marker(folder.path)
    except CheckpointError as error:
        yield SideFileProblem("damaged", MARKER, str(error))
    backend = (marker or {}).get("sharded_backend")
    has_common = COMMON_KEY in folder.objects or (folder.path / COMMON_FILE).is_file()
    has_ranges = getattr(folder.metadata, "mcore_data", None)
    if not (backend == _BACKEND or has_common or has_ranges or any(map(_SHARDED_OBJECT.search, folder.objects))):
        return
    if not (folder.path / MARKER).is_file():
        reason = "a torch_dist checkpoint has it, and it is written last: the save did not finish, or it was lost"
        yield SideFileProblem("missing", MARKER, reason)
    elif marker is not None and backend != _BACKEND:
        reason = f"says that the format is {ascii(backend)[:100]}, and this is {_BACKEND}"
        yield SideFileProblem("damaged", MARKER, reason)
    if not has_common:
        reason = f"iteration, arguments and parameter groups are neither there nor in {COMMON_KEY}"
        yield SideFileProblem("missing", COMMON_FILE, reason)


# ---- contents --------------------------------------------------------------------------------------------------------


def inspect_folder(
    folder: CheckpointFolder, pattern: str | None = None, *, with_statistics: bool = False
) -> dict[str, Any]:
    """Describe an open checkpoint and the keys that match a regular expression, as docs/schemas/inspect.schema.json."""
    wanted = compiled(pattern)
    problems = [f"{item.name} is {item.state}: {item.reason}" for item in side_file_problems(folder)]
    problems += [] if folder.tensors else ["it holds no tensors"]
    try:
        common = as_json(read_common(folder))
    except CheckpointError as error:
        common = {}
        problems.append(str(error))
    keys = natural_order([*folder.tensors, *folder.objects])
    kept = [key for key in keys if wanted.search(key)]
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(folder.path),
        **asdict(recognise(folder)),
        "marker": as_json(read_marker(folder.path)),
        "common": common,
        "entries": [_listed(folder, key, with_statistics) for key in kept],
        "hidden": len(keys) - len(kept),
        "files": {name: (folder.path / name).stat().st_size for name in sorted(folder.files)},
        "mcore_data": as_json(getattr(folder.metadata, "mcore_data", None) or {}),  # true shapes of generation G1
        "problems": problems,
    }


def _listed(folder: CheckpointFolder, key: str, with_statistics: bool) -> dict[str, Any]:
    """Describe one key; the bytes are those of the elements, or of the stored object, which has no shape and dtype."""
    entry = folder.tensors.get(key)
    spans = [folder.objects[key].span] if entry is None else [chunk.span for chunk in entry.chunks]
    fields: dict[str, Any] = {
        "type": "object" if entry is None else "tensor",
        "key": key,
        "nbytes": spans[0].length if entry is None else entry.nbytes,
        "shape": None if entry is None else list(entry.shape),
        "dtype": None if entry is None else dtype_name(entry.dtype),
        "chunks": len(spans),
        "files": sorted({span.file for span in spans}),
    }
    if with_statistics and entry is not None:
        fields["statistics"] = statistics_of(values for _, values in folder.parts(key))
    return fields


def compiled(pattern: str | None) -> re.Pattern[str]:
    """Compile the user's regular expression."""
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise ConfigurationError(f"{pattern!r} is not a regular expression ({error}); correct it") from error


def natural_order(keys: Iterable[str]) -> list[str]:
    """Sort keys, with numbers inside by value: layers.2 before layers.10."""

    def parts(key: str) -> list[tuple[int, int | str]]:
        return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", key)]

    return sorted(keys, key=parts)


# ---- values ----------------------------------------------------------------------------------------------------------


def statistics_of(chunks: Iterable[torch.Tensor]) -> dict[str, float | None]:
    """Compute statistics of a tensor from its chunks: of its finite elements, or of the magnitudes of complex ones.

    None without finite elements; mean and norm (the root of the sum of squares) are in float64, None on overflow.
    """
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    finite_count = non_finite = zeros = 0
    for chunk in chunks:
        for values in chunk.reshape(-1).split(BLOCK):
            values = (values.abs() if values.dtype.is_complex else values).to(torch.float64)
            finite = values[torch.isfinite(values)]
            non_finite += values.numel() - finite.numel()
            zeros += int((values == 0).sum())
            if finite.numel():
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total += float(finite.sum())
                squares += float(finite.square().sum())
                finite_count += finite.numel()
    mean, norm = total / finite_count if finite_count else math.nan, math.sqrt(squares)
    found = {"minimum": low, "maximum": high, "mean": mean, "norm": norm}
    numbers = {name: value if math.isfinite(value) else None for name, value in found.items()}
    return {**numbers, "non_finite": non_finite, "zeros": zeros}


# ---- one tensor or object --------------------------------------------------------------------------------------------


def show(folder: CheckpointFolder, key: str, part: str | None = None) -> tuple[Any, Box | None]:
    """Read an object, or a part of a tensor and its box; an object has no box.

    Without a part, all of a small tensor or the first corner of a large one. Dimensions given as one index are dropped
    from the values, not from the box.
    """
    if key in folder.objects:
        if part is not None:
            raise ConfigurationError(f"{key} is an object; --slice is for tensors, leave it out")
        return folder.read_object(key), None
    if key not in folder.tensors:
        raise CheckpointError(f"{folder.path} has no {key}{_nearest(folder, key)}")
    entry = folder.tensors[key]
    shown = entry.shape if entry.numel <= SMALL else [min(length, CORNER) for length in entry.shape]
    box, gone = (whole_box(shown), ()) if part is None else parse_part(part, entry.shape)
    values = folder.read_box(key, box.offsets, box.lengths)
    for dim in reversed(gone):
        values = values.select(dim, 0)
    return values, box


def _nearest(folder: CheckpointFolder, key: str) -> str:
    everything = [*folder.tensors, *folder.objects]
    near = difflib.get_close_matches(key, everything, 3, 0.5) or [name for name in everything if key in name][:3]
    return f"; did you mean {' or '.join(near)}?" if near else f"; it has {len(everything)} other keys: see `inspect`"


def parse_part(text: str, shape: Sequence[int]) -> tuple[Box, tuple[int, ...]]:
    """Parse a part in Python's index syntax: `0:2,:8`, `3`, `-1`; also return the dimensions given as one index."""
    words = [word.strip() for word in text.strip().strip("[]").split(",")]
    if len(words) > len(shape):
        raise ConfigurationError(
            f"--slice {text} has {len(words)} dimensions, and the tensor has {len(shape)}: {tuple(shape)}; "
            "give at most as many"
        )
    kept: list[range] = []
    gone: list[int] = []
    words += [":"] * (len(shape) - len(words))
    for dim, (word, length) in enumerate(zip(words, shape, strict=True)):
        where = f"--slice {text}: dimension {dim} of length {length}"
        try:
            if ":" in word:
                start, stop = (int(edge) if edge.strip() else None for edge in word.split(":"))
                kept.append(range(length)[start:stop])
            else:
                first = range(length)[int(word)]
                kept.append(range(first, first + 1))
                gone.append(dim)
        except IndexError as error:
            raise ConfigurationError(f"{where} has no index {word}") from error
        except ValueError as error:
            raise ConfigurationError(
                f"{where} cannot take {word!r}; write 2:5, :8, 3: or 7 (steps are not supported)"
            ) from error
    return Box(tuple(part.start for part in kept), tuple(map(len, kept))), tuple(gone)
