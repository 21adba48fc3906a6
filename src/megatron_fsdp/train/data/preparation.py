"""Before training: tokens and vocabulary, made once on each machine, kept for later runs, the same on all ranks."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.encoding import count_bytes, cut_end, encode_documents, sample_texts
from megatron_fsdp.train.data.indexed import open_indexed
from megatron_fsdp.train.data.prepared import (
    SIDE_FILE,
    TOKENIZER_FILE,
    Prepared,
    read_prepared,
    require_unchanged,
    write_prepared,
)
from megatron_fsdp.train.data.sources import SavedDataset, Source, TextFiles, TokenIds, find_source, listing
from megatron_fsdp.train.data.texts import Documents, dataset_bytes
from megatron_fsdp.train.data.token_file import TokenArray, TokenFile, crc32_of, digest, npy_tokens
from megatron_fsdp.train.data.tokenizer import (
    BPE_VOCAB_SIZE,
    TokenizerVocabulary,
    load_tokenizer,
    said_ends,
    tokenizer_file,
    train_bpe,
)
from megatron_fsdp.train.data.vocabulary import ByteVocabulary, IdVocabulary, Vocabulary
from megatron_fsdp.train.launch.ranks import Rank, require_same, work_on_machines
from megatron_fsdp.train.options.job import Job, Split, parse_split
from megatron_fsdp.train.options.options import Options
from megatron_fsdp.train.recovery.faults import telling_of_memory_for_data

VERSION = 3  # of the folder of tokens; raise it when the same text gives other tokens
_FORGOTTEN_S = 3600.0  # after so long without a change a preparation was killed, where locks cannot tell


@dataclass(frozen=True)
class TokenData:
    """The text as token ids.

    Attributes:
        training: Ids to train on.
        held_out: Ids to evaluate on.
        held_out_bytes: UTF-8 bytes that the held-out ids stand for (for bits per byte); 0: not known.
        vocabulary: From text to ids and back.
        checksum: Of all ids, in hex; the same for the same tokens.
        training_file: Where the ids to train on lie.
        notes: What a person should know of the preparation, in words.
    """

    training: TokenArray
    held_out: TokenArray
    held_out_bytes: int
    vocabulary: Vocabulary
    checksum: str
    training_file: TokenFile
    notes: tuple[str, ...] = ()


def prepare_data(job: Job, folder: Path, rank: Rank) -> TokenData:
    """Make the tokens, or find those of an earlier run; collective.

    The first rank of each machine makes them, and all ranks compare what they found, so machines need not share a
    folder.

    Args:
        job: Where text comes from.
        folder: Of results; tokens go into a folder in it where `--data-cache-path` names no other.
        rank: This process.

    Raises:
        ConfigurationError: On every rank, for what is wrong with the data.
        OutOfMemoryError: On every rank, where one had too little memory to make the tokens.
    """

    def write() -> None:
        with telling_of_memory_for_data(rank):
            write_data(job.options, folder)

    work_on_machines(rank, write)
    found: TokenData | ConfigurationError
    try:
        found = read_data(job, folder)
    except ConfigurationError as error:
        found = error
    require_same(
        rank,
        found.checksum if isinstance(found, TokenData) else None,
        str(found) if isinstance(found, ConfigurationError) else None,
        "the tokens of --data-path differ, with checksums {}: give the same text on every machine, or one folder that "
        "all of them see",
    )
    if isinstance(found, ConfigurationError):
        raise found
    return found


def tokens_folder(options: Options, folder: Path) -> tuple[Path, Source]:
    """Return where tokens are or will be, and what they are made from.

    Args:
        options: Of the run.
        folder: Of results.

    Raises:
        ConfigurationError: There is nothing to make them from.
    """
    checkpoint, events = options.checkpoint, options.reporting.tensorboard_dir
    maps = checkpoint.dump_param_to_param_group_map
    written = (folder, options.data.data_cache_path, checkpoint.save, events, maps)
    outputs = {path.absolute() for path in written if path is not None}
    source = find_source(options.data.data_path, outputs)
    return (options.data.data_cache_path or folder) / folder_name(options, source), source


def folder_name(options: Options, source: Source) -> str:
    """Name the folder of tokens after all that decides them: the files as they are, the tokenizer, the split."""
    data = options.data
    model = None
    if data.tokenizer_model is not None:
        file = tokenizer_file(data.tokenizer_model)
        model = [hashlib.sha256(file.read_bytes()).hexdigest(), *said_ends(file)]
    facts = [VERSION, listing(source), data.json_key, data.tokenizer_type, data.vocab_size, model, data.split]
    return f"tokens-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def write_data(options: Options, folder: Path) -> None:
    """Leave the tokens of a text where they belong, whole or not at all; where they are, only compare their checksum.

    Args:
        options: Of the run.
        folder: Of results.

    Raises:
        ConfigurationError: There is no text, it cannot be tokenized so, the folder cannot be written, or tokens that
            are there were damaged.
    """
    made, source = tokens_folder(options, folder)
    place = made.parent
    _remove_forgotten(place, made.name)
    if (made / SIDE_FILE).exists():
        require_unchanged(made)
        return
    temporary, claim = place, -1
    try:
        temporary, claim = _new_temporary(place, made.name)
        write_prepared(_prepare(options, source, temporary), temporary)
        if made.exists() and not (made / SIDE_FILE).exists():  # nothing that this program left
            raise ConfigurationError(f"{made} is there and has no {SIDE_FILE}: remove it")
        temporary.rename(made)
    except OSError as error:
        if not (made / SIDE_FILE).exists():  # else another machine was faster
            raise ConfigurationError(
                f"tokens of --data-path cannot be made in {place} ({error}): where it cannot be written, give another "
                "--data-cache-path or --out"
            ) from error
    finally:
        if claim != -1:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(claim)


def read_data(job: Job, folder: Path) -> TokenData:
    """Open what `write_data` left; ranks of a machine share the memory.

    Args:
        job: The run.
        folder: Of results.

    Raises:
        ConfigurationError: It is damaged, or too little for one sample.
    """
    made, source = tokens_folder(job.options, folder)
    prepared = read_prepared(made)
    for name, file in (("training", prepared.training), ("held-out", prepared.held_out)):
        if file.count <= job.seq_length:
            raise ConfigurationError(
                f"the {name} text has {file.count:,} tokens and one sample needs {job.seq_length + 1:,}: give "
                f"--data-path more text, --split other shares than {job.options.data.split}, or a lower --seq-length"
            )
    return TokenData(
        prepared.training.open(),
        prepared.held_out.open(),
        prepared.held_out_bytes,
        _read_vocabulary(job.options, prepared, made),
        prepared.checksum,
        prepared.training,
        (*prepared.notes, *_left_out_notes(source)),
    )


def _prepare(options: Options, source: Source, folder: Path) -> Prepared:
    split = parse_split(options.data.split)
    if isinstance(source, TokenIds):
        return _prepare_ids(options, source, split, folder)
    kind = options.data.tokenizer_type
    if kind == "NullTokenizer":
        raise ConfigurationError(
            f"--data-path {source.root} is text, and --tokenizer-type NullTokenizer takes token ids: give the prefix "
            "of a .bin and .idx, or an .npy; or another tokenizer"
        )
    documents = Documents(source, options.data.json_key)
    vocabulary = _vocabulary_of(options, documents, split)
    if isinstance(vocabulary, TokenizerVocabulary):
        vocabulary.save(folder / TOKENIZER_FILE)
    encoded = encode_documents(documents, vocabulary, split, folder)
    if encoded.training.count + encoded.held_out.count == 0:
        _refuse_nothing(documents, options.data.split)
    if options.is_given("json_key") and not documents.uses_key:
        raise ConfigurationError(
            f"--json-key {options.data.json_key} does nothing, since --data-path {source.root} holds no JSON lines and "
            "no data set: leave it out"
        )
    return Prepared(
        encoded.training,
        encoded.held_out,
        encoded.held_out_bytes,
        vocabulary.vocab_size,
        vocabulary.end if isinstance(vocabulary, TokenizerVocabulary) else "",
        digest((encoded.training, encoded.held_out), vocabulary.vocab_size),
        _notes(documents, is_cut=encoded.is_cut),
        crc32_of((encoded.training, encoded.held_out)),
    )


def _refuse_nothing(documents: Documents, split: str) -> NoReturn:
    """Say why there are no tokens at all.

    Raises:
        ConfigurationError: Always.
    """
    root = documents.source.root
    if any(next(document, None) is not None for document in documents):
        raise ConfigurationError(
            f"--split {split} leaves all texts of --data-path {root} aside: give a smaller third number, or more texts"
        )
    raise ConfigurationError(f"--data-path {root} holds no UTF-8 text: give a file or a folder with some")


def _vocabulary_of(options: Options, documents: Documents, split: Split) -> Vocabulary:
    data, source = options.data, documents.source
    if data.tokenizer_model is not None:
        return load_tokenizer(data.tokenizer_model)
    if data.tokenizer_type == "byte":
        return ByteVocabulary()
    if isinstance(source, SavedDataset):
        size = dataset_bytes(source.root, data.json_key)
    else:
        size = sum(size for _, size, _ in listing(source))
    return train_bpe(sample_texts(documents, split, size), data.vocab_size or BPE_VOCAB_SIZE)


def _notes(documents: Documents, *, is_cut: bool) -> tuple[str, ...]:
    notes = []
    if documents.skipped:
        count, first = len(documents.skipped), documents.skipped[0]
        notes.append(f"{count} {'file is' if count == 1 else 'files are'} no UTF-8 text and left out, first {first}")
    if is_cut:
        notes.append("documents are too few or too unequal to split, so the end of the text is held out")
    return tuple(notes)


def _left_out_notes(source: Source) -> tuple[str, ...]:
    """What is said of folders of earlier runs; not kept with the tokens, which are the same with more such folders."""
    if not isinstance(source, TextFiles) or not source.left_out:
        return ()
    count = len(source.left_out)
    words = "1 folder of an earlier run is" if count == 1 else f"{count} folders of earlier runs are"
    return (f"{words} left out, first {source.left_out[0]}",)


def _prepare_ids(options: Options, source: TokenIds, split: Split, folder: Path) -> Prepared:
    """Token ids stay where they are; they are read once, for a checksum and for ids that no token has."""
    data = options.data
    vocabulary: Vocabulary
    if data.tokenizer_model is not None:
        vocabulary = load_tokenizer(data.tokenizer_model)
        vocabulary.save(folder / TOKENIZER_FILE)
    elif data.tokenizer_type == "NullTokenizer":
        vocabulary = IdVocabulary(data.vocab_size or 0)
    else:
        raise ConfigurationError(
            f"--data-path {source.root} holds token ids, and --tokenizer-type {data.tokenizer_type} takes text: give "
            "--tokenizer-type NullTokenizer with --vocab-size, or HuggingFaceTokenizer with the one that made them"
        )
    training, held_out = split_indexed(source.root, split) if source.is_indexed else split_npy(source.root, split)
    return Prepared(
        training,
        held_out,
        count_bytes(held_out, vocabulary) if isinstance(vocabulary, TokenizerVocabulary) else 0,
        vocabulary.vocab_size,
        vocabulary.end if isinstance(vocabulary, TokenizerVocabulary) else "",
        digest((training, held_out), vocabulary.vocab_size),
    )


def split_npy(path: Path, split: Split) -> tuple[TokenFile, TokenFile]:
    """Hold out the end of an .npy; what is left aside comes after it."""
    whole = npy_tokens(path)
    return cut_end(whole.part(0, round(whole.count * (1 - split.aside))), split)


def split_indexed(prefix: Path, split: Split) -> tuple[TokenFile, TokenFile]:
    """Hold out the last documents, or, of a single one, its end; what is left aside comes after them."""
    found = open_indexed(prefix)
    stop = round(found.documents * (1 - split.aside))
    cut = round(found.documents * split.training)
    if not 0 < cut < stop:
        return cut_end(found.tokens.part(0, round(found.tokens.count * (1 - split.aside))), split)
    places = found.document_start(cut), found.document_start(stop)
    return found.tokens.part(0, places[0]), found.tokens.part(*places)


def _read_vocabulary(options: Options, prepared: Prepared, made: Path) -> Vocabulary:
    if prepared.end:
        return TokenizerVocabulary.read(made / TOKENIZER_FILE, prepared.end)
    if options.data.tokenizer_type == "byte":
        return ByteVocabulary()
    return IdVocabulary(prepared.vocab_size)


def _new_temporary(place: Path, name: str) -> tuple[Path, int]:
    """A folder for tokens that are being made, and a descriptor that claims it until it is closed, or its process ends.

    Raises:
        OSError: It cannot be made.
    """
    while True:
        temporary = place / f".{name}.{uuid.uuid4().hex[:8]}"
        temporary.mkdir(parents=True)
        claim = os.open(temporary, os.O_RDONLY)
        with suppress(OSError):  # the file system knows no locks of folders
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if temporary.exists():  # else another machine took it for forgotten before it was claimed
            return temporary, claim
        os.close(claim)


def _remove_forgotten(place: Path, name: str) -> None:
    """Remove what killed preparations of the same tokens left."""
    for left in place.glob(f".{name}.*"):
        with suppress(OSError):  # another one removes it
            if _is_forgotten(left):
                shutil.rmtree(left)


def _is_forgotten(left: Path) -> bool:
    """Whether nobody claims a folder; where the file system knows no locks, whether it has not changed for long.

    Raises:
        OSError: It is gone.
    """
    descriptor = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        changes = [file.stat().st_mtime for file in (left, *left.iterdir())]
        return time.time() - max(changes) > _FORGOTTEN_S
    else:
        return True
    finally:
        os.close(descriptor)
