"""Token ids in a file: where they lie, how to map them into memory, what they add up to."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fsdp.errors import ConfigurationError

TokenArray = NDArray[np.integer]
"""[tokens] ids of any integer type."""

_BLOCK = 4 * 1024**2  # tokens looked at in one go


@dataclass(frozen=True)
class TokenFile:
    """A stretch of token ids in a file.

    Attributes:
        path: The file.
        dtype: Of an id, as numpy writes it, such as `<u2`.
        offset: Byte at which the stretch begins.
        count: Tokens in it.
    """

    path: Path
    dtype: str
    offset: int
    count: int

    def open(self) -> TokenArray:
        """Map the ids into memory, read-only.

        Raises:
            ConfigurationError: The file is gone, or shorter than it was.
        """
        dtype = np.dtype(self.dtype)
        try:
            size = self.path.stat().st_size
            if size < self.offset + self.count * dtype.itemsize:
                raise ConfigurationError(
                    f"{self.path} has {size:,} bytes where {self.offset + self.count * dtype.itemsize:,} are needed: "
                    "it was damaged; remove its folder, or make the file again"
                )
            if self.count == 0:  # nothing can be mapped
                return np.empty(0, dtype)
            return np.memmap(self.path, dtype, mode="r", offset=self.offset, shape=(self.count,))
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read ({error.strerror}): it holds the tokens") from None

    def part(self, start: int, stop: int) -> TokenFile:
        """Return the stretch from one token to another, counted from the begin of this one."""
        return TokenFile(self.path, self.dtype, self.offset + start * np.dtype(self.dtype).itemsize, stop - start)


def dtype_for(vocab_size: int) -> np.dtype[np.integer]:
    """Return the smallest type for ids below this that Megatron's files have: uint8, uint16, int32."""
    choices: tuple[tuple[int, np.dtype[np.integer]], ...] = (
        (2**8, np.dtype(np.uint8)),
        (2**16, np.dtype("<u2")),
        (2**31, np.dtype("<i4")),
    )
    for limit, dtype in choices:
        if vocab_size <= limit:
            return dtype
    raise ConfigurationError(f"invalid --vocab-size {vocab_size:,}: give at most {2**31:,}")


def npy_tokens(path: Path) -> TokenFile:
    """Find the token ids in an `.npy` file; only its header is read.

    Raises:
        ConfigurationError: It is no array of one dimension that holds whole numbers.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigurationError(f"{path} is no .npy file of numbers ({error}): give token ids") from None
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{path} holds {array.dtype} of shape {array.shape}: give token ids, whole numbers in one dimension"
        )
    return TokenFile(path, array.dtype.str, int(array.offset), len(array))


def digest(files: tuple[TokenFile, ...], vocab_size: int) -> str:
    """Return a checksum of the ids of all files, in hex, after a look at each of them.

    Args:
        files: Read once, block by block.
        vocab_size: Ids have to be below it.

    Raises:
        ConfigurationError: An id is not; names the place.
    """
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        found.update(f"{file.count}:".encode())
        for start, block in _blocks(file.open()):
            lowest, highest = int(block.min()), int(block.max())
            if lowest < 0 or highest >= vocab_size:
                place = start + int(np.argmax((block < 0) | (block >= vocab_size)))
                raise ConfigurationError(
                    f"token {place:,} of {file.path} has id {int(block[place - start])}, and ids are 0 to "
                    f"{vocab_size - 1}: give the tokenizer, or the --vocab-size, that the file was made with"
                )
            found.update(block.astype("<i4", copy=False).tobytes())  # the same ids have one checksum in any type
    return found.hexdigest()


def crc32_of(files: tuple[TokenFile, ...]) -> int:
    """Return the CRC-32 of the bytes of all files, one after another: many times as fast as `digest`."""
    found = 0
    for file in files:
        for _, block in _blocks(file.open()):
            found = zlib.crc32(block.data, found)
    return found


def _blocks(tokens: TokenArray) -> Iterator[tuple[int, TokenArray]]:
    for start in range(0, len(tokens), _BLOCK):
        yield start, tokens[start : start + _BLOCK]
