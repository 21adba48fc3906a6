import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.tokenizer import ByteTokenizer, PieceTokenizer, load_tokenizer, train_bpe

TEXTS = ["def add(a, b):\n    return a + b\n", "naïve — 你好\n\tend"]


@pytest.fixture(scope="module")
def bpe() -> PieceTokenizer:
    return train_bpe(TEXTS * 20, vocab_size=280)


def words(folder: Path, tokens: list[str], *, limit: int | None = None) -> Path:
    """A tokenizer of whole words, one id each."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if limit is not None:
        tokenizer.enable_truncation(limit)
        tokenizer.enable_padding(length=limit)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes_are_the_utf8_of_the_text() -> None:
    found = ByteTokenizer().encode(["é", "a"])
    assert [ids.dtype for ids in found] == [np.uint8, np.uint8]
    assert [ids.tolist() for ids in found] == [[0xC3, 0xA9], [97]]


def test_texts_come_back_as_they_were(bpe: PieceTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path / "tokenizer.json")
    found = [ids.tolist() for ids in bpe.encode(TEXTS)]
    assert [Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids) for ids in found] == TEXTS
    assert max(map(max, found)) < bpe.vocab_size
    assert not any(bpe.end_id in ids for ids in found)


def test_bpe_has_the_size_asked_for_and_is_shorter_than_bytes(bpe: PieceTokenizer) -> None:
    assert (bpe.vocab_size, bpe.end_id) == (280, 0)
    assert [ids.dtype for ids in bpe.encode(TEXTS)] == [np.uint16, np.uint16]
    assert sum(map(len, bpe.encode(TEXTS))) < sum(map(len, ByteTokenizer().encode(TEXTS)))


def test_training_twice_gives_the_same_pieces(bpe: PieceTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path / "a.json")
    train_bpe(iter(TEXTS * 20), vocab_size=280).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_bpe_survives_saving_and_loading(bpe: PieceTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path / "tokenizer.json")
    for loaded in (load_tokenizer(tmp_path / "tokenizer.json"), load_tokenizer(tmp_path)):
        assert (loaded.vocab_size, loaded.end_id) == (280, 0)
        assert [ids.tolist() for ids in loaded.encode(TEXTS)] == [ids.tolist() for ids in bpe.encode(TEXTS)]


def test_a_tokenizer_is_a_file_or_a_folder_with_one(tmp_path: Path) -> None:
    words(tmp_path, ["[UNK]", "a", "b", "<|endoftext|>"])
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        found = load_tokenizer(place)
        assert [ids.tolist() for ids in found.encode(["b a c"])] == [[2, 1, 0]]
        assert (found.end_id, found.vocab_size) == (3, 4)


@pytest.mark.parametrize("said", ["</s>", {"content": "</s>", "lstrip": False}])
def test_settings_beside_it_say_which_token_ends_a_text(tmp_path: Path, said: object) -> None:
    words(tmp_path, ["[UNK]", "<|endoftext|>", "</s>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
    assert load_tokenizer(tmp_path).end_id == 2


@pytest.mark.parametrize("settings", ["no json", "[]", '{"eos_token": null}', '{"eos_token": "absent"}'])
def test_useless_settings_are_passed_over(tmp_path: Path, settings: str) -> None:
    words(tmp_path, ["[UNK]", "<eos>"])
    (tmp_path / "tokenizer_config.json").write_text(settings)
    (tmp_path / "special_tokens_map.json").write_text(settings)
    assert load_tokenizer(tmp_path).end_id == 1


def test_texts_are_never_cut_off_or_padded(tmp_path: Path) -> None:
    found = load_tokenizer(words(tmp_path, ["[UNK]", "a", "</s>"], limit=2))
    assert [ids.tolist() for ids in found.encode(["a a a a", "a"])] == [[1, 1, 1, 1], [1]]


def test_a_missing_or_damaged_tokenizer_and_one_without_an_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"--tokenizer-model .* has no tokenizer\.json: give such a file or a folder"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    words(tmp_path, ["[UNK]", "a"])
    with pytest.raises(ConfigurationError, match="no token that ends a text: looked for eos_token in tokenizer_config"):
        load_tokenizer(tmp_path)


def test_a_folder_with_only_a_vocabulary_is_read_by_transformers(tmp_path: Path) -> None:
    old = words(tmp_path, ["<unk>", "a", "b", "</s>"])
    (old / "tokenizer.json").unlink()
    symbols = [*pre_tokenizers.ByteLevel.alphabet(), "ab", "<|endoftext|>"]
    (old / "vocab.json").write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
    (old / "merges.txt").write_text("#version: 0.2\na b\n")
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    found = load_tokenizer(old)
    assert (symbols[found.end_id], found.vocab_size) == ("<|endoftext|>", len(symbols))
    (ids,) = found.encode(["abc"])
    assert [symbols[i] for i in ids] == ["ab", "c"]
    found.save(tmp_path / "tokenizer.json")  # with the tokens, where no transformers is needed
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(["abc"])[0].tolist() == ids.tolist()


def test_without_transformers_a_vocabulary_alone_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"without a tokenizer\.json needs the package transformers"):
        load_tokenizer(tmp_path)
