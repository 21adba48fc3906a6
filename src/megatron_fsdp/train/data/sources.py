"""The documents that `--data-path` names, read piece by piece: no more than a piece is held in memory."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from megatron_fsdp.checkpoint.store import MARK_OF_WHOLE, POINTER
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.data.token_file import bin_of, idx_of

LIBRARY_BYTES = 24 * 1024**2  # of the default text: seconds of tokenizing
PIECE = 2**20  # characters; a longer document is tokenized in pieces that end with a line where there is one
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_RUN_MARKS = ({"applied.json", "metrics.jsonl"}, {"applied.json", "summary.json"})
_TOKENS_MARKS = {"data.json", "training.bin"}
_CHECKPOINT = re.compile(r"iter_\d{7,18}", re.ASCII)
_DATASET_MARKS = ({"dataset_dict.json"}, {"state.json", "dataset_info.json"})
_LARGEST_ARRAY = 2**28  # bytes of a JSON array, which is read as a whole
_BEGINNING = 1024  # bytes of a file in which its first character is looked for
_ROWS = 256  # of a data set, read in one go

Document = Iterator[str]
"""Pieces of one text, none of them empty."""


@dataclass(frozen=True)
class Source:
    """The files or data set that `--data-path` names."""

    kind: Literal["texts", "dataset", "indexed", "npy"]  # `dataset`: a folder that `datasets` wrote
    root: Path  # what was named; of a pair, its prefix
    files: tuple[Path, ...]  # in an order that depends on names only
    left_out: tuple[Path, ...] = ()  # folders of earlier runs

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
    left_out: list[Path] = []
    return Source("texts", path, tuple(_walk(path, outputs=outputs, left_out=left_out)), tuple(left_out))


def is_of_a_run(name: str, contents: Collection[str]) -> bool:
    """Return whether a folder of this name, with these entries, holds results of a run, its tokens, or a checkpoint."""
    found = set(contents)
    is_checkpoint = _CHECKPOINT.fullmatch(name) is not None and MARK_OF_WHOLE in found
    is_tokens = name.startswith("tokens-") and found >= _TOKENS_MARKS
    return any(found >= marks for marks in _RUN_MARKS) or is_tokens or is_checkpoint


def _walk(
    folder: Path,
    skipped: frozenset[str] = SKIPPED_FOLDERS,
    outputs: Collection[Path] = (),
    left_out: list[Path] | None = None,
) -> Iterator[Path]:
    """Yield the files below a folder in the order of their names; hidden ones, outputs and earlier runs are left out.

    Links to folders are followed; a folder that is reached more than once, as by a link in a circle, is entered once.
    """
    written, seen = {os.path.realpath(path) for path in outputs}, set()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        here, is_below = os.path.realpath(place), place != str(folder)
        if here in seen or (is_below and here in written):
            subfolders.clear()
            continue
        seen.add(here)
        if left_out is not None and is_below and is_of_a_run(Path(place).name, {*subfolders, *names}):
            left_out.append(Path(place))
            subfolders.clear()
            continue
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
class Documents:
    """The documents of files or of a data set; can be iterated again."""

    source: Source
    json_key: str  # field, or column, of the text
    skipped: list[Path] = field(default_factory=list)  # no UTF-8, in the last iteration
    uses_key: bool = False  # the last iteration met something with fields

    def __iter__(self) -> Iterator[Document]:
        """Yield documents in the order of the names of files."""
        self.skipped, self.uses_key = [], self.source.kind == "dataset"
        if self.source.kind == "dataset":
            for rows in _dataset_column(self.source.root, self.json_key).iter(batch_size=_ROWS):
                yield from (_pieces_of(text) for text in rows[self.json_key] if text is not None)
            return
        for file in self.source.files:
            yield from self._of_file(file)

    @property
    def size(self) -> int:
        """Approximate size of the text in bytes."""
        if self.source.kind == "dataset":
            return int(_dataset_column(self.source.root, self.json_key).data.nbytes)
        return sum(size for _, size, _ in self.source.listing())

    def _of_file(self, file: Path) -> Iterator[Document]:
        if not file.is_file():  # a pipe, which might never end, or a link to nothing
            self.skipped.append(file)
        elif _is_json_lines(file):
            self.uses_key = True
            yield from map(_pieces_of, _json_texts(file, self.json_key))
        elif found := _json_array(file):
            self.uses_key = self.uses_key or isinstance(found[0], dict)
            for number, item in enumerate(found, 1):
                yield _pieces_of(_text_of(item, self.json_key, f"object {number} of {file}"))
        elif _is_text(file):
            yield _file_pieces(file)
        elif file == self.source.root:
            raise ConfigurationError(f"--data-path {file} is no UTF-8 text: give a text file, or token ids")
        else:
            self.skipped.append(file)


def _is_text(file: Path) -> bool:
    """Return whether a file can be read and is UTF-8 without a NUL; an empty one is."""
    try:
        return not any("\0" in piece for piece in _file_pieces(file))
    except (OSError, UnicodeDecodeError):
        return False


def _file_pieces(file: Path) -> Document:
    with file.open(encoding="utf-8-sig", newline="") as opened:  # a byte order mark is no text
        yield from _pieces(opened)


def _pieces_of(text: str) -> Document:
    """Yield the pieces of a text of JSON without what text cannot have: NUL, which would end it, half a surrogate."""
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return _pieces(io.StringIO(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")))


def _pieces(opened: TextIO) -> Document:
    while piece := opened.read(PIECE):
        yield piece + opened.readline(PIECE)


def _is_json_lines(file: Path) -> bool:
    """Return whether a file is named .jsonl, or is named .json and begins with an object on one line."""
    kind = file.suffix.lower()
    if kind != ".json":
        return kind == ".jsonl"
    try:
        with file.open("rb") as opened:
            return isinstance(json.loads(opened.readline()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _json_array(file: Path) -> list[dict[str, Any] | str]:
    """Return the items of a .json file that holds one array of objects or of strings; else nothing."""
    if file.suffix.lower() != ".json":
        return []
    try:
        with file.open("rb") as opened:
            if not opened.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                return []
        if (size := file.stat().st_size) > _LARGEST_ARRAY:
            raise ConfigurationError(
                f"{file} begins as one JSON array, and its {size:,} bytes would have to be read as a whole: write JSON "
                "lines, one object a line, which are read one by one"
            )
        found = json.loads(file.read_bytes())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return []
    is_one_kind = isinstance(found, list) and any(all(isinstance(item, kind) for item in found) for kind in (dict, str))
    return found if is_one_kind else []


def _json_texts(file: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file with a JSON object on each line; refuse any other line by its number."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if not line.strip():
                    continue
                place = f"line {number} of {file}"
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigurationError(f"{place} is not JSON ({error}): give one object a line") from None
                if not isinstance(found, dict):
                    raise ConfigurationError(
                        f"{place} is {type(found).__name__} and no object: give objects with a field {key!r}"
                    )
                yield _text_of(found, key, place)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({error.strerror}): mend it, or leave it out") from None


def _text_of(found: dict[str, Any] | str, key: str, place: str) -> str:
    text = found if isinstance(found, str) else found.get(key)
    if isinstance(text, str):
        return text
    assert isinstance(found, dict)
    fields = [name for name, value in found.items() if isinstance(value, str)]
    raise ConfigurationError(f"{place} has no text in the field {key!r}: give --json-key {_one_of(fields)}")


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
