from pathlib import Path

import numpy as np
import pytest
from megatron_fsdp.train.vocabulary import BpeVocabulary, ByteVocabulary, Vocabulary

TEXTS = ["def add(a, b):\n    return a + b\n", "naïve — 你好\n\tend"]


@pytest.fixture(scope="module")
def bpe() -> BpeVocabulary:
    return BpeVocabulary.train(TEXTS * 20, vocab_size=280)


def split(ids: list[int], end_id: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == end_id:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts[:-1]


def test_bytes_are_the_utf8_of_the_text_and_a_nul() -> None:
    ids = ByteVocabulary().encode(["é", "a"])
    assert ids.dtype == np.uint8
    assert ids.tolist() == [0xC3, 0xA9, 0, 97, 0]


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_texts_come_back_as_they_were(name: str, bpe: BpeVocabulary) -> None:
    vocabulary: Vocabulary = bpe if name == "bpe" else ByteVocabulary()
    ids = vocabulary.encode(TEXTS).tolist()
    assert [vocabulary.decode(part) for part in split(ids, vocabulary.end_id)] == TEXTS
    assert max(ids) < vocabulary.vocab_size


def test_broken_utf8_becomes_a_replacement_character() -> None:
    assert ByteVocabulary().decode([97, 0xC3, 98]) == "a\ufffdb"


def test_bpe_has_the_size_asked_for_and_is_shorter_than_bytes(bpe: BpeVocabulary) -> None:
    assert bpe.vocab_size == 280
    ids = bpe.encode(TEXTS)
    assert ids.dtype == np.uint16
    assert len(ids) < len(ByteVocabulary().encode(TEXTS))


def test_separator_is_decoded_to_nothing(bpe: BpeVocabulary) -> None:
    assert bpe.decode([bpe.end_id]) == ""


def test_bpe_survives_saving_and_loading(bpe: BpeVocabulary, tmp_path: Path) -> None:
    bpe.save(tmp_path / "tokenizer.json")
    loaded = BpeVocabulary.load(tmp_path / "tokenizer.json")
    assert loaded.vocab_size == bpe.vocab_size
    assert loaded.encode(TEXTS).tolist() == bpe.encode(TEXTS).tolist()
