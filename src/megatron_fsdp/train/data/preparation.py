"""Prepares data: texts become a pair of Megatron's token files once on each machine; all ranks split it alike."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fsdp.comm.agreement import by_value, gather_objects, together
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.sources import Piece, Source, Texts, find_source
from megatron_fsdp.train.data.token_file import (
    Indexed,
    TokenFile,
    bin_of,
    digest,
    dtype_for,
    npy_tokens,
    open_indexed,
    write_index,
)
from megatron_fsdp.train.data.tokenizer import (
    BPE_VOCAB_SIZE,
    ByteTokenizer,
    PieceTokenizer,
    load_tokenizer,
    tokenizer_files,
    train_bpe,
)
from megatron_fsdp.train.failures import telling_of_memory
from megatron_fsdp.train.options.job import Job, Split, parse_split
from megatron_fsdp.train.options.options import Options
from megatron_fsdp.train.ranks import Rank, work_on_machines

VERSION = 5  # of the folder of tokens; raise it when the same text gives other tokens
PREFIX = "tokens"  # of the pair in this folder
SIDE_FILE = "tokens.json"
TOKENIZER_FILE = "tokenizer.json"
SAMPLE_BYTES = 32 * 1024**2  # that a BPE is trained on: minutes, and more changes little
_BATCH = 2**23  # characters encoded in one go


@dataclass(frozen=True)
class TokenData:
    """The text as token ids, in files that ranks of a machine map into the same memory."""

    training: TokenFile
    held_out: TokenFile
    vocab_size: int
    end_id: int | None  # of the token that ends a text; None: not known
    checksum: str  # of all ids, whatever their dtype
    notes: tuple[str, ...] = ()  # what a person should know of the preparation


def prepare_data(job: Job, folder: Path, rank: Rank) -> TokenData:
    """Make the tokens, or find those of an earlier run in the folder of results or `--data-cache-path`; collective.

    The first rank of each machine makes them, and all ranks compare what they found, so machines need not share a
    folder.
    """

    def write() -> None:
        where = f"out of memory on rank {rank.index} while it made the tokens of --data-path"
        try_words = "give text in shorter lines, or token files (.bin and .idx, or .npy), which are mapped"
        with telling_of_memory(lambda error: f"{where}: {error!r}\n  try: {try_words}"):
            write_data(job.options, folder)

    work_on_machines(rank, write)
    found = together("opening the tokens of --data-path", lambda: read_data(job, folder), raises=ConfigurationError)
    checksums = gather_objects(found.checksum)
    if len(set(checksums)) > 1:
        raise ConfigurationError(
            f"the tokens of --data-path differ, with checksums {by_value(checksums)}: give the same text on every "
            "machine, or one folder that all of them see"
        )
    return found


def tokens_folder(options: Options, folder: Path) -> tuple[Path, Source]:
    """Return where tokens are or will be, below the folder of results or in the cache, and what they are made from.

    The folder is named by a hash of everything that decides them: files and tokenizer.
    """
    data, reporting = options.data, options.reporting
    written = (folder, data.data_cache_path, options.checkpoint.save, reporting.tensorboard_dir)
    source = find_source(data.data_path, {path.absolute() for path in written if path is not None})
    model = None
    if data.tokenizer_model is not None:
        model = [hashlib.sha256(file.read_bytes()).hexdigest() for file in tokenizer_files(data.tokenizer_model)]
    facts = [VERSION, source.listing(), data.json_key, data.tokenizer_type, data.vocab_size, model]
    name = f"tokens-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    return (data.data_cache_path or folder) / name, source


# ---- making tokens ---------------------------------------------------------------------------------------------------


def write_data(options: Options, folder: Path) -> None:
    """Make the folder of tokens, whole or not at all, where it is not there yet.

    It holds the tokenizer and a checksum, and of texts a pair of token files; token ids stay where they are.
    """
    made, source = tokens_folder(options, folder)
    if (made / SIDE_FILE).exists():
        return
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{made.name}.", dir=made.parent) as temporary:
            new = Path(temporary, made.name)
            new.mkdir()
            _write(options, source, new)
            new.rename(made)
    except OSError as error:
        if not (made / SIDE_FILE).exists():  # else another machine was faster
            raise ConfigurationError(
                f"tokens of --data-path cannot be made in {made.parent} ({error}): where it cannot be written, give "
                "another --data-cache-path or --out"
            ) from error


def _write(options: Options, source: Source, folder: Path) -> None:
    texts = Texts(source, options.data.json_key)
    tokenizer = _tokenizer(options, texts)
    vocab_size, end_id = (options.data.vocab_size or 0), None
    if tokenizer is not None:
        vocab_size, end_id = tokenizer.vocab_size, tokenizer.end_id
        tokenizer.save(folder / TOKENIZER_FILE)
    notes = []
    if tokenizer is not None and not source.has_ids:
        encode_texts(texts, tokenizer, folder / PREFIX)
        _require_texts(options, texts, bin_of(folder / PREFIX))
        if texts.skipped:
            count = len(texts.skipped)
            words = "file is" if count == 1 else "files are"
            notes.append(f"{count} {words} no UTF-8 text and left out, first {texts.skipped[0]}")
    checksum = digest(open_tokens(source, folder)[0], vocab_size)
    said = {"checksum": checksum, "vocab_size": vocab_size, "end_id": end_id, "notes": notes}
    (folder / SIDE_FILE).write_text(json.dumps(said, indent=2), encoding="utf-8")


def _tokenizer(options: Options, texts: Texts) -> ByteTokenizer | PieceTokenizer | None:
    """Return what makes the tokens, or has made them; None: ids of which nothing is known."""
    data, source = options.data, texts.source
    if data.tokenizer_model is not None:
        return load_tokenizer(data.tokenizer_model)
    takes_ids = data.tokenizer_type == "NullTokenizer"
    if source.has_ids and not takes_ids:
        raise ConfigurationError(
            f"--data-path {source.root} holds token ids, and --tokenizer-type {data.tokenizer_type} takes text: give "
            "--tokenizer-type NullTokenizer with --vocab-size, or HuggingFaceTokenizer with the one that made them"
        )
    if takes_ids and not source.has_ids:
        raise ConfigurationError(
            f"--data-path {source.root} is text, and --tokenizer-type NullTokenizer takes token ids: give "
            "the prefix of a .bin and .idx, or an .npy; or another tokenizer"
        )
    if takes_ids:
        return None
    if data.tokenizer_type == "byte":
        return ByteTokenizer()
    every = max(1, math.ceil(texts.size / SAMPLE_BYTES))  # spread evenly
    return train_bpe((text for text, _ in islice(texts, 0, None, every)), data.vocab_size or BPE_VOCAB_SIZE)


def _require_texts(options: Options, texts: Texts, tokens: Path) -> None:
    """Refuse texts that give no tokens, and `--json-key` if no file has fields."""
    root = texts.source.root
    if tokens.stat().st_size == 0:
        raise ConfigurationError(f"--data-path {root} holds no UTF-8 text: give a file or a folder with some")
    if options.is_given("json_key") and not texts.uses_key:
        raise ConfigurationError(
            f"--json-key {texts.json_key} does nothing, since --data-path {root} holds no JSON lines and no data set: "
            "leave it out"
        )


def encode_texts(texts: Iterable[Piece], tokenizer: ByteTokenizer | PieceTokenizer, prefix: Path) -> None:
    """Write texts as a pair of token files; each document ends with the end-of-text token."""
    dtype = dtype_for(tokenizer.vocab_size)
    end = np.array([tokenizer.end_id], dtype)
    lengths, ends = list[int](), [0]
    with bin_of(prefix).open("wb") as file:
        for batch in _batches(texts):
            encoded = tokenizer.encode([text for text, _ in batch])
            for (_, is_last), ids in zip(batch, encoded, strict=True):
                whole = np.concatenate([ids, end]) if is_last else ids
                file.write(whole.astype(dtype, copy=False).tobytes())
                lengths.append(len(whole))
                if is_last:
                    ends.append(len(lengths))
    write_index(prefix, dtype, lengths, ends)


def _batches(texts: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in texts:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---- reading tokens --------------------------------------------------------------------------------------------------


def read_data(job: Job, folder: Path) -> TokenData:
    """Open what `write_data` wrote, and split it; ranks of a machine share the memory."""
    options = job.options
    made, source = tokens_folder(options, folder)
    path = made / SIDE_FILE
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        vocab_size, end_id, checksum, notes = (said[name] for name in ("vocab_size", "end_id", "checksum", "notes"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): tokens are made by the first rank of each machine, so --out and "
            "--data-cache-path have to be folders that all ranks of a machine see; or it was damaged: remove its folder"
        ) from None
    training, held_out = split_tokens(source, made, parse_split(options.data.split))
    for name, file in (("training", training), ("held-out", held_out)):
        if file.count <= job.seq_length:
            raise ConfigurationError(
                f"the {name} text has {file.count:,} tokens and one sample needs {job.seq_length + 1:,}: give "
                f"--data-path more text, --split other shares than {options.data.split}, or a lower --seq-length"
            )
        file.open()  # raises where the file is gone or too short
    return TokenData(training, held_out, vocab_size, end_id, checksum, tuple(notes))


def open_tokens(source: Source, folder: Path) -> tuple[TokenFile, Indexed | None]:
    """Return the ids of a source, or those that were made of it in a folder, and their pair of files."""
    if source.kind == "npy":
        return npy_tokens(source.root), None
    pair = open_indexed(source.root if source.has_ids else folder / PREFIX)
    return pair.tokens, pair


def split_tokens(source: Source, folder: Path, split: Split) -> tuple[TokenFile, TokenFile]:
    """Hold out the last documents, or the end of an .npy or of a single document; what is set aside comes after it."""
    whole, pair = open_tokens(source, folder)
    if pair is not None:
        cut, stop = round(pair.documents * split.training), round(pair.documents * (1 - split.aside))
        if 0 < cut < stop:
            places = pair.document_start(cut), pair.document_start(stop)
            return whole.part(0, places[0]), whole.part(*places)
    used = whole.part(0, round(whole.count * (1 - split.aside)))
    share = split.held_out / (split.training + split.held_out)
    cut = used.count - min(used.count, max(1, round(used.count * share)))
    return used.part(0, cut), used.part(cut, used.count)
