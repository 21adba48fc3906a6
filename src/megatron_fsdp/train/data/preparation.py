"""Prepares data: texts are split and encoded into token files once on each machine, the same on all ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_fsdp.checkpoint.store import claim
from megatron_fsdp.comm.agreement import by_value, gather_objects, together
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.sources import Document, Documents, Source, find_source
from megatron_fsdp.train.data.token_file import TokenFile, digest, dtype_for, npy_tokens, open_indexed
from megatron_fsdp.train.data.tokenizer import (
    BPE_VOCAB_SIZE,
    ByteVocabulary,
    IdVocabulary,
    TokenizerVocabulary,
    Vocabulary,
    load_tokenizer,
    tokenizer_files,
    train_bpe,
)
from megatron_fsdp.train.faults import memory_told_of_data, telling_of_memory
from megatron_fsdp.train.options.job import Job, Split, parse_split
from megatron_fsdp.train.options.options import Options
from megatron_fsdp.train.ranks import Rank, work_on_machines

VERSION = 4  # of the folder of tokens; raise it when the same text gives other tokens
SIDE_FILE = "data.json"
TOKENIZER_FILE = "tokenizer.json"
SAMPLE_BYTES = 32 * 1024**2  # that a BPE is trained on: minutes, and more changes little
_BATCH = 2**23  # characters encoded in one go
_UNFAIR = 4.0  # the factor by which a side may miss its share
_FEW = 100  # documents; fewer cannot be cut into three shares by their hashes
_COUNTED = 2**20  # tokens whose bytes are counted where that takes decoding

Side = Literal["training", "held_out", "aside"]
Piece = tuple[str, Side, bool]
"""A part of a document, where the document goes, and whether it ends with this part."""


@dataclass(frozen=True)
class TokenData:
    """The text as token ids, in files that ranks of a machine map into the same memory."""

    training: TokenFile
    held_out: TokenFile
    held_out_bytes: int  # of UTF-8, ends of texts counted as one; 0: not known
    vocabulary: Vocabulary
    checksum: str  # of all ids, whatever their dtype
    notes: tuple[str, ...] = ()  # what a person should know of the preparation


def prepare_data(job: Job, folder: Path, rank: Rank) -> TokenData:
    """Make the tokens, or find those of an earlier run in the folder of results or `--data-cache-path`; collective.

    The first rank of each machine makes them, and all ranks compare what they found, so machines need not share a
    folder.
    """

    def write() -> None:
        with telling_of_memory(lambda error: memory_told_of_data(error, rank)):
            write_data(job.options, folder)

    work_on_machines(rank, write)
    found = together("opening the tokens of --data-path", lambda: read_data(job, folder))
    checksums = gather_objects(found.checksum)
    if len(set(checksums)) > 1:
        raise ConfigurationError(
            f"the tokens of --data-path differ, with checksums {by_value(checksums)}: give the same text on every "
            "machine, or one folder that all of them see"
        )
    return found


def tokens_folder(options: Options, folder: Path) -> tuple[Path, Source]:
    """Return where tokens are or will be, below the folder of results or in the cache, and what they are made from."""
    checkpoint, events = options.checkpoint, options.reporting.tensorboard_dir
    maps = checkpoint.dump_param_to_param_group_map
    written = (folder, options.data.data_cache_path, checkpoint.save, events, maps)
    outputs = {path.absolute() for path in written if path is not None}
    source = find_source(options.data.data_path, outputs)
    return (options.data.data_cache_path or folder) / folder_name(options, source), source


def folder_name(options: Options, source: Source) -> str:
    """Name the folder of tokens by a hash of everything that decides them: files, tokenizer and split."""
    data = options.data
    model = None
    if data.tokenizer_model is not None:
        model = [hashlib.sha256(file.read_bytes()).hexdigest() for file in tokenizer_files(data.tokenizer_model)]
    facts = [VERSION, source.listing(), data.json_key, data.tokenizer_type, data.vocab_size, model, data.split]
    return f"tokens-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def write_data(options: Options, folder: Path) -> None:
    """Write the tokens of a text atomically; where they exist, verify their checksum instead."""
    made, source = tokens_folder(options, folder)
    place, mine = made.parent, f".{made.name}.{platform.node()}."
    with ExitStack() as held:
        for left in place.glob(f"{mine}*"):  # of runs on this machine that were killed while they made the same tokens
            if not _is_alive(int(left.suffix[1:])) and claim(left, held):
                shutil.rmtree(left, ignore_errors=True)
        if (made / SIDE_FILE).exists():
            _require_unchanged(made, options)
            return
        temporary = place / f"{mine}{uuid.uuid4().hex[:8]}.{os.getpid()}"
        held.callback(shutil.rmtree, temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            claim(temporary, held)
            _save(_prepare(options, source, temporary), temporary)
            if made.exists() and not (made / SIDE_FILE).exists():  # nothing that this program left
                raise ConfigurationError(f"{made} is there and has no {SIDE_FILE}: remove it")
            temporary.rename(made)
        except OSError as error:
            if not (made / SIDE_FILE).exists():  # else another machine was faster
                raise ConfigurationError(
                    f"tokens of --data-path cannot be made in {place} ({error}): where it cannot be written, give "
                    "another --data-cache-path or --out"
                ) from error


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def read_data(job: Job, folder: Path) -> TokenData:
    """Open what `write_data` wrote; ranks of a machine share the memory."""
    made, source = tokens_folder(job.options, folder)
    found = _load(made, job.options)
    for name, file in (("training", found.training), ("held-out", found.held_out)):
        if file.count <= job.seq_length:
            raise ConfigurationError(
                f"the {name} text has {file.count:,} tokens and one sample needs {job.seq_length + 1:,}: give "
                f"--data-path more text, --split other shares than {job.options.data.split}, or a lower --seq-length"
            )
        file.open()  # raises where the file is gone or too short
    if not source.left_out:
        return found
    count = len(source.left_out)  # not kept with the tokens, which are the same with more such folders
    words = "1 folder of an earlier run is" if count == 1 else f"{count} folders of earlier runs are"
    return replace(found, notes=(*found.notes, f"{words} left out, first {source.left_out[0]}"))


def _save(data: TokenData, folder: Path) -> None:
    """Write tokenizer and side file into a folder; the side file names token files in it by relative paths."""
    vocabulary, end = data.vocabulary, ""
    if isinstance(vocabulary, TokenizerVocabulary):
        vocabulary.save(folder / TOKENIZER_FILE)
        end = vocabulary.end
    values: dict[str, Any] = {}
    for name, file in (("training", data.training), ("held_out", data.held_out)):
        is_inside = file.path.is_relative_to(folder)
        path = file.path.relative_to(folder) if is_inside else file.path.absolute()
        values[name] = {**asdict(file), "path": str(path)}
    values |= {"held_out_bytes": data.held_out_bytes, "vocab_size": vocabulary.vocab_size, "end": end}
    values |= {"checksum": data.checksum, "notes": list(data.notes)}
    (folder / SIDE_FILE).write_text(json.dumps(values, indent=2), encoding="utf-8")


def _load(folder: Path, options: Options) -> TokenData:
    path = folder / SIDE_FILE
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        training, held_out = (
            TokenFile(**{**said[name], "path": folder / said[name]["path"]}) for name in ("training", "held_out")
        )
        vocabulary: Vocabulary = IdVocabulary(said["vocab_size"])
        if said["end"]:
            vocabulary = TokenizerVocabulary.read(folder / TOKENIZER_FILE, said["end"])
        elif options.data.tokenizer_type == "byte":
            vocabulary = ByteVocabulary()
        return TokenData(training, held_out, said["held_out_bytes"], vocabulary, said["checksum"], tuple(said["notes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): tokens are made by the first rank of each machine, so --out and "
            "--data-cache-path have to be folders that all ranks of a machine see; or it was damaged: remove its folder"
        ) from None


def _require_unchanged(folder: Path, options: Options) -> None:
    """Verify the checksum of the ids in a folder.

    Ids of the user that lie elsewhere are not read again: the folder is named after their size and time.
    """
    found = _load(folder, options)
    if not found.training.path.is_relative_to(folder):
        return
    if digest((found.training, found.held_out), 2**31) != found.checksum:
        raise ConfigurationError(
            f"the tokens in {folder} were damaged: they do not have the checksum in {SIDE_FILE}; remove the folder, "
            "and they are made again"
        )


def _prepare(options: Options, source: Source, folder: Path) -> TokenData:
    split, data = parse_split(options.data.split), options.data
    vocabulary: Vocabulary
    if source.has_ids:
        vocabulary = _vocabulary_of_ids(options, source)
        training, held_out = split_ids(source, split)
        size = _count_bytes(held_out, vocabulary) if isinstance(vocabulary, TokenizerVocabulary) else 0
        return TokenData(training, held_out, size, vocabulary, digest((training, held_out), vocabulary.vocab_size))
    documents = Documents(source, data.json_key)
    vocabulary = _vocabulary_of_texts(options, documents, split)
    found = encode_documents(documents, vocabulary, split, folder)
    _require_texts(options, documents, found.training.count + found.held_out.count)
    if not documents.skipped:
        return found
    count, first = len(documents.skipped), documents.skipped[0]
    note = f"{count} {'file is' if count == 1 else 'files are'} no UTF-8 text and left out, first {first}"
    return replace(found, notes=(note, *found.notes))


def _require_texts(options: Options, documents: Documents, tokens: int) -> None:
    """Refuse texts that give no tokens, and `--json-key` if no file has fields."""
    data, root = options.data, documents.source.root
    if tokens == 0 and any(next(document, None) is not None for document in documents):
        raise ConfigurationError(
            f"--split {data.split} leaves all texts of --data-path {root} aside: give a smaller third number, or more "
            "texts"
        )
    if tokens == 0:
        raise ConfigurationError(f"--data-path {root} holds no UTF-8 text: give a file or a folder with some")
    if options.is_given("json_key") and not documents.uses_key:
        raise ConfigurationError(
            f"--json-key {data.json_key} does nothing, since --data-path {root} holds no JSON lines and no data set: "
            "leave it out"
        )


def _vocabulary_of_texts(options: Options, documents: Documents, split: Split) -> Vocabulary:
    data = options.data
    if data.tokenizer_type == "NullTokenizer":
        raise ConfigurationError(
            f"--data-path {documents.source.root} is text, and --tokenizer-type NullTokenizer takes token ids: give "
            "the prefix of a .bin and .idx, or an .npy; or another tokenizer"
        )
    if data.tokenizer_model is not None:
        return load_tokenizer(data.tokenizer_model)
    if data.tokenizer_type == "byte":
        return ByteVocabulary()
    return train_bpe(sample_texts(documents, split, documents.size), data.vocab_size or BPE_VOCAB_SIZE)


def _vocabulary_of_ids(options: Options, source: Source) -> Vocabulary:
    data = options.data
    if data.tokenizer_model is not None:
        return load_tokenizer(data.tokenizer_model)
    if data.tokenizer_type == "NullTokenizer":
        return IdVocabulary(data.vocab_size or 0)
    raise ConfigurationError(
        f"--data-path {source.root} holds token ids, and --tokenizer-type {data.tokenizer_type} takes text: give "
        "--tokenizer-type NullTokenizer with --vocab-size, or HuggingFaceTokenizer with the one that made them"
    )


def split_ids(source: Source, split: Split) -> tuple[TokenFile, TokenFile]:
    """Hold out the last documents of a pair, or the end of an .npy or of a single document; what is set aside is last.

    Ids stay where they are.
    """
    if source.kind == "npy":
        whole = npy_tokens(source.root)
    else:
        pair = open_indexed(source.root)
        whole = pair.tokens
        cut, stop = round(pair.documents * split.training), round(pair.documents * (1 - split.aside))
        if 0 < cut < stop:
            places = pair.document_start(cut), pair.document_start(stop)
            return whole.part(0, places[0]), whole.part(*places)
    return _cut_end(whole.part(0, round(whole.count * (1 - split.aside))), split)


def side_of(beginning: str, split: Split) -> Side:
    """Choose a document's side by the hash of its first piece: copies lie on one side, and order does not matter."""
    digest = hashlib.sha256(beginning.encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < split.held_out:
        return "held_out"
    return "aside" if place < split.held_out + split.aside else "training"


def pieces(documents: Iterable[Document], split: Split) -> Iterator[Piece]:
    """Yield the pieces of all documents in order, without documents set aside; of a few, none is set aside."""
    found = iter(documents)
    first = list(itertools.islice(found, _FEW))
    if len(first) < _FEW:
        split = replace(split, aside=0.0)
    for document in itertools.chain(first, found):
        text = next(document, None)
        side: Side = "aside" if text is None else side_of(text, split)
        while text is not None and side != "aside":
            following = next(document, None)
            yield text, side, following is None
            text = following


def sample_texts(documents: Iterable[Document], split: Split, size: int, limit: int = SAMPLE_BYTES) -> list[str]:
    """Return about `limit` bytes of text to train a tokenizer on, spread evenly over `size` bytes.

    Held-out texts are left out, unless there is nothing else.
    """
    every = max(1, math.ceil(size / limit))
    chosen = [piece for number, piece in enumerate(pieces(documents, split)) if number % every == 0]
    return [text for text, side, _ in chosen if side == "training"] or [text for text, *_ in chosen]


def encode_documents(documents: Iterable[Document], vocabulary: Vocabulary, split: Split, folder: Path) -> TokenData:
    """Write all documents as tokens into an empty folder, each followed by the end-of-text token.

    Documents are split; where that misses the shares by far (few documents, or very unequal ones), the end of the whole
    is held out instead, and a note says so.
    """
    dtype, held_out_bytes = dtype_for(vocabulary.vocab_size), 0
    paths = [folder / "training.bin", folder / "held_out.bin"]
    counts = [0, 0]
    end = np.array([vocabulary.end_id], dtype)
    with paths[0].open("wb") as training, paths[1].open("wb+") as held_out:
        for batch in _batches(pieces(documents, split)):
            encoded = vocabulary.encode([text for text, *_ in batch])
            for (text, side, is_last), ids in zip(batch, encoded, strict=True):
                whole = np.concatenate([ids, end]) if is_last else ids
                is_held_out = side == "held_out"
                (held_out if is_held_out else training).write(whole.astype(dtype, copy=False).tobytes())
                counts[is_held_out] += len(whole)
                if is_held_out:
                    held_out_bytes += len(text.encode()) + is_last
        is_cut = not _is_fair(counts[0], counts[1], split)
        if is_cut:
            held_out.seek(0)
            shutil.copyfileobj(held_out, training)
    notes: tuple[str, ...] = ()
    if is_cut:
        paths[1].unlink()
        sides = _cut_end(TokenFile(paths[0], dtype.str, 0, sum(counts)), split)
        held_out_bytes = _count_bytes(sides[1], vocabulary)
        notes = ("documents are too few or too unequal to split, so the end of the text is held out",)
    else:
        sides = (TokenFile(paths[0], dtype.str, 0, counts[0]), TokenFile(paths[1], dtype.str, 0, counts[1]))
    return TokenData(*sides, held_out_bytes, vocabulary, digest(sides, vocabulary.vocab_size), notes)


def _is_fair(training: int, held_out: int, split: Split) -> bool:
    """Return whether both sides have roughly their share of the tokens."""
    wanted = split.held_out / (split.training + split.held_out)
    found = held_out / max(1, training + held_out)
    return training > 0 and wanted / _UNFAIR <= found <= min(wanted * _UNFAIR, 1 - (1 - wanted) / _UNFAIR)


def _cut_end(whole: TokenFile, split: Split) -> tuple[TokenFile, TokenFile]:
    """Split tokens in place: the end, at least one token, is held out."""
    share = split.held_out / (split.training + split.held_out)
    cut = whole.count - min(whole.count, max(1, round(whole.count * share)))
    return whole.part(0, cut), whole.part(cut, whole.count)


def _count_bytes(tokens: TokenFile, vocabulary: Vocabulary) -> int:
    """Estimate the UTF-8 bytes of tokens: counted for the first million, extrapolated for the rest."""
    first = tokens.part(0, min(tokens.count, _COUNTED)).open()
    if not len(first):
        return 0
    ends = int(np.count_nonzero(first == vocabulary.end_id))
    counted = len(vocabulary.decode(first.tolist()).encode()) + ends
    return round(counted * tokens.count / len(first))


def _batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
