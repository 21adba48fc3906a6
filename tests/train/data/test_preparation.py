"""From what --data-path names to tokens on all ranks: every kind of source, kept for later runs, whole or not."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.checkpoint.store import claim
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train.data import preparation
from megatron_fsdp.train.data.preparation import (
    SIDE_FILE,
    TokenData,
    encode_documents,
    folder_name,
    pieces,
    prepare_data,
    read_data,
    sample_texts,
    side_of,
    tokens_folder,
    write_data,
)
from megatron_fsdp.train.data.sources import Document, find_source
from megatron_fsdp.train.data.token_file import TokenFile
from megatron_fsdp.train.data.tokenizer import ByteVocabulary, train_bpe
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, Split, World, parse_split
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.ranks import Rank
from tests.conftest import RunRanks
from tests.support.indexed_files import write_indexed

TEXTS = [f"text number {i} of many\n" for i in range(200)]


def job_of(path: Path, *options: str, ranks: int = 1) -> Job:
    asked = ["--preset", "tiny", "--seq-length", "16", "--data-path", str(path), *options]
    return resolve(parse_options(asked), World(ranks, "cpu"))


def prepare(job: Job, folder: Path) -> TokenData:
    write_data(job.options, folder)
    return read_data(job, folder)


def text_of(data: TokenData) -> list[str]:
    """Documents of both sides."""
    ids = [*data.training.open().tolist(), *data.held_out.open().tolist()]
    texts, start = [], 0
    for place, token in enumerate(ids):
        if token == data.vocabulary.end_id:
            texts.append(data.vocabulary.decode(ids[start:place]))
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
    data = prepare(job_of(folder, "--tokenizer-type", *kind), tmp_path / "out")
    assert sorted(text_of(data)) == sorted(TEXTS)
    assert data.vocabulary.vocab_size == {"byte": 256, "bpe": 300}[kind[0]]
    held_out = [text for text in TEXTS if text in data.vocabulary.decode(data.held_out.open().tolist())]
    assert data.held_out_bytes == sum(len(text) + 1 for text in held_out)
    assert isinstance(data.training.open(), np.memmap)
    assert data.notes == ()


def test_a_data_set_on_disk_comes_back_from_its_tokens(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(str(tmp_path / "set"))
    data = prepare(job_of(tmp_path / "set", "--json-key", "body", "--tokenizer-type", "bpe"), tmp_path / "out")
    assert sorted(text_of(data)) == sorted(TEXTS)
    assert data.vocabulary.vocab_size > 256


def test_a_tokenizer_on_disk_is_used_and_kept_with_the_tokens(folder: Path, tmp_path: Path) -> None:
    train_bpe(TEXTS, 290).save(tmp_path / "tokenizer.json")
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    data = prepare(job_of(folder, *options), tmp_path / "out")
    assert sorted(text_of(data)) == sorted(TEXTS)
    assert data.vocabulary.vocab_size == 290
    made, _ = tokens_folder(job_of(folder, *options).options, tmp_path / "out")
    assert (made / "tokenizer.json").exists()


def test_a_model_with_weights_is_trained_on_its_own_tokens(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    own = ["--hf-model", str(model)]
    with pytest.raises(
        ConfigurationError, match=r"model has no tokenizer\.json: .* or --tokenizer-type byte, to train on"
    ):
        prepare(job_of(folder, *own), tmp_path / "out")
    train_bpe(TEXTS, 290).save(model / "tokenizer.json")
    job = job_of(folder, *own)
    data = prepare(job, tmp_path / "out")
    assert (data.vocabulary.vocab_size, sorted(text_of(data))) == (290, sorted(TEXTS))
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}" in "".join(job.notices)
    assert prepare(job_of(folder, *own, "--tokenizer-type", "byte"), tmp_path / "out").vocabulary.vocab_size == 256
    train_bpe(TEXTS, 270).save(tmp_path / "tokenizer.json")
    other = [*own, "--tokenizer-model", str(tmp_path)]
    assert prepare(job_of(folder, *other), tmp_path / "out").vocabulary.vocab_size == 270


def test_another_end_of_a_text_beside_the_tokenizer_makes_other_tokens(folder: Path, tmp_path: Path) -> None:
    vocabulary = train_bpe(TEXTS, 290)
    vocabulary.save(tmp_path / "tokenizer.json")
    settings, pad = tmp_path / "tokenizer_config.json", vocabulary.decode([1])
    job = job_of(folder, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path))
    ends = []
    for end in (vocabulary.end, pad):
        settings.write_text(json.dumps({"eos_token": end}))
        ends.append(prepare(job, tmp_path / "out").vocabulary.end_id)
    assert ends == [vocabulary.end_id, 1]


def test_megatrons_files_are_used_where_they_are_and_split_by_documents(pair: Path, tmp_path: Path) -> None:
    job = job_of(pair, "--tokenizer-type", "NullTokenizer", "--vocab-size", "200", "--split", "7,2,1")
    data = prepare(job, tmp_path / "out")
    assert data.training.open().tolist() == list(range(140))
    assert data.held_out.open().tolist() == list(range(140, 180))
    assert data.training.path == tmp_path / "ids.bin"
    assert (data.held_out_bytes, data.vocabulary.vocab_size, data.vocabulary.end_id) == (0, 200, None)
    made, _ = tokens_folder(job.options, tmp_path / "out")
    assert [path.name for path in made.iterdir()] == [SIDE_FILE]


def test_what_the_run_writes_beside_its_texts_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    written = ["--data-cache-path", "--save", "--tensorboard-dir", "--dump-param-to-param-group-map"]
    words = [word for flag in written for word in (flag, str(tmp_path / flag.strip("-")))]
    for folder in (tmp_path / "out", *(tmp_path / flag.strip("-") for flag in written)):
        folder.mkdir()
        (folder / "file").write_text("no text to learn")
    source = tokens_folder(job_of(tmp_path, *words).options, tmp_path / "out")[1]
    assert [path.name for path in source.files] == ["a.txt"]


def test_a_single_document_and_an_npy_are_cut_at_the_end(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(200, dtype=np.int64))
    write_indexed(tmp_path / "ids", [[np.arange(200)]])
    found = []
    for path in (tmp_path / "ids.npy", tmp_path / "ids"):
        job = job_of(path, "--tokenizer-type", "NullTokenizer", "--vocab-size", "200", "--split", "80,10,10")
        found.append(prepare(job, tmp_path / path.suffix))
        assert found[-1].training.open().tolist() == list(range(160))
        assert found[-1].held_out.open().tolist() == list(range(160, 180))
    assert found[0].checksum == found[1].checksum  # the same ids, in another type and another file


def test_ids_with_their_tokenizer_have_text(tmp_path: Path) -> None:
    bpe = train_bpe(TEXTS, 290)
    bpe.save(tmp_path / "tokenizer.json")
    write_indexed(tmp_path / "ids", [[np.append(ids, bpe.end_id)] for ids in bpe.encode(TEXTS)])
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    data = prepare(job_of(tmp_path / "ids", *options), tmp_path / "out")
    assert text_of(data) == TEXTS
    assert data.held_out_bytes == sum(len(text) + 1 for text in TEXTS[190:])


def test_an_id_that_no_token_has_is_refused_with_its_place(pair: Path, tmp_path: Path) -> None:
    job = job_of(pair, "--tokenizer-type", "NullTokenizer", "--vocab-size", "150")
    with pytest.raises(ConfigurationError, match=r"token 150 of .*ids\.bin has id 150, and ids are 0 to 149"):
        prepare(job, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_tokens_are_made_once_and_used_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ["--data-cache-path", str(tmp_path / "cache")]
    first = prepare(job_of(folder, *cache), tmp_path / "one")
    monkeypatch.setattr(preparation, "_prepare", None)  # may not be called again
    again = prepare(job_of(folder, *cache, "--seed", "5"), tmp_path / "two")
    assert again.training == first.training
    assert again.checksum == first.checksum
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("name", ["training.bin", "held_out.bin"])
def test_tokens_that_were_damaged_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    job = job_of(folder)
    prepare(job, tmp_path)
    (made,) = tmp_path.glob("tokens-*")
    said = json.loads((made / SIDE_FILE).read_text())
    (made / SIDE_FILE).write_text(json.dumps({**said, "crc32": 7}))  # as earlier versions left them
    prepare(job, tmp_path)
    content = bytearray((made / name).read_bytes())
    content[len(content) // 2] ^= 4
    (made / name).write_bytes(content)
    with pytest.raises(
        ConfigurationError, match=r"tokens-\w+ were damaged: .* remove the folder, and they are made again"
    ):
        prepare(job, tmp_path)


def test_ids_of_the_user_are_not_read_again(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(pair, "--tokenizer-type", "NullTokenizer", "--vocab-size", "200", "--split", "7,2,1")
    prepare(job, tmp_path / "out")
    monkeypatch.setattr(preparation, "digest", None)  # may not be called
    prepare(job, tmp_path / "out")


def test_the_folder_is_named_after_all_that_decides_the_tokens(folder: Path, tmp_path: Path) -> None:
    train_bpe(TEXTS, 270).save(tmp_path / "tokenizer.json")
    huggingface = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    lines = [[], ["--tokenizer-type", "bpe"], ["--tokenizer-type", "bpe", "--vocab-size", "300"], huggingface]
    lines += [["--split", "9,1"], ["--json-key", "b"]]
    names = [folder_name(job_of(folder, *line).options, find_source(folder)) for line in lines]
    train_bpe(TEXTS, 280).save(tmp_path / "tokenizer.json")
    names.append(folder_name(job_of(folder, *huggingface).options, find_source(folder)))
    (folder / "000.txt").write_text("something else")
    names.append(folder_name(job_of(folder).options, find_source(folder)))
    assert len(set(names)) == len(names) == 8
    assert folder_name(job_of(folder, "--seed", "9").options, find_source(folder)) == names[-1]


def test_a_run_may_write_into_what_it_reads(folder: Path) -> None:
    job = job_of(folder)
    first = prepare(job, folder / "run")
    (folder / "run" / "metrics.jsonl").write_text("no JSON")
    assert prepare(job, folder / "run").training == first.training


def test_a_preparation_that_ends_early_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_early(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "digest", end_early)
        with pytest.raises(KeyboardInterrupt):
            prepare(job_of(folder), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_preparation_left_is_no_tokens_and_is_removed(folder: Path, tmp_path: Path) -> None:
    job, out = job_of(folder), tmp_path / "out"
    name = folder_name(job.options, find_source(folder))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here, elsewhere = f".{name}.{platform.node()}", f".{name}.another-machine.x.{ended.pid}"
    old, under_way, unseen = f"{here}.x.{ended.pid}", f"{here}.x.{os.getppid()}", f"{here}.y.{ended.pid}"
    for left in (old, under_way, unseen, elsewhere):
        (out / left).mkdir(parents=True)
        (out / left / "training.bin").write_bytes(b"half")
    with ExitStack() as held:
        assert claim(out / unseen, held)  # as by a container on this machine
        for _ in range(2):  # also where the tokens are there already
            assert sorted(text_of(prepare(job, out))) == sorted(TEXTS)
            assert sorted(path.name for path in out.iterdir()) == sorted([under_way, unseen, elsewhere, name])


def test_when_another_machine_is_faster_its_tokens_are_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, original = job_of(folder), preparation.digest

    def be_late(*_: object) -> str:
        monkeypatch.setattr(preparation, "digest", original)
        write_data(job.options, tmp_path)
        return "another checksum"

    monkeypatch.setattr(preparation, "digest", be_late)
    assert prepare(job, tmp_path).checksum != "another checksum"
    assert len([path for path in tmp_path.iterdir() if "tokens-" in path.name]) == 1


def test_files_left_out_and_a_cut_are_told(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    path.mkdir()
    (path / "a.txt").write_text("text " * 200)
    (path / "b.png").write_bytes(b"\xff\xd8")
    notes = prepare(job_of(path), tmp_path / "out").notes
    assert notes == (
        f"1 file is no UTF-8 text and left out, first {path / 'b.png'}",
        "documents are too few or too unequal to split, so the end of the text is held out",
    )


def test_folders_of_earlier_runs_are_counted_and_change_no_tokens(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder)
    before = prepare(job, tmp_path / "out")
    for name in ("applied.json", "metrics.jsonl", "sample.txt"):
        (folder / "runs").mkdir(exist_ok=True)
        (folder / "runs" / name).write_text("{}")
    found = read_data(job, tmp_path / "out")  # the same folder of tokens: nothing has to be made anew
    assert found.checksum == before.checksum
    assert found.notes == (f"1 folder of an earlier run is left out, first {folder / 'runs'}",)


def refused(path: Path, out: Path, *options: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        prepare(job_of(path, *options), out)
    return str(caught.value)


def test_wrong_sources_are_refused(folder: Path, pair: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    assert "empty holds no UTF-8 text: give a file or a folder" in refused(empty, out)
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert "is text, and --tokenizer-type NullTokenizer takes token ids" in refused(folder, out, *null)
    assert "holds token ids, and --tokenizer-type byte takes text" in refused(pair, out)
    assert "--json-key body does nothing, since --data-path" in refused(folder, out, "--json-key", "body")
    said = refused(folder, out, "--split", "1,1,999998")
    assert said.startswith(f"--split 1,1,999998 leaves all texts of --data-path {folder} aside: give a smaller third")
    assert [path.name for path in out.iterdir()] == []
    (tmp_path / "file").write_text("")
    assert "where it cannot be written, give another --data-cache-path or --out" in refused(folder, tmp_path / "file")


def test_a_too_small_text_is_refused_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 200)  # 2,001 tokens, of which 100 are held out
    for length, begin in ((2000, "the training text has 1,901 tokens"), (100, "the held-out text has 100 tokens")):
        said = refused(tmp_path / "a.txt", tmp_path / "out", "--seq-length", str(length))
        assert said.startswith(f"{begin} and one sample needs {length + 1:,}: give --data-path")
    assert prepare(job_of(tmp_path / "a.txt", "--seq-length", "99"), tmp_path / "out").held_out.count == 100


def test_damaged_tokens_are_refused(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder)
    data = prepare(job, tmp_path)
    made = data.training.path.parent
    data.training.path.write_bytes(b"short")
    with pytest.raises(ConfigurationError, match=r"training\.bin has 5 bytes where .* are needed: it was damaged"):
        read_data(job, tmp_path)
    (made / SIDE_FILE).write_text("{}")
    with pytest.raises(ConfigurationError, match=r"data\.json cannot be read .*or it was damaged: remove its folder"):
        read_data(job, tmp_path)


def prepare_on_ranks(paths: list[Path], outs: list[Path], local: str) -> tuple[str, int] | str:
    """Prepare as a rank whose number on its machine is in `local`; returns checksum and tokens, or what was refused."""
    index, count = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = local[index]
    rank = Rank(index, count, torch.device("cpu"), os.getppid())
    try:
        data = prepare_data(job_of(paths[index], ranks=count), outs[index], rank)
    except (CheckpointError, ConfigurationError) as error:
        return str(error)
    finally:
        del os.environ["LOCAL_RANK"]
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


def test_machines_with_other_texts_are_refused_by_their_ranks(
    run_ranks: RunRanks, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for i, text in enumerate(TEXTS):
        (other / f"{i:03}.txt").write_text(text.upper())
    found = run_ranks(2, prepare_on_ranks, [folder, other], [tmp_path / "one", tmp_path / "two"], "00")
    assert found[0] == found[1]
    assert " on rank 0, " in found[0]
    assert " on rank 1: give the same text on every machine" in found[0]


def test_a_text_that_one_machine_lacks_is_refused_everywhere(run_ranks: RunRanks, folder: Path, tmp_path: Path) -> None:
    found = run_ranks(2, prepare_on_ranks, [folder, tmp_path / "gone"], [tmp_path / "one", tmp_path / "two"], "00")
    assert found[0] == found[1]
    assert "gone does not exist: give a text file" in found[0]


def test_a_rank_that_cannot_see_the_tokens_is_named(run_ranks: RunRanks, folder: Path, tmp_path: Path) -> None:
    found = run_ranks(2, prepare_on_ranks, [folder] * 2, [tmp_path / "one", tmp_path / "two"], "01")
    assert found[0] == found[1]
    assert found[0].startswith("opening the tokens of --data-path failed (rank 1: ConfigurationError: ")
    assert "tokens are made by the first rank of each machine" in found[0]


DOCUMENTS = [f"text number {i}" for i in range(400)]
SPLIT = Split(0.95, 0.05)
CUT = "documents are too few or too unequal to split, so the end of the text is held out"
LINES = [f"line {i:04}" for i in range(800)]  # of one length, so that shares of texts are shares of tokens


def documents(texts: list[str]) -> Iterator[Document]:
    return (iter([text]) if text else iter(()) for text in texts)


def encode(texts: list[str], split: Split, folder: Path) -> TokenData:
    return encode_documents(documents(texts), ByteVocabulary(), split, folder)


def texts_in(file: TokenFile) -> list[str]:
    return bytes(file.open().tolist()).decode().split("\0")[:-1]


def test_training_and_held_out_texts_are_disjoint_and_complete(tmp_path: Path) -> None:
    found = encode(DOCUMENTS, SPLIT, tmp_path)
    training, held_out = texts_in(found.training), texts_in(found.held_out)
    assert sorted(training + held_out) == sorted(DOCUMENTS)
    assert [text for text in DOCUMENTS if text in set(training)] == training  # in their order
    assert 5 <= len(held_out) <= 40  # 5 % of 400 is 20
    assert found.held_out_bytes == found.held_out.count == sum(len(text) + 1 for text in held_out)
    assert found.notes == ()


def test_the_split_depends_on_content_and_copies_of_a_text_lie_on_one_side(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    one, other = encode(DOCUMENTS, SPLIT, tmp_path / "a"), encode(DOCUMENTS[::-1], SPLIT, tmp_path / "b")
    assert set(texts_in(one.held_out)) == set(texts_in(other.held_out))
    found = encode([f"text number {i % 200}" for i in range(400)], SPLIT, tmp_path / "c")
    training, held_out = texts_in(found.training), texts_in(found.held_out)
    assert set(training) & set(held_out) == set()
    assert all(side.count(text) == 2 for side in (training, held_out) for text in side)


def test_a_third_share_is_left_aside(tmp_path: Path) -> None:
    found = encode(DOCUMENTS, parse_split("50,25,25"), tmp_path)
    counts = len(texts_in(found.training)), len(texts_in(found.held_out))
    assert 160 <= counts[0] <= 240
    assert 70 <= counts[1] <= 130
    assert 70 <= 400 - sum(counts) <= 130
    assert len(list(pieces(documents(DOCUMENTS[:99]), parse_split("1,1,98")))) == 99  # of a few none is left aside
    assert len(list(pieces(documents(DOCUMENTS[:100]), parse_split("1,1,98")))) < 10


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    found = encode(["0123456789" * 10], SPLIT, tmp_path)
    assert found.notes == (CUT,)
    assert bytes(found.training.open().tolist()).decode() == "0123456789" * 9 + "012345"
    assert bytes(found.held_out.open().tolist()) == b"6789\0"
    assert found.held_out_bytes == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["training.bin"]
    found = encode(["", ""], SPLIT, tmp_path)
    assert (found.training.count, found.held_out.count, found.held_out_bytes) == (0, 0, 0)


def test_a_huge_document_is_not_held_out_whole(tmp_path: Path) -> None:
    huge = next(text for text in ("x" * n for n in range(2000, 9000)) if side_of(text, SPLIT) == "held_out")
    found = encode([*DOCUMENTS[:50], huge], SPLIT, tmp_path)
    total = found.training.count + found.held_out.count
    assert total == sum(len(text) + 1 for text in (*DOCUMENTS[:50], huge))
    assert found.held_out.count == round(0.05 * total)


@pytest.mark.parametrize(("held_out", "is_cut"), [(20, False), (21, True), (1, True), (2, False)])
def test_shares_may_be_off_by_a_factor_of_four(tmp_path: Path, held_out: int, is_cut: bool) -> None:
    sides = {side: [text for text in LINES if side_of(text, SPLIT) == side] for side in ("training", "held_out")}
    chosen = [*sides["training"][: 100 - held_out], *sides["held_out"][:held_out]]
    assert encode(chosen, SPLIT, tmp_path).notes == ((CUT,) if is_cut else ())


@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=6), batch=st.integers(1, 9))
def test_pieces_and_batches_do_not_change_bytes(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], batch: int
) -> None:
    texts = [["é" * n, "ab\n", "c"][: n % 3 + 1] for n in cuts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_BATCH", batch)
        found = encode_documents(map(iter, texts), ByteVocabulary(), SPLIT, tmp_path_factory.mktemp("tokens"))
    both = [*found.training.open().tolist(), *found.held_out.open().tolist()]
    if found.notes:  # all on one side before the cut, or in the order of sides
        assert sorted(bytes(both).split(b"\0")) == sorted([*("".join(parts).encode() for parts in texts), b""])
    else:
        assert len(both) == sum(len("".join(parts).encode()) + 1 for parts in texts)


def test_a_sample_for_a_tokenizer_is_spread_bounded_and_without_held_out_texts() -> None:
    size = sum(map(len, DOCUMENTS))
    chosen = sample_texts(documents(DOCUMENTS), SPLIT, size, limit=size // 10)
    held_out = {text for text in DOCUMENTS if side_of(text, SPLIT) == "held_out"}
    assert chosen == [text for text in DOCUMENTS[::10] if text not in held_out]
    assert sample_texts(documents(DOCUMENTS), SPLIT, size, limit=size) == [
        text for text in DOCUMENTS if text not in held_out
    ]
    (text, *_) = held_out
    assert sample_texts(documents([text]), SPLIT, 10) == [text]  # there is nothing else


def test_bytes_of_tokens_are_counted_or_projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bpe = train_bpe(DOCUMENTS, vocab_size=300)
    found = encode_documents(documents(DOCUMENTS), bpe, SPLIT, tmp_path)
    assert found.held_out_bytes == sum(len(text) + 1 for text in DOCUMENTS if side_of(text, SPLIT) == "held_out")
    cut = encode_documents(documents(["".join(DOCUMENTS)]), bpe, SPLIT, tmp_path)
    expected = len(bpe.decode(cut.held_out.open().tolist())) + 1
    assert (cut.notes, cut.held_out_bytes) == ((CUT,), expected)
    monkeypatch.setattr(preparation, "_COUNTED", cut.held_out.count // 2)
    projected = encode_documents(documents(["".join(DOCUMENTS)]), bpe, SPLIT, tmp_path).held_out_bytes
    assert projected == pytest.approx(expected, rel=0.05)
