import itertools
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data import tokens as token_file
from megatron_fsdp.train.data.tokens import TokenFile, bin_of, digest, dtype_for, idx_of, open_indexed
from tests.support.on_ranks import refusal

# ---- Megatron's pair of files, written from the layout of the format -------------------------------------------------

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


def token_bytes(path: Path, ids: list[int], dtype: str = "<u2") -> TokenFile:
    array = np.array(ids, dtype)
    path.write_bytes(array.tobytes())
    return TokenFile(path, dtype, 0, len(ids))


def test_ids_are_mapped_and_parts_of_parts_count_from_their_begin(tmp_path: Path) -> None:
    whole = token_bytes(tmp_path / "a", list(range(10)))
    opened = whole.open()
    assert isinstance(opened, np.memmap)
    assert not opened.flags.writeable
    assert whole.part(2, 8).part(1, 3).open().tolist() == [3, 4]
    assert whole.part(4, 4).open().tolist() == []


def test_a_shorter_or_missing_file_is_refused(tmp_path: Path) -> None:
    file = TokenFile(token_bytes(tmp_path / "a", [1, 2]).path, "<u2", 0, 3)
    assert "a has 4 bytes where 6 are needed: it was damaged" in refusal(file.open, error=ConfigurationError)
    assert "none cannot be read" in refusal(TokenFile(tmp_path / "none", "<u2", 0, 3).open, error=ConfigurationError)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "u1"), (256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<i4"), (2**31, "<i4")]
)
def test_ids_take_the_smallest_type(vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == np.dtype(dtype)
    assert "invalid --vocab-size 2,147,483,649: give at most" in refusal(dtype_for, 2**31 + 1, error=ConfigurationError)


def test_the_same_ids_have_one_checksum_in_any_type_and_any_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = token_bytes(tmp_path / "a", [1, 2, 3], "u1"), token_bytes(tmp_path / "b", [1, 2, 3], "<i8")
    first = digest(narrow, 4)
    monkeypatch.setattr(token_file, "_BLOCK", 2)
    assert digest(wide, 4) == first
    assert len(first) == 32


@pytest.mark.parametrize(("ids", "place", "wrong"), [([0, 1, 7, 2, 9], 2, 7), ([0, 1, 2, 3, -1], 4, -1)])
def test_an_id_out_of_range_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int], place: int, wrong: int
) -> None:
    monkeypatch.setattr(token_file, "_BLOCK", 2)
    file = token_bytes(tmp_path / "a", ids, "<i4")
    with pytest.raises(ConfigurationError, match=f"token {place} of .*a has id {wrong}, and ids are 0 to 6"):
        digest(file, 7)


INDEX = (
    b"MMIDIDX\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
    b"\x08"  # uint16
    b"\x02\x00\x00\x00\x00\x00\x00\x00"  # sequences
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # ends of documents
    b"\x03\x00\x00\x00\x02\x00\x00\x00"  # lengths
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00"  # places
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
)
"""Two documents, [1, 2, 300] and [4, 5], written by hand from the layout of the format."""
IDS = b"\x01\x00\x02\x00\x2c\x01\x04\x00\x05\x00"


def write_pair(prefix: Path, index: bytes = INDEX, ids: bytes = IDS) -> Path:
    idx_of(prefix).write_bytes(index)
    bin_of(prefix).write_bytes(ids)
    return prefix


def documents_of(prefix: Path) -> list[list[int]]:
    found = open_indexed(prefix)
    tokens = found.tokens.open()
    starts = [found.document_start(document) for document in range(found.documents + 1)]
    return [tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]


def test_files_made_by_hand_are_read_and_are_what_the_writer_of_these_tests_writes(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "ids")
    assert documents_of(prefix) == [[1, 2, 300], [4, 5]]
    assert open_indexed(prefix).tokens.dtype == "<u2"
    assert documents_of(write_pair(prefix, INDEX + b"\0\0")) == [[1, 2, 300], [4, 5]]  # modes are ignored
    write_indexed(prefix, [[[1, 2, 300]], [[4, 5]]])
    assert (idx_of(prefix).read_bytes(), bin_of(prefix).read_bytes()) == (INDEX, IDS)


@given(
    documents=st.lists(st.lists(st.integers(0, 250), max_size=9), min_size=1, max_size=9).filter(any),
    dtype=st.sampled_from(["|u1", "<u2", "<i4", "<i8"]),
)
def test_any_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    prefix = tmp_path_factory.mktemp("pair") / "ids"
    write_indexed(prefix, [[ids] if ids else [] for ids in documents], dtype)
    assert documents_of(prefix) == documents


@pytest.mark.parametrize(
    ("index", "ids", "said"),
    [
        (b"MMIDIDX", IDS, "does not begin as Megatron's index files do"),
        (b"X" + INDEX[1:], IDS, "does not begin as Megatron's index files do"),
        (INDEX[:9] + b"\x02" + INDEX[10:], IDS, "has version 2 and only 1 is known"),
        (INDEX[:17] + b"\x07" + INDEX[18:], IDS, "says that ids have the type 7: give whole numbers"),
        (INDEX[:-1], IDS, "has not the 82 bytes that its header says"),
        (INDEX, IDS[:-2], r"ids\.bin has 8 bytes and its index says 10"),
        (INDEX, IDS + b"\0", r"ids\.bin has 11 bytes and its index says 10"),
        (INDEX[:50] + b"\x08" + INDEX[51:], IDS, "sequences do not lie one after another"),
        (INDEX[:-8] + b"\x01" + INDEX[-7:], IDS, "ends of documents do not go from 0 to 2"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 1) + b"\0" * 8, b"", "holds no sequence"),
    ],
)
def test_damaged_pairs_are_refused(tmp_path: Path, index: bytes, ids: bytes, said: str) -> None:
    assert re.search(said, refusal(open_indexed, write_pair(tmp_path / "ids", index, ids), error=ConfigurationError))
