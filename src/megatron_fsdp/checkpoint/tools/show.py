"""One tensor or object of a checkpoint, or a part of a tensor; only the chunks that it lies in are read."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.checkpoint.checksum import checksum_box, combine
from megatron_fsdp.checkpoint.folder import CheckpointFolder, TensorEntry
from megatron_fsdp.checkpoint.tools.pieces import pieces, whole
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

SMALL = 1000
"""Tensors of at most so many elements are shown whole."""
CORNER = 6
"""Of larger ones, so many indices of each dimension."""


@dataclass(frozen=True)
class ShownTensor:
    """A tensor, or a part of it.

    Attributes:
        entry: What the metadata say.
        box: The part that is shown.
        values: Shaped as the part was asked for: dimensions given as one index are gone.
        checksum: Of the part, as 16 hexadecimal digits, taken as a tensor of its own (of the whole tensor: as in
            manifests); None unless asked for.
    """

    entry: TensorEntry
    box: Box
    values: torch.Tensor
    checksum: str | None


@dataclass(frozen=True)
class ShownObject:
    """An object.

    Attributes:
        key: Its name.
        value: Read as data.
        nbytes: As it is stored.
        sha256: Of the stored bytes.
    """

    key: str
    value: object
    nbytes: int
    sha256: str


def show(
    folder: CheckpointFolder, key: str, part: str | None = None, *, with_hash: bool = False
) -> ShownTensor | ShownObject:
    """Read one entry.

    Args:
        folder: Opened.
        key: Of a tensor or an object.
        part: Such as `0:2,:8` or `3,-1`; None: all of a small tensor, the first corner of a large one.
        with_hash: Also compute the checksum, of the part if one is given, else of the whole tensor.

    Raises:
        CheckpointError: There is no such key (the nearest ones are named), or its bytes are damaged.
        ConfigurationError: The part does not fit, or is given for an object.
    """
    if key in folder.objects:
        if part is not None:
            raise ConfigurationError(f"{key} is an object; --slice is for tensors, leave it out")
        raw = folder.read_bytes(key)
        return ShownObject(key, folder.read_object(key), len(raw), hashlib.sha256(raw).hexdigest())
    if key not in folder.tensors:
        raise CheckpointError(f"{folder.path} has no {key}{_nearest(folder, key)}")
    entry = folder.tensors[key]
    no_dims: tuple[int, ...] = ()
    box, gone = (_corner(entry), no_dims) if part is None else parse_part(part, entry.shape)
    values = folder.read_box(key, box.offsets, box.lengths)
    for dim in reversed(gone):
        values = values.select(dim, 0)
    hashed = checksum_of(folder, key, whole(entry.shape) if part is None else box) if with_hash else None
    return ShownTensor(entry, box, values, hashed)


def _nearest(folder: CheckpointFolder, key: str) -> str:
    everything = [*folder.tensors, *folder.objects]
    near = difflib.get_close_matches(key, everything, 3, 0.5) or [name for name in everything if key in name][:3]
    return f"; did you mean {' or '.join(near)}?" if near else f"; it has {len(everything)} other keys: see `inspect`"


def checksum_of(folder: CheckpointFolder, key: str, box: Box) -> str:
    """Checksum of a part of a tensor as a tensor of its own, chunk by chunk."""
    parts = []
    for piece in pieces(folder, key, box):
        offsets = [mine - first for mine, first in zip(piece.box.offsets, box.offsets, strict=True)]
        parts.append(checksum_box(piece.values, offsets, box.lengths))
    return f"{combine(parts):016x}"


def _corner(entry: TensorEntry) -> Box:
    if entry.numel <= SMALL:
        return whole(entry.shape)
    return Box((0,) * len(entry.shape), tuple(min(length, CORNER) for length in entry.shape))


def parse_part(text: str, shape: Sequence[int]) -> tuple[Box, tuple[int, ...]]:
    """Read a part as Python writes indices: `0:2,:8`, `3`, `-1`, `...` at the end is not needed.

    Returns:
        The box, and the dimensions that were given as one index.

    Raises:
        ConfigurationError: It is not of this form, or outside of the tensor.
    """
    words = text.strip().strip("[]").split(",")
    if len(words) > len(shape):
        raise ConfigurationError(
            f"--slice {text} has {len(words)} dimensions, and the tensor has {len(shape)}: {tuple(shape)}; "
            "give at most as many"
        )
    offsets, lengths, gone = [], [], []
    for dim, length in enumerate(shape):
        word = words[dim].strip() if dim < len(words) else ":"
        first, count = _range(word, length, f"--slice {text}: dimension {dim} of length {length}")
        offsets.append(first)
        lengths.append(count)
        if ":" not in word:
            gone.append(dim)
    return Box(tuple(offsets), tuple(lengths)), tuple(gone)


def _range(word: str, length: int, where: str) -> tuple[int, int]:
    parts = word.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        raise ConfigurationError(f"{where} cannot take {word!r}; write 2:5, :8, 3: or 7") from None
    if len(parts) == 2:
        start, stop, _ = slice(*numbers).indices(length)
        return start, max(0, stop - start)
    number = numbers[0]
    if len(parts) != 1 or number is None:
        raise ConfigurationError(f"{where} cannot take {word!r}; write 2:5, :8, 3: or 7 (steps are not supported)")
    if not -length <= number < length:
        raise ConfigurationError(f"{where} has no index {number}")
    return number % length, 1
