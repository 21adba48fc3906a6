from pathlib import Path

import numpy as np
import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data import token_file
from megatron_fsdp.train.data.token_file import TokenFile, digest, dtype_for, npy_tokens


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
    with pytest.raises(ConfigurationError, match="a has 4 bytes where 6 are needed: it was damaged"):
        file.open()
    with pytest.raises(ConfigurationError, match="none cannot be read"):
        TokenFile(tmp_path / "none", "<u2", 0, 3).open()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "u1"), (256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<i4"), (2**31, "<i4")]
)
def test_ids_take_the_smallest_type(vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == np.dtype(dtype)


def test_too_many_ids_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="invalid --vocab-size 2,147,483,649: give at most"):
        dtype_for(2**31 + 1)


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<u4", "<i8"])
def test_an_npy_is_mapped_without_its_header(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(5, dtype=dtype))
    assert npy_tokens(tmp_path / "a.npy").open().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros(3), r"holds float64 of shape \(3,\): give token ids"),
        (np.zeros((2, 2), np.int64), r"holds int64 of shape \(2, 2\)"),
        (np.array([{}], dtype=object), "is no .npy file of numbers"),
    ],
)
def test_other_arrays_are_refused_and_nothing_is_unpickled(tmp_path: Path, array: np.ndarray, said: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ConfigurationError, match=said):
        npy_tokens(tmp_path / "a.npy")


def test_what_is_no_npy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"text")
    with pytest.raises(ConfigurationError, match=r"is no \.npy file of numbers"):
        npy_tokens(tmp_path / "a.npy")


def test_the_same_ids_have_one_checksum_in_any_type_and_any_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = token_bytes(tmp_path / "a", [1, 2, 3], "u1"), token_bytes(tmp_path / "b", [1, 2, 3], "<i8")
    first = digest((narrow, narrow), 4)
    monkeypatch.setattr(token_file, "_BLOCK", 2)
    assert digest((wide, narrow), 4) == first
    assert len(first) == 32


def test_checksums_tell_ids_order_and_cut_apart(tmp_path: Path) -> None:
    file = token_bytes(tmp_path / "a", [1, 2, 3])
    other = token_bytes(tmp_path / "b", [1, 3, 2])
    pairs = [
        (file.part(0, 1), file.part(1, 3)),
        (file.part(0, 2), file.part(2, 3)),
        (other.part(0, 2), other.part(2, 3)),
    ]
    assert len({digest(pair, 4) for pair in pairs}) == 3


@pytest.mark.parametrize(("ids", "place", "wrong"), [([0, 1, 7, 2, 9], 2, 7), ([0, 1, 2, 3, -1], 4, -1)])
def test_an_id_out_of_range_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int], place: int, wrong: int
) -> None:
    monkeypatch.setattr(token_file, "_BLOCK", 2)
    file = token_bytes(tmp_path / "a", ids, "<i4")
    with pytest.raises(ConfigurationError, match=f"token {place} of .*a has id {wrong}, and ids are 0 to 6"):
        digest((file,), 7)


def test_an_empty_npy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"a\.npy is no \.npy file of numbers .*: give token ids"):
        npy_tokens(tmp_path / "a.npy")
