from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.train.data import encoding
from megatron_fsdp.train.data.encoding import (
    Encoded,
    count_bytes,
    encode_documents,
    is_fair,
    pieces,
    sample_texts,
    side_of,
)
from megatron_fsdp.train.data.texts import Document
from megatron_fsdp.train.data.token_file import TokenFile
from megatron_fsdp.train.data.tokenizer import train_bpe
from megatron_fsdp.train.data.vocabulary import ByteVocabulary
from megatron_fsdp.train.options.job import Split, parse_split

TEXTS = [f"text number {i}" for i in range(400)]
SPLIT = Split(0.95, 0.05)


def documents(texts: list[str]) -> Iterator[Document]:
    return (iter([text]) if text else iter(()) for text in texts)


def encode(texts: list[str], split: Split, folder: Path) -> Encoded:
    return encode_documents(documents(texts), ByteVocabulary(), split, folder)


def texts_in(file: TokenFile) -> list[str]:
    return bytes(file.open().tolist()).decode().split("\0")[:-1]


def test_training_and_held_out_texts_are_disjoint_and_complete(tmp_path: Path) -> None:
    found = encode(TEXTS, SPLIT, tmp_path)
    training, held_out = texts_in(found.training), texts_in(found.held_out)
    assert sorted(training + held_out) == sorted(TEXTS)
    assert [text for text in TEXTS if text in set(training)] == training  # in their order
    assert 5 <= len(held_out) <= 40  # 5 % of 400 is 20
    assert found.held_out_bytes == found.held_out.count == sum(len(text) + 1 for text in held_out)
    assert not found.is_cut


def test_the_split_depends_on_content_and_not_on_order(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = encode(TEXTS, SPLIT, tmp_path / "a"), encode(TEXTS[::-1], SPLIT, tmp_path / "b")
    assert set(texts_in(one.held_out)) == set(texts_in(other.held_out))


def test_copies_of_a_text_lie_on_one_side(tmp_path: Path) -> None:
    found = encode([f"text number {i % 200}" for i in range(400)], SPLIT, tmp_path)
    training, held_out = texts_in(found.training), texts_in(found.held_out)
    assert set(training) & set(held_out) == set()
    assert all(side.count(text) == 2 for side in (training, held_out) for text in side)


def test_a_third_share_is_left_aside(tmp_path: Path) -> None:
    found = encode(TEXTS, parse_split("50,25,25"), tmp_path)
    counts = len(texts_in(found.training)), len(texts_in(found.held_out))
    assert 160 <= counts[0] <= 240
    assert 70 <= counts[1] <= 130
    assert 70 <= 400 - sum(counts) <= 130


def test_of_a_few_documents_none_is_left_aside() -> None:
    found = list(pieces(documents(TEXTS[:99]), parse_split("1,1,98")))
    assert len(found) == 99
    assert len(list(pieces(documents(TEXTS[:100]), parse_split("1,1,98")))) < 10


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    found = encode(["0123456789" * 10], SPLIT, tmp_path)
    assert found.is_cut
    assert bytes(found.training.open().tolist()).decode() == "0123456789" * 9 + "012345"
    assert bytes(found.held_out.open().tolist()) == b"6789\0"
    assert found.held_out_bytes == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["training.bin", "training.idx"]


def test_a_huge_document_is_not_held_out_whole(tmp_path: Path) -> None:
    huge = next(text for text in ("x" * n for n in range(2000, 9000)) if side_of(text, SPLIT) == "held_out")
    found = encode([*TEXTS[:50], huge], SPLIT, tmp_path)
    total = found.training.count + found.held_out.count
    assert total == sum(len(text) + 1 for text in (*TEXTS[:50], huge))
    assert found.held_out.count == round(0.05 * total)


@pytest.mark.parametrize(
    ("training", "held_out", "expected"),
    [
        (95, 5, True),
        (80, 20, True),
        (79, 21, False),
        (9876, 124, False),
        (9875, 125, True),
        (0, 5, False),
        (0, 0, False),
    ],
)
def test_shares_may_be_off_by_a_factor_of_four(training: int, held_out: int, expected: bool) -> None:
    assert is_fair(training, held_out, SPLIT) is expected


def test_no_text_at_all_is_no_tokens(tmp_path: Path) -> None:
    found = encode(["", ""], SPLIT, tmp_path)
    assert (found.training.count, found.held_out.count, found.held_out_bytes) == (0, 0, 0)


@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=6), batch=st.integers(1, 9))
def test_pieces_and_batches_do_not_change_bytes(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], batch: int
) -> None:
    texts = [["é" * n, "ab\n", "c"][: n % 3 + 1] for n in cuts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_BATCH", batch)
        found = encode_documents(map(iter, texts), ByteVocabulary(), SPLIT, tmp_path_factory.mktemp("tokens"))
    both = [*found.training.open().tolist(), *found.held_out.open().tolist()]
    if found.is_cut:  # all on one side before the cut, or in the order of sides
        assert sorted(bytes(both).split(b"\0")) == sorted([*("".join(parts).encode() for parts in texts), b""])
    else:
        assert len(both) == sum(len("".join(parts).encode()) + 1 for parts in texts)


def test_a_sample_for_a_tokenizer_is_spread_bounded_and_without_held_out_texts() -> None:
    size = sum(map(len, TEXTS))
    chosen = sample_texts(documents(TEXTS), SPLIT, size, limit=size // 10)
    held_out = {text for text in TEXTS if side_of(text, SPLIT) == "held_out"}
    assert chosen == [text for text in TEXTS[::10] if text not in held_out]
    assert sample_texts(documents(TEXTS), SPLIT, size, limit=size) == [text for text in TEXTS if text not in held_out]


def test_a_sample_of_held_out_texts_only_has_them() -> None:
    text = next(text for text in TEXTS if side_of(text, SPLIT) == "held_out")
    assert sample_texts(documents([text]), SPLIT, 10) == [text]


def test_bytes_of_tokens_are_counted_or_projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bpe = train_bpe(TEXTS, vocab_size=300)
    found = encode_documents(documents(TEXTS), bpe, SPLIT, tmp_path)
    expected = sum(len(text) + 1 for text in TEXTS if side_of(text, SPLIT) == "held_out")
    assert found.held_out_bytes == count_bytes(found.held_out, bpe) == expected
    monkeypatch.setattr(encoding, "_COUNTED", found.held_out.count // 2)
    assert count_bytes(found.held_out, bpe) == pytest.approx(expected, rel=0.05)
