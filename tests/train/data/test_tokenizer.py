import json
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.preparation import PieceTokenizer, load_tokenizer, train_bpe
from tests.support.on_ranks import refusal

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


def test_a_missing_or_damaged_tokenizer_and_one_without_an_end_are_refused(tmp_path: Path) -> None:
    refused = partial(refusal, load_tokenizer, tmp_path, error=ConfigurationError)
    assert f"--tokenizer-model {tmp_path} has no tokenizer.json: give such a file or a folder" in refused()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in refused()
    words(tmp_path, ["[UNK]", "a"])
    assert "no token that ends a text: looked for eos_token in tokenizer_config" in refused()
