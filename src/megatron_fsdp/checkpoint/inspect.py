"""The content of a checkpoint: every key with shape, dtype and bytes, statistics of tensors, and parts of them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder, whole_box
from megatron_fsdp.checkpoint.kinds import (
    as_json,
    dtype_name,
    read_common,
    read_marker,
    recognise,
    side_file_problems,
)
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

SCHEMA_VERSION = 1
SMALL = 1000
"""Tensors of up to this many elements are shown whole."""
CORNER = 6
"""The indices of each dimension that are shown of larger tensors."""
BLOCK = 1 << 18
"""Elements that are converted to float64 at a time."""


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor, of its finite elements but for the counts; of complex numbers, of their magnitudes.

    None without finite elements; mean and norm (the root of the sum of squares) are in float64, None on overflow.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float | None
    non_finite: int
    zeros: int


def inspect_folder(
    folder: CheckpointFolder, pattern: str | None = None, *, with_statistics: bool = False
) -> dict[str, Any]:
    """Describe an open checkpoint and the keys that a regular expression finds, as docs/schemas/inspect.schema.json."""
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
    if entry is None:
        span, nothing = folder.objects[key].span, dict.fromkeys(("shape", "dtype"))
        return {"type": "object", "key": key, "nbytes": span.length, **nothing, "chunks": 1, "files": [span.file]}
    told = {
        "type": "tensor",
        "key": key,
        "nbytes": entry.nbytes,
        "shape": list(entry.shape),
        "dtype": dtype_name(entry.dtype),
        "chunks": len(entry.chunks),
        "files": sorted({chunk.span.file for chunk in entry.chunks}),
    }
    found = asdict(statistics_of(values for _, values in folder.parts(key))) if with_statistics else None
    return told if found is None else {**told, "statistics": found}


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


def statistics_of(chunks: Iterable[torch.Tensor]) -> TensorStatistics:
    """Compute statistics of a tensor that is given in chunks."""
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    finite_count = non_finite = zeros = 0
    for chunk in chunks:
        flat = chunk.reshape(-1)
        for start in range(0, flat.numel(), BLOCK):
            values = flat[start : start + BLOCK]
            values = values.abs().to(torch.float64) if values.dtype.is_complex else values.to(torch.float64)
            finite = values[torch.isfinite(values)]
            non_finite += values.numel() - finite.numel()
            zeros += int((values == 0).sum())
            if finite.numel():
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total += float(finite.sum())
                squares += float(finite.square().sum())
                finite_count += finite.numel()
    if not finite_count:
        return TensorStatistics(None, None, None, 0.0, non_finite, zeros)
    mean, norm = _if_finite(total / finite_count), _if_finite(math.sqrt(squares))
    return TensorStatistics(low, high, mean, norm, non_finite, zeros)


def _if_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- one tensor or object --------------------------------------------------------------------------------------------


def show(folder: CheckpointFolder, key: str, part: str | None = None) -> tuple[Any, Box | None]:
    """Read an object, or a part of a tensor and where that is; an object has no place.

    Without a part, all of a small tensor or the first corner of a large one. Dimensions of which it names one index are
    left out of the values, not of the box.
    """
    if key in folder.objects:
        if part is not None:
            raise ConfigurationError(f"{key} is an object; --slice is for tensors, leave it out")
        return folder.read_object(key), None
    if key not in folder.tensors:
        raise CheckpointError(f"{folder.path} has no {key}{_nearest(folder, key)}")
    entry = folder.tensors[key]
    shape, gone = entry.shape, tuple[int, ...]()
    if part is None:
        box = whole_box(shape if entry.numel <= SMALL else [min(length, CORNER) for length in shape])
    else:
        box, gone = parse_part(part, shape)
    values = folder.read_box(key, box.offsets, box.lengths)
    for dim in reversed(gone):
        values = values.select(dim, 0)
    return values, box


def _nearest(folder: CheckpointFolder, key: str) -> str:
    everything = [*folder.tensors, *folder.objects]
    near = difflib.get_close_matches(key, everything, 3, 0.5) or [name for name in everything if key in name][:3]
    return f"; did you mean {' or '.join(near)}?" if near else f"; it has {len(everything)} other keys: see `inspect`"


def parse_part(text: str, shape: Sequence[int]) -> tuple[Box, tuple[int, ...]]:
    """Read a part as Python writes indices: `0:2,:8`, `3`, `-1`; also return the dimensions given as one index."""
    words = text.strip().strip("[]").split(",")
    if len(words) > len(shape):
        raise ConfigurationError(
            f"--slice {text} has {len(words)} dimensions, and the tensor has {len(shape)}: {tuple(shape)}; "
            "give at most as many"
        )
    offsets, lengths, gone = [], [], []
    for dim, length in enumerate(shape):
        word = words[dim].strip() if dim < len(words) else ":"
        where = f"--slice {text}: dimension {dim} of length {length}"
        try:
            edges = [int(edge) if edge.strip() else None for edge in word.split(":")]
            if len(edges) == 1:
                first = range(length)[int(word)]
                edges = [first, first + 1]
                gone.append(dim)
            start, stop = edges
        except IndexError as error:
            raise ConfigurationError(f"{where} has no index {word}") from error
        except ValueError as error:
            raise ConfigurationError(
                f"{where} cannot take {word!r}; write 2:5, :8, 3: or 7 (steps are not supported)"
            ) from error
        kept = range(length)[start:stop]
        offsets.append(kept.start)
        lengths.append(len(kept))
    return Box(tuple(offsets), tuple(lengths)), tuple(gone)
