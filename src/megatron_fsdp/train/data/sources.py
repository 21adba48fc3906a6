"""The documents that `--data-path` names, read piece by piece: no more than a piece of a file is held in memory."""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_fsdp.checkpoint.store import MARK_OF_WHOLE, POINTER
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.data.token_file import bin_of, idx_of

LIBRARY_BYTES = 24 * 1024**2  # of the default text: seconds of tokenizing
PIECE = 2**20  # characters; a longer file is tokenized in pieces that end with a line where there is one
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_MADE_BY_RUNS = frozenset({"applied.json", "tokens.json", MARK_OF_WHOLE})
"""A folder with one of these holds results of a run, its tokens, or a checkpoint."""
_DATASET_MARKS = ({"dataset_dict.json"}, {"state.json", "dataset_info.json"})
_BEGINNING = 2**16  # bytes of a file that tell whether it is text
_ROWS = 256  # of a data set, read in one go

Piece = tuple[str, bool]
"""A part of a document, not empty, and whether the document ends with it."""


@dataclass(frozen=True)
class Source:
    """The files or data set that `--data-path` names."""

    kind: Literal["texts", "dataset", "indexed", "npy"]  # `dataset`: a folder that `datasets` wrote
    root: Path  # what was named; of a pair, its prefix
    files: tuple[Path, ...]  # in an order that depends on names only

    @property
    def has_ids(self) -> bool:
        """Whether it holds token ids rather than text."""
        return self.kind in ("indexed", "npy")

    def listing(self) -> list[tuple[str, int, int]]:
        """Return path, size in bytes and time of the last change (ns) of every file; -1 for a link to nothing."""
        found = []
        for file in self.files:
            try:
                state = file.stat()
            except OSError as error:
                if not (isinstance(error, FileNotFoundError) and file.is_symlink()):
                    raise ConfigurationError(f"--data-path: {file} cannot be read ({error.strerror})") from None
                found.append((str(file.absolute()), -1, -1))
            else:
                found.append((str(file.absolute()), state.st_size, state.st_mtime_ns))
        return found


def find_source(path: Path | None, outputs: Collection[Path] = ()) -> Source:
    """Find what a path names, or without one the Python standard library; only names and sizes are read.

    What lies in `outputs`, absolute paths of folders that the run writes to, is no text to learn.
    """
    if path is None:
        return _library()
    is_half = path.suffix in (".bin", ".idx") and path.is_file()
    prefix = path.with_suffix("") if is_half else path
    if is_half or (not path.exists() and idx_of(prefix).is_file()):
        return Source("indexed", prefix, (bin_of(prefix), idx_of(prefix)))
    if not path.exists():
        raise ConfigurationError(
            f"--data-path {path} does not exist: give a text file, a folder of texts or JSON lines, a folder that "
            "`datasets` saved, the prefix of a .bin and .idx, or an .npy of token ids"
        )
    if path.is_file():
        return Source("npy" if path.suffix == ".npy" else "texts", path, (path,))
    if not path.is_dir():
        raise ConfigurationError(f"--data-path {path} is a device, pipe or socket: give a file or a folder")
    if any(mark <= {file.name for file in path.iterdir()} for mark in _DATASET_MARKS):
        return Source("dataset", path, tuple(sorted(file for file in path.rglob("*") if file.is_file())))
    return Source("texts", path, tuple(_walk(path, outputs=outputs)))


def _walk(folder: Path, skipped: frozenset[str] = SKIPPED_FOLDERS, outputs: Collection[Path] = ()) -> Iterator[Path]:
    """Yield the files below a folder in the order of their names; hidden ones, outputs and earlier runs are left out.

    Links to folders are followed; a folder that is reached more than once, as by a link in a circle, is entered once.
    """
    written, seen = {os.path.realpath(path) for path in outputs}, set()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        is_made = place != str(folder) and (here in written or not _MADE_BY_RUNS.isdisjoint(names))
        if here in seen or is_made:
            subfolders.clear()
            continue
        seen.add(here)
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith(".") and name != POINTER)


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
    uses_key: bool = False  # the last iteration met something with fields

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces of one document after another."""
        self.skipped, self.uses_key = [], self.source.kind == "dataset"
        if self.source.kind == "dataset":
            for rows in _dataset_column(self.source.root, self.json_key).iter(batch_size=_ROWS):
                yield from ((text, True) for text in rows[self.json_key] if text)
            return
        for file in self.source.files:
            yield from self._of_file(file)

    @property
    def size(self) -> int:
        """Approximate size of the text in bytes."""
        if self.source.kind == "dataset":
            return int(_dataset_column(self.source.root, self.json_key).data.nbytes)
        return sum(size for _, size, _ in self.source.listing())

    def _of_file(self, file: Path) -> Iterator[Piece]:
        if _is_json_lines(file):
            self.uses_key = True
            yield from ((text, True) for text in _json_texts(file, self.json_key) if text)
        elif _is_text(file):
            yield from _pieces(file)
        elif file == self.source.root:
            raise ConfigurationError(f"--data-path {file} is no UTF-8 text: give a text file, or token ids")
        else:
            self.skipped.append(file)


def _is_text(file: Path) -> bool:
    """Return whether a file can be read and begins as UTF-8 without a NUL; a pipe, which might never end, is none."""
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
    """Return whether a file is named .jsonl, or is named .json and begins with an object on one line."""
    kind = file.suffix.lower()
    if kind != ".json" or not file.is_file():
        return kind == ".jsonl" and file.is_file()
    try:
        with file.open("rb") as opened:
            return isinstance(json.loads(opened.readline()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _json_texts(file: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file with a JSON object on each line; refuse any other line by its number."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield _text_of(line, key, f"line {number} of {file}")
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({error.strerror}): mend it, or leave it out") from None


def _text_of(line: bytes, key: str, place: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place} is not JSON ({error}): give one object a line") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{place} is {type(found).__name__} and no object: give objects with a field {key!r}")
    text = found.get(key)
    if not isinstance(text, str):
        fields = [name for name, value in found.items() if isinstance(value, str)]
        raise ConfigurationError(f"{place} has no text in the field {key!r}: give --json-key {_one_of(fields)}")
    # JSON can say what text cannot have: half of a pair of surrogates, and NUL, which would end it.
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


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
