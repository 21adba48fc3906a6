"""From what --data-path names to tokens on all ranks: every kind of source, kept for later runs, whole or not."""

import json
import os
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train.data import preparation
from megatron_fsdp.train.data.preparation import (
    SIDE_FILE,
    TOKENIZER_FILE,
    PieceTokenizer,
    load_tokenizer,
    prepare_data,
    read_data,
    tokens_folder,
    train_bpe,
    write_data,
)
from megatron_fsdp.train.data.tokens import TokenData
from megatron_fsdp.train.options import Options
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World, resolve
from tests.conftest import RunRanks
from tests.support.on_ranks import refusal
from tests.support.train_program import this_rank
from tests.train.data.test_token_file import write_indexed

TEXTS = [f"text number {i} of many\n" for i in range(200)]


def job_of(path: Path, *options: str, ranks: int = 1) -> Job:
    asked = ["--preset", "tiny", "--seq-length", "16", "--data-path", str(path), *options]
    return resolve(parse_options(asked), World(ranks, "cpu"))


def prepare(job: Job, folder: Path) -> TokenData:
    return read_data(job, write_data(job.options, folder))


def text_of(data: TokenData, options: Options, folder: Path) -> list[str]:
    """Documents of both sides."""
    decode = lambda ids: bytes(ids).decode()  # noqa: E731
    made, _ = tokens_folder(options, folder)
    if (made / TOKENIZER_FILE).exists():
        decode = Tokenizer.from_file(str(made / TOKENIZER_FILE)).decode
    ids = [*data.training.open().tolist(), *data.held_out.open().tolist()]
    texts, start = [], 0
    for place, token in enumerate(ids):
        if token == data.end_id:
            texts.append(decode(ids[start:place]))
            start = place + 1
    return texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of texts."""
    path = tmp_path / "texts"
    path.mkdir()
    for i, text in enumerate(TEXTS):
        (path / f"{i:03}.txt").write_text(text)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Ten documents of twenty ids each: 0 ... 19, 20 ... 39, and so on."""
    write_indexed(tmp_path / "ids", [[np.arange(20 * i, 20 * i + 20)] for i in range(10)])
    return tmp_path / "ids"


@pytest.mark.parametrize("kind", [["byte"], ["bpe", "--vocab-size", "300"]])
def test_a_folder_of_text_comes_back_from_its_tokens(folder: Path, tmp_path: Path, kind: list[str]) -> None:
    job = job_of(folder, "--tokenizer-type", *kind)
    data = prepare(job, tmp_path / "out")
    assert text_of(data, job.options, tmp_path / "out") == TEXTS
    assert data.vocab_size == {"byte": 256, "bpe": 300}[kind[0]]
    assert isinstance(data.training.open(), np.memmap)
    assert data.notes == ()


def test_a_model_with_weights_is_trained_on_its_own_tokens(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    own = ["--hf-model", str(model)]
    assert " or --tokenizer-type byte, to train on" in (told := refused(folder, tmp_path / "out", *own))
    assert "model has no tokenizer.json: " in told
    train_bpe(TEXTS, 290).save(model / "tokenizer.json")
    job = job_of(folder, *own)
    data = prepare(job, tmp_path / "out")
    assert (data.vocab_size, text_of(data, job.options, tmp_path / "out")) == (290, TEXTS)
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}" in "".join(job.notes)
    assert prepare(job_of(folder, *own, "--tokenizer-type", "byte"), tmp_path / "out").vocab_size == 256
    train_bpe(TEXTS, 270).save(tmp_path / "tokenizer.json")
    other = [*own, "--tokenizer-model", str(tmp_path)]
    assert prepare(job_of(folder, *other), tmp_path / "out").vocab_size == 270


def test_megatrons_files_are_used_where_they_are_and_split_by_documents(pair: Path, tmp_path: Path) -> None:
    job = job_of(pair, "--tokenizer-type", "NullTokenizer", "--vocab-size", "200", "--split", "7,2,1")
    data = prepare(job, tmp_path / "out")
    assert data.training.open().tolist() == list(range(140))
    assert data.held_out.open().tolist() == list(range(140, 180))
    assert data.training.path == tmp_path / "ids.bin"
    assert (data.vocab_size, data.end_id) == (200, None)
    made, _ = tokens_folder(job.options, tmp_path / "out")
    assert [path.name for path in made.iterdir()] == [SIDE_FILE]


def test_tokens_are_made_once_and_used_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ["--data-cache-path", str(tmp_path / "cache")]
    first = prepare(job_of(folder, *cache), tmp_path / "one")
    monkeypatch.setattr(preparation, "_write", None)  # may not be called again
    again = prepare(job_of(folder, *cache, "--seed", "5"), tmp_path / "two")
    assert again.training == first.training
    assert again.checksum == first.checksum
    assert not (tmp_path / "one").exists()


def test_the_folder_is_named_after_all_that_decides_the_tokens(folder: Path, tmp_path: Path) -> None:
    train_bpe(TEXTS, 270).save(tmp_path / "tokenizer.json")
    huggingface = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    lines = [[], ["--tokenizer-type", "bpe"], ["--tokenizer-type", "bpe", "--vocab-size", "300"], huggingface]
    lines += [["--json-key", "b"]]

    def name_of(*options: str) -> str:
        return tokens_folder(job_of(folder, *options).options, tmp_path)[0].name

    names = [name_of(*line) for line in lines]
    train_bpe(TEXTS, 280).save(tmp_path / "tokenizer.json")
    names.append(name_of(*huggingface))
    (folder / "000.txt").write_text("something else")
    names.append(name_of())
    assert len(set(names)) == len(names) == 7
    assert name_of("--seed", "9", "--split", "9,1") == names[-1]


def test_a_preparation_that_ends_early_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_early(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "digest", end_early)
        refusal(prepare, job_of(folder), tmp_path / "out", error=KeyboardInterrupt)
    assert list((tmp_path / "out").iterdir()) == []


def refused(path: Path, out: Path, *options: str) -> str:
    return refusal(prepare, job_of(path, *options), out, error=ConfigurationError)


def test_wrong_sources_are_refused(folder: Path, pair: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    assert "empty holds no UTF-8 text: give a file or folder" in refused(empty, out)
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert "is text, and --tokenizer-type NullTokenizer takes token ids" in refused(folder, out, *null)
    assert "holds token ids, and --tokenizer-type byte takes text" in refused(pair, out)
    assert "--json-key body does nothing, since --data-path" in refused(folder, out, "--json-key", "body")
    assert [path.name for path in out.iterdir()] == []
    (tmp_path / "file").write_text("")
    assert "where it cannot be written, give another --data-cache-path or --out" in refused(folder, tmp_path / "file")


def test_a_too_small_text_is_refused_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 200)  # 2,001 tokens, of which 100 are held out
    for length, begin in ((2000, "the training text has 1,901 tokens"), (100, "the held-out text has 100 tokens")):
        said = refused(tmp_path / "a.txt", tmp_path / "out", "--seq-length", str(length))
        assert said.startswith(f"{begin} and one sample needs {length + 1:,}: give --data-path")
    assert prepare(job_of(tmp_path / "a.txt", "--seq-length", "99"), tmp_path / "out").held_out.count == 100


def test_contents_and_not_time_stamps_decide_which_tokens_are_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = folder / "000.txt"
    stamps = text.stat().st_atime_ns, text.stat().st_mtime_ns
    first = prepare(job_of(folder), tmp_path)
    text.write_text(TEXTS[0].replace("text", "TEXT"))
    os.utime(text, ns=stamps)
    job = job_of(folder)
    second = prepare(job, tmp_path)
    assert second.checksum != first.checksum
    assert text_of(second, job.options, tmp_path)[0] == "TEXT number 0 of many\n"
    os.utime(text, ns=(0, 0))
    monkeypatch.setattr(preparation, "_write", None)  # may not be called again
    assert prepare(job_of(folder), tmp_path).training == second.training


def test_tokens_that_are_not_those_that_were_written_are_refused(folder: Path, tmp_path: Path) -> None:
    made = prepare(job_of(folder), tmp_path).training.path
    tokens = bytearray(made.read_bytes())
    tokens[7] ^= 1  # as large as before, and all ids in their range
    made.write_bytes(tokens)
    told = refused(folder, tmp_path)
    assert "does not hold the tokens that its tokens.json describes: it was damaged or changed; remove it" in told


def prepare_on_ranks(paths: list[Path], outs: list[Path], local: str) -> tuple[str, int] | str:
    """Prepare as a rank whose number on its machine is in `local`; returns checksum and tokens, or what was refused."""
    rank = this_rank()
    with mock.patch.dict(os.environ, LOCAL_RANK=local[rank.index]):
        try:
            data = prepare_data(job_of(paths[rank.index], ranks=rank.count), outs[rank.index], rank)
        except (CheckpointError, ConfigurationError) as error:
            return str(error)
    return data.checksum, data.training.count


def test_ranks_of_a_machine_share_what_its_first_one_made_and_others_make_their_own(
    run_ranks: RunRanks, folder: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / "one", tmp_path / "two"]
    for places, local in (([tmp_path / "out"] * 2, "01"), (outs, "00")):
        found = run_ranks(2, prepare_on_ranks, [folder] * 2, places, local)
        assert found[0] == found[1]
        assert len(found[0][0]) == 32
    assert [len(list(out.iterdir())) for out in outs] == [1, 1]


def test_ranks_that_have_other_texts_or_see_no_tokens_are_all_told_so(
    run_ranks: RunRanks, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for i, text in enumerate(TEXTS):
        (other / f"{i:03}.txt").write_text(text.upper())
    for second, local, begin, words in (
        (other, "00", "ranks differ: the text of --data-path (its checksum) is ", " on rank 1; give the same on every"),
        (tmp_path / "gone", "00", "", "gone does not exist: give a text file"),
        (
            folder,
            "01",
            "opening the tokens of --data-path failed (rank 1: ConfigurationError: ",
            "tokens are made by the first rank of each machine",
        ),
    ):
        outs = [tmp_path / f"{second.name}{index}" for index in range(2)]
        found = run_ranks(2, prepare_on_ranks, [folder, second], outs, local)
        assert found[0] == found[1]
        assert found[0].startswith(begin)
        assert words in found[0]


def text_with_its_end(index: int) -> bytes:
    return TEXTS[index].encode() + b"\0"


def test_the_last_documents_are_held_out_and_a_third_share_comes_after_them(folder: Path, tmp_path: Path) -> None:
    for split, first, last in (("95,5", 190, 200), ("50,25,25", 100, 150)):
        data = prepare(job_of(folder, "--split", split), tmp_path / "out")
        assert bytes(data.training.open()) == b"".join(map(text_with_its_end, range(first)))
        assert bytes(data.held_out.open()) == b"".join(map(text_with_its_end, range(first, last)))
    assert len(list((tmp_path / "out").iterdir())) == 1  # another split needs no other tokens


# ---- tokenizers ------------------------------------------------------------------------------------------------------

PIECES = ["def add(a, b):\n    return a + b\n", "naïve — 你好\n\tend"]


@pytest.fixture(scope="module")
def bpe() -> PieceTokenizer:
    return train_bpe(PIECES * 20, vocab_size=280)


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
        assert [ids.tolist() for ids in loaded.encode(PIECES)] == [ids.tolist() for ids in bpe.encode(PIECES)]


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
