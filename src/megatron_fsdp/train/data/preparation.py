"""Prepare data: convert the documents of `--data-path` to a pair of Megatron's token files, once on each machine.

Documents are read piece by piece, so that only a piece of a file is held in memory; all ranks split the tokens alike.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_fsdp.checkpoint.store import MARK_OF_WHOLE, POINTER
from megatron_fsdp.comm.agreement import all_agree, gather_objects
from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.errors import ConfigurationError, words_of
from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.console import Say
from megatron_fsdp.train.data.tokens import (
    Indexed,
    TokenArray,
    TokenData,
    TokenFile,
    bin_of,
    digest,
    dtype_for,
    idx_of,
    open_indexed,
    write_index,
)
from megatron_fsdp.train.failures import describing_memory_errors
from megatron_fsdp.train.options import Options
from megatron_fsdp.train.options.checks import parse_split
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank, work_on_machines

VERSION = 6  # of the folder of tokens; raise it when the same text gives other tokens
PREFIX = "tokens"  # of the pair in this folder
SIDE_FILE = "tokens.json"
TOKENIZER_FILE = "tokenizer.json"
_SAID = ("vocab_size", "end_id", "checksum", "notes")
_BATCH = 2**23  # characters encoded in one go
_CHUNK = 2**24  # bytes hashed in one go
_LARGE = 2**33  # bytes of text that take seconds to hash

LIBRARY_BYTES = 24 * 1024**2  # of the default text: seconds of tokenizing
PIECE = 2**20  # characters; a longer file is tokenized in pieces that end with a line where there is one
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_MADE_BY_RUNS = frozenset({"applied.json", SIDE_FILE, MARK_OF_WHOLE})
"""A folder with one of these holds results of a run, its tokens, or a checkpoint."""
_DATASET_MARKS = ({"dataset_dict.json"}, {"state.json", "dataset_info.json"})
_BEGINNING = 2**16  # bytes of a file that tell whether it is text
_ROWS = 256  # of a data set, read in one go

BPE_VOCAB_SIZE = 8192
SAMPLE_BYTES = 32 * 1024**2  # that a BPE is trained on: minutes, and more changes little
END_OF_TEXT = "<|end|>"
ENDS = (END_OF_TEXT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")
"""End-of-text tokens to look for, in this order, in tokenizers that do not name theirs."""
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")

Piece = tuple[str, bool]
"""A part of a document, not empty, and True if the document ends with it."""


def prepare_data(job: Job, folder: Path, rank: Rank, say: Say = lambda _: None) -> TokenData:
    """Make the tokens, or find an earlier run's in the folder of results or `--data-cache-path`; collective.

    The first rank of each machine makes them, and all ranks compare them, so machines need not share a folder.
    """
    made: list[str] = []

    def write() -> None:
        where = f"out of memory on rank {rank.index} while it made the tokens of --data-path"
        try_words = "give text in shorter lines, or token files (.bin and .idx, or .npy), which are mapped"
        with describing_memory_errors(lambda error: f"{where}: {error!r}\n  try: {try_words}"):
            made.append(write_data(job.options, folder, say).name)

    work_on_machines(rank, write)
    # Ranks of one machine are neighbours, the first of them first.
    name = [name for names in gather_objects(made)[: rank.index + 1] for name in names][-1]
    with all_agree("opening the tokens of --data-path", raises=ConfigurationError) as facts:
        found = read_data(job, (job.options.data.data_cache_path or folder) / name)
        facts["the text of --data-path (its checksum)"] = found.checksum
    return found


def tokens_folder(options: Options, folder: Path, say: Say = lambda _: None) -> tuple[Path, Source]:
    """Return the folder of tokens, in the folder of results or in the cache, and their source.

    The folder is named by a hash of the facts that decide them: the contents of files, their names and the tokenizer.
    """
    data = options.data
    source, model = find_source(data.data_path), None
    if source.size > _LARGE:
        say(f"reading {in_bytes(source.size)} of {source.root}, to know whether tokens of an earlier run are its own")
    if data.tokenizer_model is not None:
        model = digests_of(tokenizer_files(data.tokenizer_model))
    names = [os.path.relpath(file, source.root.parent) for file in source.files]
    contents = list(zip(names, digests_of(source.files), strict=True))
    facts = [VERSION, contents, data.json_key, data.tokenizer_type, data.vocab_size, model]
    name = f"tokens-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    return (data.data_cache_path or folder) / name, source


def digests_of(files: Sequence[Path]) -> list[str]:
    """Return a digest of the contents of each file, read in chunks by as many threads as there are cores."""

    def hashed(part: tuple[int, int]) -> bytes:
        try:
            with files[part[0]].open("rb") as file:
                file.seek(part[1])
                return hashlib.blake2b(file.read(_CHUNK), digest_size=16).digest()
        except OSError:  # of a folder of texts it is left out
            return b"unreadable"

    sizes = [file.stat().st_size if file.is_file() else 0 for file in files]  # a pipe holds no text
    parts = [(number, start) for number, size in enumerate(sizes) for start in range(0, size, _CHUNK)]
    found = [hashlib.blake2b(str(size).encode(), digest_size=16) for size in sizes]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashes release the interpreter's lock
        for (number, _), each in zip(parts, pool.map(hashed, parts), strict=True):
            found[number].update(each)
    return [each.hexdigest() for each in found]


# ---- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The files or data set of `--data-path`."""

    kind: Literal["texts", "dataset", "indexed"]  # a folder that `datasets` wrote; a pair of Megatron's token files
    root: Path  # the path given; for a pair, its prefix
    files: tuple[Path, ...]  # in an order that depends on names only

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.stat().st_size for file in self.files)


def find_source(path: Path | None) -> Source:
    """Find the files of a path, or without one the Python standard library; only names and sizes are read."""
    if path is None:
        return _library()
    is_half = path.suffix in (".bin", ".idx") and path.is_file()
    prefix = path.with_suffix("") if is_half else path
    if is_half or (not path.exists() and idx_of(prefix).is_file()):
        return Source("indexed", prefix, (bin_of(prefix), idx_of(prefix)))
    if not path.exists():
        raise ConfigurationError(
            f"--data-path {path} does not exist: give a text file, a folder of texts or JSON lines, a folder that "
            "`datasets` saved, or the prefix of a .bin and .idx"
        )
    if path.is_file():
        return Source("texts", path, (path,))
    if not path.is_dir():
        raise ConfigurationError(f"--data-path {path} is a device, pipe or socket: give a file or a folder")
    if any(mark <= {file.name for file in path.iterdir()} for mark in _DATASET_MARKS):
        return Source("dataset", path, tuple(sorted(file for file in path.rglob("*") if file.is_file())))
    return Source("texts", path, tuple(_walk(path)))


def _walk(folder: Path, skipped: frozenset[str] = SKIPPED_FOLDERS) -> Iterator[Path]:
    """Yield the files below a folder in the order of their names, except hidden ones and the files of runs.

    Links to folders are followed; a folder reached more than once, as by a circular link, is entered once.
    """
    seen = set[str]()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        is_made = place != str(folder) and not _MADE_BY_RUNS.isdisjoint(names)
        if here in seen or is_made:
            subfolders.clear()
            continue
        seen.add(here)
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        files = (Path(place, name) for name in sorted(names) if not name.startswith(".") and name != POINTER)
        yield from (file for file in files if file.exists())  # some are links to nothing


def _library() -> Source:
    root, left = Path(sysconfig.get_paths()["stdlib"]), LIBRARY_BYTES
    files = []
    for file in _walk(root, SKIPPED_FOLDERS | _TEST_FOLDERS):
        size = file.stat().st_size
        if file.suffix == ".py" and size <= left:
            files.append(file)
            left -= size
    return Source("texts", root, tuple(files))


@dataclass
class Texts:
    """The texts of files or of a data set, in the order of the names of files; can be iterated again."""

    source: Source
    json_key: str  # field, or column, of the text
    skipped: list[Path] = field(default_factory=list)  # no UTF-8, in the last iteration

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces of one document after another."""
        self.skipped = []
        if self.source.kind == "dataset":
            for rows in _dataset_column(self.source.root, self.json_key).iter(batch_size=_ROWS):
                yield from ((text, True) for text in rows[self.json_key] if text)
            return
        for file in self.source.files:
            if _is_json_lines(file):
                with file.open("rb") as opened:
                    lines = ((line, f"line {n} of {file}") for n, line in enumerate(opened, 1) if line.strip())
                    texts = (_text_of(line, self.json_key, place) for line, place in lines)
                    yield from ((text, True) for text in texts if text)
            elif _is_text(file):
                yield from _pieces(file)
            elif file == self.source.root:
                raise ConfigurationError(f"--data-path {file} is no UTF-8 text: give a text file, or token ids")
            else:
                self.skipped.append(file)

    @property
    def size(self) -> int:
        """The approximate size of the text in bytes."""
        if self.source.kind == "dataset":
            return int(_dataset_column(self.source.root, self.json_key).data.nbytes)
        return self.source.size


def _is_text(file: Path) -> bool:
    """Return True if a file can be read and begins as UTF-8 without a NUL; a pipe, which might never end, is none."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            text = codecs.getincrementaldecoder("utf-8")().decode(opened.read(_BEGINNING))
    except (OSError, UnicodeDecodeError):
        return False
    return "\0" not in text


def _pieces(file: Path) -> Iterator[Piece]:
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:  # a byte order mark is no text
        text = opened.read(PIECE) + opened.readline(PIECE)
        while text:
            following = opened.read(PIECE) + opened.readline(PIECE)
            yield text, not following
            text = following


def _is_json_lines(file: Path) -> bool:
    """Return True if a file is named .jsonl, or is named .json and begins with an object on one line."""
    kind = file.suffix.lower()
    if kind != ".json" or not file.is_file():
        return kind == ".jsonl" and file.is_file()
    try:
        with file.open("rb") as opened:
            return isinstance(json.loads(opened.readline()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place} is not JSON ({error}): give one object a line") from None
    texts = {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}
    if key not in texts:
        raise ConfigurationError(f"{place} has no text in the field {key!r}: give --json-key {_one_of(texts)}")
    # JSON can hold characters that text cannot: half of a pair of surrogates, and NUL, which would end it.
    return texts[key].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _one_of(names: Iterable[str]) -> str:
    return "with one of " + ", ".join(map(repr, names)) if names else "with a field that holds text"


def _dataset_column(folder: Path, key: str) -> Any:
    """Return the text column of a saved data set; of several splits, that of `train`."""
    datasets: Any = require("datasets", f"--data-path {folder}", instead="give text, JSON lines or token ids")
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"--data-path {folder} cannot be read by `datasets` ({error!r}), as where it has no rows: save it anew"
        ) from None
    if isinstance(found, datasets.DatasetDict):
        part = "train" if "train" in found else next(iter(found)) if len(found) == 1 else None
        if part is None:
            raise ConfigurationError(
                f"--data-path {folder} has the parts {', '.join(found)} and none is called train: give the folder of "
                "one of them"
            )
        found = found[part]
    texts = [name for name, kind in found.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    if key not in texts:
        raise ConfigurationError(
            f"--data-path {folder} has no text in a column {key!r}: give --json-key {_one_of(texts)}"
        )
    return found.select_columns([key])


# ---- tokenizers ------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """Every byte is a token; NUL, which text does not contain, ends a text."""

    vocab_size = 256
    end_id = 0

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the UTF-8 bytes of each text (uint8), without the end-of-text token."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def save(self, path: Path) -> None:
        """Do nothing: bytes need no file."""


class PieceTokenizer:
    """A tokenizer of the library and the token that ends a text; `vocab_size` is one more than the largest id."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        """Wrap a tokenizer that has the token `end`; its truncation and padding are switched off."""
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.end_id, self.vocab_size = ids[end], max(ids.values()) + 1

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the ids of each text without an end-of-text token, in the smallest dtype that holds them."""
        dtype = dtype_for(self.vocab_size)
        return [np.array(found.ids, dtype) for found in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        self._tokenizer.save(str(path))


def train_bpe(texts: Iterable[str], vocab_size: int = BPE_VOCAB_SIZE) -> PieceTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016) of at most `vocab_size` tokens; small texts give fewer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PieceTokenizer(tokenizer, END_OF_TEXT)


def load_tokenizer(path: Path) -> PieceTokenizer:
    """Read a tokenizer.json, or a folder with one; nothing is downloaded or executed.

    Settings beside it may name the token that ends a text.
    """
    file = tokenizer_files(path)[0]
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  # the library raises nothing more special
        told = f"--tokenizer-model {file} cannot be read ({words_of(error)}): give a tokenizer.json"
        raise ConfigurationError(told) from None
    for end in (*(_configured_end(file.with_name(name)) for name in _SETTINGS), *ENDS):
        if end is not None and tokenizer.token_to_id(end) is not None:
            return PieceTokenizer(tokenizer, end)
    raise ConfigurationError(
        f"--tokenizer-model {file} has no token that ends a text: looked for eos_token in {' and '.join(_SETTINGS)} "
        f"beside it, and for {', '.join(ENDS)}; add one of these"
    )


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files that decide a tokenizer: tokenizer.json first, and settings beside it."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            f"--tokenizer-model {path} has no {TOKENIZER_FILE}: give such a file or a folder with one (AutoTokenizer "
            "of transformers saves it), or --tokenizer-type byte, to train on bytes"
        )
    return [file, *(beside for name in _SETTINGS if (beside := file.with_name(name)).is_file())]


def _configured_end(path: Path) -> str | None:
    """Return the `eos_token` of a settings file: a string, or an object with the string as `content`."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found: Any = settings.get("eos_token") if isinstance(settings, dict) else None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


# ---- making tokens ---------------------------------------------------------------------------------------------------


def write_data(options: Options, folder: Path, say: Say = lambda _: None) -> Path:
    """Make the folder of tokens, whole or not at all, unless it exists; return it.

    It holds the tokenizer and a checksum, and for texts a pair of token files; token ids stay in place.
    """
    made, source = tokens_folder(options, folder, say)
    if (made / SIDE_FILE).exists():
        if _files_in(made) != _read_side_file(made).get("files"):
            raise ConfigurationError(
                f"{made} does not hold the tokens that its {SIDE_FILE} describes: it was damaged or changed; remove it"
            )
        return made
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
    return made


def _files_in(folder: Path) -> dict[str, str]:
    """Return the digests of a token folder's files except its `SIDE_FILE`, by name."""
    files = sorted(file for file in folder.iterdir() if file.name != SIDE_FILE)
    return dict(zip((file.name for file in files), digests_of(files), strict=True))


def _write(options: Options, source: Source, folder: Path) -> None:
    texts = Texts(source, options.data.json_key)
    has_fields = source.kind == "dataset" or any(map(_is_json_lines, source.files))
    if options.is_given("json_key") and not has_fields:
        raise ConfigurationError(
            f"--json-key {texts.json_key} does nothing, since --data-path {source.root} holds no JSON lines and no "
            "data set: leave it out"
        )
    tokenizer = _tokenizer(options, texts)
    vocab_size, end_id, notes = options.data.vocab_size or 0, None, list[str]()
    if tokenizer is not None:
        vocab_size, end_id = tokenizer.vocab_size, tokenizer.end_id
        tokenizer.save(folder / TOKENIZER_FILE)
    if tokenizer is not None and source.kind != "indexed":
        encode_texts(texts, tokenizer, folder / PREFIX)
        if bin_of(folder / PREFIX).stat().st_size == 0:
            raise ConfigurationError(f"--data-path {source.root} holds no UTF-8 text: give a file or folder with some")
        if texts.skipped:
            notes.append(f"files left out, as they are no UTF-8 text: {len(texts.skipped)}, first {texts.skipped[0]}")
    checksum = digest(open_tokens(source, folder).tokens, vocab_size)
    said = {"checksum": checksum, "vocab_size": vocab_size, "end_id": end_id, "notes": notes}
    said["files"] = _files_in(folder)
    (folder / SIDE_FILE).write_text(json.dumps(said, indent=2), encoding="utf-8")


def _tokenizer(options: Options, texts: Texts) -> ByteTokenizer | PieceTokenizer | None:
    """Return the tokenizer of the tokens; None: ids of unknown origin."""
    data, root = options.data, texts.source.root
    if data.tokenizer_model is not None:
        return load_tokenizer(data.tokenizer_model)
    has_ids, takes_ids = texts.source.kind == "indexed", data.tokenizer_type == "NullTokenizer"
    if has_ids and not takes_ids:
        raise ConfigurationError(
            f"--data-path {root} holds token ids, and --tokenizer-type {data.tokenizer_type} takes text: give "
            "--tokenizer-type NullTokenizer with --vocab-size, or HuggingFaceTokenizer with the one that made them"
        )
    if takes_ids and not has_ids:
        raise ConfigurationError(
            f"--data-path {root} is text, and --tokenizer-type NullTokenizer takes token ids: give the prefix of a "
            ".bin and .idx, or another tokenizer"
        )
    if takes_ids:
        return None
    if data.tokenizer_type == "byte":
        return ByteTokenizer()
    every = max(1, math.ceil(texts.size / SAMPLE_BYTES))  # spread evenly
    return train_bpe((text for text, _ in islice(texts, 0, None, every)), data.vocab_size or BPE_VOCAB_SIZE)


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
    batch, size = list[Piece](), 0
    for piece in texts:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


# ---- reading tokens --------------------------------------------------------------------------------------------------


def read_data(job: Job, made: Path) -> TokenData:
    """Open the folder of `write_data`, and split its tokens; ranks of a machine share the memory."""
    options, said = job.options, _read_side_file(made)
    source = find_source(options.data.data_path)
    vocab_size, end_id, checksum, notes = (said[name] for name in _SAID)
    training, held_out = split_tokens(open_tokens(source, made), *parse_split(options.data.split))
    for name, file in (("training", training), ("held-out", held_out)):
        if file.count <= job.seq_length:
            raise ConfigurationError(
                f"the {name} text has {file.count:,} tokens and one sample needs {job.seq_length + 1:,}: give "
                f"--data-path more text, --split other shares than {options.data.split}, or a lower --seq-length"
            )
        file.open()  # raises where the file is gone or too short
    return TokenData(training, held_out, vocab_size, end_id, checksum, tuple(notes))


def _read_side_file(made: Path) -> dict[str, Any]:
    """Read the `SIDE_FILE` of a folder of tokens."""
    path = made / SIDE_FILE
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: said[name] for name in (*_SAID, "files")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): tokens are made by the first rank of each machine, so --out and "
            "--data-cache-path have to be folders that all ranks of a machine see; or it was damaged: remove its folder"
        ) from None


def open_tokens(source: Source, folder: Path) -> Indexed:
    """Return the pair of files of a source, or the pair made from it in a folder."""
    return open_indexed(source.root if source.kind == "indexed" else folder / PREFIX)


def split_tokens(pair: Indexed, trained: float, held_out: float, aside: float) -> tuple[TokenFile, TokenFile]:
    """Hold out the last documents, or the end of a single document; a part set aside comes after it."""
    whole = pair.tokens
    cut, stop = round(pair.documents * trained), round(pair.documents * (1 - aside))
    if 0 < cut < stop:
        places = pair.document_start(cut), pair.document_start(stop)
        return whole.part(0, places[0]), whole.part(*places)
    used = whole.part(0, round(whole.count * (1 - aside)))
    cut = used.count - min(used.count, max(1, round(used.count * held_out / (trained + held_out))))
    return used.part(0, cut), used.part(cut, used.count)
