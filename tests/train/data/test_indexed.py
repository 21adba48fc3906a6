import contextlib
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data import indexed
from megatron_fsdp.train.data.indexed import IndexedWriter, bin_of, idx_of, open_indexed

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


def write(prefix: Path, documents: list[list[int]], dtype: str) -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document[:2]))
            writer.add(np.array(document[2:], dtype=np.int64))
            writer.end_document()


def test_files_made_by_hand_are_read(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "ids")
    assert documents_of(prefix) == [[1, 2, 300], [4, 5]]
    assert open_indexed(prefix).tokens.dtype == "<u2"


def test_what_is_written_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "ids", [[1, 2, 300], [4, 5]], "<u2")
    assert idx_of(tmp_path / "ids").read_bytes() == INDEX
    assert bin_of(tmp_path / "ids").read_bytes() == IDS


def test_modes_after_the_index_are_ignored(tmp_path: Path) -> None:
    assert documents_of(write_pair(tmp_path / "ids", INDEX + b"\0\0")) == [[1, 2, 300], [4, 5]]


@given(
    documents=st.lists(st.lists(st.integers(0, 250), max_size=9), min_size=1, max_size=9).filter(any),
    dtype=st.sampled_from(["|u1", "<u2", "<i4", "<i8"]),
)
def test_any_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    prefix = tmp_path_factory.mktemp("pair") / "ids"
    write(prefix, documents, dtype)
    assert documents_of(prefix) == documents


def test_a_document_may_have_several_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_LONGEST", 4)
    write(tmp_path / "ids", [list(range(10)), [], [7]], "|u1")
    assert documents_of(tmp_path / "ids") == [list(range(10)), [], [7]]
    assert open_indexed(tmp_path / "ids").lengths.tolist() == [4, 4, 2, 1]


def test_pairs_are_appended_document_by_document(tmp_path: Path) -> None:
    write(tmp_path / "b", [[3], [], [4, 5]], "|u1")
    with IndexedWriter(tmp_path / "a", np.dtype("u1")) as writer:
        writer.add(np.array([1, 2]))
        writer.end_document()
        writer.add_all(open_indexed(tmp_path / "b"))
    assert documents_of(tmp_path / "a") == [[1, 2], [3], [], [4, 5]]


def test_an_interrupted_writer_leaves_no_index(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError), IndexedWriter(tmp_path / "ids", np.dtype("u1")) as writer:
        writer.add(np.array([1]))
        raise KeyError
    with pytest.raises(ConfigurationError, match=r"ids\.idx does not exist: .* belong together"):
        open_indexed(tmp_path / "ids")


@pytest.mark.parametrize(
    ("index", "ids", "said"),
    [
        (b"MMIDIDX", IDS, "does not begin as Megatron's index files do"),
        (b"X" + INDEX[1:], IDS, "does not begin as Megatron's index files do"),
        (INDEX[:9] + b"\x02" + INDEX[10:], IDS, "has version 2 and only 1 is known"),
        (INDEX[:17] + b"\x07" + INDEX[18:], IDS, "says that ids are float32: give whole numbers"),
        (INDEX[:17] + b"\x63" + INDEX[18:], IDS, "says that ids are the unknown code 99"),
        (INDEX[:-1], IDS, "has 81 bytes and its header says 82: it was damaged"),
        (INDEX, IDS[:-2], r"ids\.bin has 8 bytes and its index says 10"),
        (INDEX, IDS + b"\0", r"ids\.bin has 11 bytes and its index says 10"),
        (INDEX[:50] + b"\x08" + INDEX[51:], IDS, "sequences do not lie one after another"),
        (INDEX[:-8] + b"\x01" + INDEX[-7:], IDS, "ends of documents do not go from 0 to 2"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 1) + b"\0" * 8, b"", "holds no sequence"),
    ],
)
def test_damaged_pairs_are_refused(tmp_path: Path, index: bytes, ids: bytes, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_indexed(write_pair(tmp_path / "ids", index, ids))


def test_sequences_are_checked_beyond_the_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_CHECKED", 2)
    write(tmp_path / "ids", [[i] for i in range(5)], "|u1")
    assert documents_of(tmp_path / "ids") == [[0], [1], [2], [3], [4]]
    content = bytearray(idx_of(tmp_path / "ids").read_bytes())
    content[34 + 4 * 5 + 8 * 4] = 9
    with pytest.raises(ConfigurationError, match="sequences do not lie one after another"):
        open_indexed(write_pair(tmp_path / "ids", bytes(content), bytes(5)))
