"""Token ids on disk, mapped into memory: raw ranges, `.npy` files, and Megatron's pair of files.

Of the pair PREFIX.bin holds ids, and PREFIX.idx says where. The index, little-endian:
the magic `MMIDIDX` and two zero bytes, the version (u64), the code of the ids' type (u8), the number of sequences S
(u64) and of ends of documents D (u64); then S int32 lengths in tokens, S int64 places in bytes, and D int64 numbers of
sequences at which documents end, the first of them 0. S bytes of modes may follow.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fsdp.errors import ConfigurationError

TokenArray = NDArray[np.integer]
"""[tokens] ids of any integer type."""

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_BLOCK = 4 * 1024**2  # tokens, or sequences, looked at in one go


@dataclass(frozen=True)
class TokenFile:
    """A range of `count` token ids in a file, from the byte `offset` on; `dtype` is numpy's, such as `<u2`."""

    path: Path
    dtype: str
    offset: int
    count: int

    @property
    def itemsize(self) -> int:
        """Bytes of an id."""
        return np.dtype(self.dtype).itemsize

    def open(self) -> TokenArray:
        """Map the ids into memory, read-only."""
        needed = self.offset + self.count * self.itemsize
        try:
            size = self.path.stat().st_size
            if size < needed:
                raise ConfigurationError(
                    f"{self.path} has {size:,} bytes where {needed:,} are needed: it was damaged; remove its folder, "
                    "or make the file again"
                )
            if self.count == 0:  # nothing can be mapped
                return np.empty(0, self.dtype)
            return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.count,))
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read ({error.strerror}): it holds the tokens") from None

    def part(self, start: int, stop: int) -> TokenFile:
        """Return the range from one token to another, counted from the begin of this one."""
        return TokenFile(self.path, self.dtype, self.offset + start * self.itemsize, stop - start)


def dtype_for(vocab_size: int) -> np.dtype[np.integer]:
    """Return the smallest dtype of Megatron's files for ids below `vocab_size`: uint8, uint16 or int32."""
    for limit, name in ((2**8, "|u1"), (2**16, "<u2"), (2**31, "<i4")):
        if vocab_size <= limit:
            return np.dtype(name)
    raise ConfigurationError(f"invalid --vocab-size {vocab_size:,}: give at most {2**31:,}")


def digest(file: TokenFile, vocab_size: int) -> str:
    """Check that all ids are below `vocab_size`; return a checksum in hex, which does not depend on their dtype."""
    found = hashlib.blake2b(digest_size=16)
    tokens = file.open()
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        if int(block.min()) < 0 or int(block.max()) >= vocab_size:
            place = int(np.argmax((block < 0) | (block >= vocab_size)))
            raise ConfigurationError(
                f"token {start + place:,} of {file.path} has id {int(block[place])}, and ids are 0 to "
                f"{vocab_size - 1}: give the tokenizer, or the --vocab-size, that the file was made with"
            )
        found.update(block.astype("<i4", copy=False).tobytes())
    return found.hexdigest()


def npy_tokens(path: Path) -> TokenFile:
    """Find the token ids in an `.npy` file; only its header is read."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigurationError(f"{path} is no .npy file of numbers ({error}): give token ids") from None
    if not isinstance(found, np.memmap) or found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{path} holds {found.dtype} of shape {found.shape}: give token ids, whole numbers in one dimension"
        )
    return TokenFile(path, found.dtype.str, int(found.offset), len(found))


def bin_of(prefix: Path) -> Path:
    """Return the file of ids of a pair."""
    return prefix.with_name(prefix.name + ".bin")


def idx_of(prefix: Path) -> Path:
    """Return the index of a pair."""
    return prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True)
class Indexed:
    """A pair of files that fit together."""

    tokens: TokenFile
    lengths: NDArray[np.int32]  # [S] tokens of each sequence
    pointers: NDArray[np.int64]  # [S] byte at which each begins
    ends: NDArray[np.int64]  # [D] sequences before each document; the last is S

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.ends) - 1

    def document_start(self, document: int) -> int:
        """Return the number of tokens before a document; for the index after the last, the number of all."""
        sequence = int(self.ends[document])
        is_end = sequence == len(self.pointers)
        return self.tokens.count if is_end else int(self.pointers[sequence]) // self.tokens.itemsize


def write_index(prefix: Path, dtype: np.dtype[np.integer], lengths: Sequence[int], ends: Sequence[int]) -> None:
    """Write the index of a pair whose sequences lie one after another."""
    code = next(code for code, name in _DTYPES.items() if np.dtype(name) == dtype)
    sizes = np.array(lengths, "<i4")
    pointers = np.cumsum(sizes, dtype="<i8") * dtype.itemsize - sizes.astype("<i8") * dtype.itemsize
    header = _HEADER.pack(MAGIC, VERSION, code, len(lengths), len(ends))
    idx_of(prefix).write_bytes(header + sizes.tobytes() + pointers.tobytes() + np.array(ends, "<i8").tobytes())


def open_indexed(prefix: Path) -> Indexed:
    """Map a pair of files into memory; neither is read whole."""
    index, ids = idx_of(prefix), bin_of(prefix)
    for path in (index, ids):
        if not path.is_file():
            raise ConfigurationError(f"{path} does not exist: {prefix}.bin and {prefix}.idx belong together")
    dtype, sequences, ends = _read_header(index)
    offsets = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * ends])
    size = index.stat().st_size
    if size not in (offsets[3], offsets[3] + sequences):
        raise ConfigurationError(
            f"{index} has {size:,} bytes and its header says {offsets[3]:,}: it was damaged; make it again"
        )
    if sequences == 0:
        raise ConfigurationError(f"{index} holds no sequence: give token files with text in them")
    found = Indexed(
        TokenFile(ids, dtype.str, 0, ids.stat().st_size // dtype.itemsize),
        np.memmap(index, "<i4", "r", int(offsets[0]), (sequences,)),
        np.memmap(index, "<i8", "r", int(offsets[1]), (sequences,)),
        np.memmap(index, "<i8", "r", int(offsets[2]), (ends,)),
    )
    _check(found, index)
    return found


def _read_header(index: Path) -> tuple[np.dtype[np.integer], int, int]:
    """Read dtype of the ids, number of sequences and number of document ends."""
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise ConfigurationError(f"{index} does not begin as Megatron's index files do: give the prefix of such a pair")
    _, version, code, sequences, ends = _HEADER.unpack(head)
    if version != VERSION:
        raise ConfigurationError(f"{index} has version {version} and only {VERSION} is known: write it with that one")
    if code not in _DTYPES:
        kind = _FLOATS.get(code, f"the unknown code {code}")
        raise ConfigurationError(f"{index} says that ids are {kind}: give whole numbers (codes {sorted(_DTYPES)})")
    return np.dtype(_DTYPES[code]), sequences, ends


def _check(found: Indexed, index: Path) -> None:
    """Check that every sequence begins where the one before it ends, so that the ids are contiguous."""
    expected = 0
    for start in range(0, len(found.lengths), _BLOCK):
        sizes = found.lengths[start : start + _BLOCK].astype(np.int64) * found.tokens.itemsize
        stops = expected + np.cumsum(sizes)
        if not np.array_equal(found.pointers[start : start + _BLOCK], stops - sizes):
            raise ConfigurationError(f"{index}: sequences do not lie one after another: write the pair again")
        expected = int(stops[-1])
    size = found.tokens.path.stat().st_size
    if expected != size:
        raise ConfigurationError(
            f"{found.tokens.path} has {size:,} bytes and its index says {expected:,}: they are not of one pair, or "
            "one was damaged; make them again"
        )
    ends = found.ends
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(found.lengths) or bool(np.any(np.diff(ends) < 0)):
        raise ConfigurationError(f"{index}: ends of documents do not go from 0 to {len(found.lengths)}: make it again")
