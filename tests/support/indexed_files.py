"""Megatron's pair of token files, written from the layout of the format."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

_CODES = {"|u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def write_indexed(prefix: Path, documents: Sequence[Sequence[ArrayLike]], dtype: str = "<u2") -> None:
    """Write documents of one or more sequences each to PREFIX.bin and PREFIX.idx."""
    sequences = [np.asarray(ids, dtype) for document in documents for ids in document]
    lengths = np.array([len(ids) for ids in sequences], "<i4")
    stops = np.cumsum(lengths, dtype="<i8") * np.dtype(dtype).itemsize
    ends = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, _CODES[dtype], len(sequences), len(ends))
    places = stops - lengths * np.dtype(dtype).itemsize
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    prefix.with_name(f"{prefix.name}.idx").write_bytes(
        head + b"".join(part.tobytes() for part in (lengths, places, ends))
    )
