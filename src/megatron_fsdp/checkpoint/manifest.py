"""The manifest of a checkpoint, in readable JSON: its entries with a checksum of each; and that checksum."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.errors import CheckpointError

FILE_NAME = "manifest.json"
VERSION = 1
CHECKSUM_NAME = "multilinear64-v1"
BLOCK = 1 << 16
_MASK = (1 << 64) - 1
_WORDS = {1: torch.int8, 2: torch.int16}


@dataclass(frozen=True)
class TensorSeal:
    """The sealed properties of a tensor; its checksum does not depend on the division and the number of ranks."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The sealed content of a checkpoint: tensors by key, SHA-256 of the bytes of objects, and facts for people."""

    tensors: Mapping[str, TensorSeal]
    objects: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION
    checksum_name: str = CHECKSUM_NAME

    def __contains__(self, key: str) -> bool:
        return key in self.tensors or key in self.objects

    def to_json(self) -> str:
        """Return the manifest as JSON; keys are sorted, so that equal contents give equal text."""
        tensors = {key: {**vars(seal), "shape": list(seal.shape)} for key, seal in self.tensors.items()}
        return json.dumps({**vars(self), "tensors": tensors}, sort_keys=True)  # indenting takes five times as long

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; None if there is none, as in checkpoints of other programs."""
        path = folder / FILE_NAME
        if not path.exists():
            return None
        found = read_json(path)
        version: Any = found.get("version") if isinstance(found, dict) else None
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                f"{path} is of version {version}, and this library reads up to version {VERSION}; update the library"
            )
        try:
            tensors = {
                key: TensorSeal(tuple(seal["shape"]), seal["dtype"], seal["checksum"])
                for key, seal in found["tensors"].items()
            }
            made = cls(tensors, dict(found["objects"]), dict(found["facts"]), version, found["checksum_name"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}") from error
        texts = [made.checksum_name, *made.objects.values()]
        texts += [text for seal in tensors.values() for text in (seal.dtype, seal.checksum)]
        numbers = [number for seal in tensors.values() for number in seal.shape]
        is_sound = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in numbers)
        if not is_sound or type(version) is not int or version < 1:
            raise CheckpointError(f"{path} is damaged: it has other things where text or numbers should stand")
        return made


# ---- checksums -------------------------------------------------------------------------------------------------------
#
# A checksum of a global tensor that does not depend on how the tensor is sharded.
#
#     sum over words k of  word_k * w(k)   mod 2^64,   w(k) = T0[k0] * T1[k1] * T2[k2] * ...   mod 2^64
#
# The words are the elements' bytes as signed integers: one per element of up to 4 bytes, the 4-byte pieces of longer
# ones. k is a word's place in the flattened global tensor, k0, k1, ... its digits to the base 2^16, and the tables hold
# pseudo-random odd numbers (a multilinear hash, Carter and Wegman 1979, with weights by tabulation). Parts of a tensor
# are summed wherever they lie, in any order, and the sums added. Any change of a single word changes the sum for
# certain, since w is odd and a word shorter than the sum; other changes go undetected with a probability of about 2^-30
# at worst. It is no protection against deliberate manipulation.


def checksum_box(values: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Compute the share of a box in the checksum of its global tensor, from 0 to 2^64 - 1; add them with `combine`.

    `values` have the shape of the box, and any dense dtype; `offsets` and `shape` are in and of the global tensor.
    """
    if values.numel() == 0:
        return 0
    words = _words(values)
    shape, offsets = (*shape, words.shape[-1]), (*offsets, 0)
    lengths = tuple(words.shape)
    cut = [dim for dim, (length, total) in enumerate(zip(lengths, shape, strict=True)) if length != total]
    outer = cut[-1] if cut else 0  # the trailing dimensions from here on form runs of the flattened tensor
    run = math.prod(lengths[outer:])
    runs = words.reshape(-1, run)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    starts = torch.tensor([first], dtype=torch.int64)  # of the runs, in the flattened tensor
    for length, stride in zip(lengths[:outer], strides, strict=False):
        starts = (starts[:, None] + torch.arange(length, dtype=torch.int64) * stride).reshape(-1)
    if run >= BLOCK // 16 or runs.shape[0] == 1:
        return _total([_run_sum(runs[position], start) for position, start in enumerate(starts.tolist())])
    rows, sums = max(1, BLOCK // run), []
    starts, inside = starts.to(words.device), torch.arange(run, device=words.device)
    for row in range(0, runs.shape[0], rows):
        places = starts[row : row + rows, None] + inside
        weights = _table(0, words.device)[places & 0xFFFF] * _high_parts(places)
        sums.append((runs[row : row + rows].to(torch.int64) * weights).sum())
    return _total(sums)


def combine(sums: Iterable[int]) -> int:
    """Add the checksums of boxes to that of the whole tensor."""
    return sum(sums) & _MASK


def _total(sums: list[torch.Tensor]) -> int:
    """Sum on the device and wait for it once."""
    return int(sums[0] if len(sums) == 1 else torch.stack(sums).sum()) & _MASK


def _words(values: torch.Tensor) -> torch.Tensor:
    """View the bytes of the elements as words, in a new last dimension; copies only if not contiguous."""
    values = values.detach().resolve_conj().resolve_neg().contiguous().unsqueeze(-1)
    return values.view(_WORDS.get(values.element_size(), torch.int32))


def _run_sum(words: torch.Tensor, start: int) -> torch.Tensor:
    """Sum over consecutive words; in blocks in which all but the lowest digit of the place are constant."""
    low, sums = _table(0, words.device), []
    blocks = range(start - start % BLOCK, start + words.shape[0], BLOCK)
    for block in blocks:
        here = words[max(0, block - start) : block - start + BLOCK].to(torch.int64)
        weights = low[max(0, start - block) :][: here.shape[0]]
        # Accelerators have no dot of integers.
        sums.append(torch.dot(here, weights) if here.device.type == "cpu" else (here * weights).sum())
    return (torch.stack(sums) * _high_parts(torch.arange(blocks.start, blocks.stop, BLOCK, device=words.device))).sum()


def _high_parts(places: torch.Tensor) -> torch.Tensor:
    """Return the products of the tables' entries for all but the lowest digit of places."""
    found = torch.ones_like(places)
    for level in range(1, 4):
        found *= _table(level, places.device)[(places >> (16 * level)) & 0xFFFF]
    return found


@functools.lru_cache(maxsize=16)
def _table(level: int, device: torch.device) -> torch.Tensor:
    """Return 2^16 pseudo-random odd numbers by splitmix64 (Steele et al. 2014); above level 0 the first is 1."""
    u64 = np.uint64
    x: npt.NDArray[np.uint64] = np.arange(1 + level * BLOCK, 1 + (level + 1) * BLOCK, dtype=u64)
    x = x * u64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> u64(27))) * u64(0x94D049BB133111EB)
    x = (x ^ (x >> u64(31))) | u64(1)
    if level:
        x[0] = 1  # so that places below 2^16, 2^32 ... need no further tables
    return torch.from_numpy(x.view(np.int64)).to(device)
