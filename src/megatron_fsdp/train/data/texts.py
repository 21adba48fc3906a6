"""The documents of a source, read piece by piece: no more than a piece is held in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.data.sources import SavedDataset, TextFiles

PIECE = 2**20  # characters; a longer document is tokenized in pieces that end with a line where there is one
_LARGEST_ARRAY = 2**28  # bytes of a JSON array, which is read as a whole
_BEGINNING = 1024  # bytes of a file in which its first character is looked for
_ROWS = 256  # of a data set, read in one go

Document = Iterator[str]
"""Pieces of one text, none of them empty."""


@dataclass
class Documents:
    """The documents of files or of a data set; may be gone through again.

    Attributes:
        source: Where they are.
        json_key: Field, or column, that holds the text.
        skipped: Files that turned out not to be UTF-8 text, of the last time.
        uses_key: Whether there was something to look for the field in, the last time.
    """

    source: TextFiles | SavedDataset
    json_key: str
    skipped: list[Path] = field(default_factory=list)
    uses_key: bool = False

    def __iter__(self) -> Iterator[Document]:
        """Yield documents in the order of the names of files.

        Raises:
            ConfigurationError: A line is not JSON, or lacks the field; names it.
        """
        self.skipped, self.uses_key = [], isinstance(self.source, SavedDataset)
        if isinstance(self.source, SavedDataset):
            yield from map(pieces_of, dataset_texts(self.source.root, self.json_key))
            return
        for file in self.source.files:
            yield from self._of_file(file)

    def _of_file(self, file: Path) -> Iterator[Document]:
        if not file.is_file():  # a pipe, which might never end, or a link to nothing
            self.skipped.append(file)
        elif is_json_lines(file):
            self.uses_key = True
            yield from map(pieces_of, json_texts(file, self.json_key))
        elif found := json_array(file):
            self.uses_key = self.uses_key or isinstance(found[0], dict)
            yield from map(pieces_of, array_texts(found, self.json_key, file))
        elif is_text(file):
            yield file_pieces(file)
        elif file == self.source.root:
            raise ConfigurationError(f"--data-path {file} is no UTF-8 text: give a text file, or token ids")
        else:
            self.skipped.append(file)


def is_text(file: Path) -> bool:
    """Whether all of a file is UTF-8 without a NUL, and can be read; an empty one is."""
    try:
        return not any("\0" in piece for piece in file_pieces(file))
    except (OSError, UnicodeDecodeError):
        return False


def file_pieces(file: Path) -> Document:
    """Yield the text of a file."""
    with file.open(encoding="utf-8-sig", newline="") as opened:  # a byte order mark is no text
        while piece := opened.read(PIECE):
            yield piece + opened.readline(PIECE)


def pieces_of(text: str) -> Document:
    """Yield a text that is in memory."""
    start = 0
    while start < len(text):
        line_end = text.find("\n", start + PIECE, start + 2 * PIECE) + 1
        stop = line_end or start + 2 * PIECE
        yield text[start:stop]
        start = stop


def is_json_lines(file: Path) -> bool:
    """Whether a file is called .jsonl, or is called .json and begins with an object in one line."""
    kind = file.suffix.lower()
    if kind != ".json":
        return kind == ".jsonl"
    try:
        with file.open("rb") as opened:
            return isinstance(json.loads(opened.readline()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def json_array(file: Path) -> list[dict[str, Any] | str]:
    """Return what lies in a file that is called .json and holds one array of objects or of strings; else nothing.

    Raises:
        ConfigurationError: It begins as an array and is too large to be read as a whole.
    """
    if file.suffix.lower() != ".json" or not _begins_as_array(file):
        return []
    size = file.stat().st_size
    if size > _LARGEST_ARRAY:
        raise ConfigurationError(
            f"{file} begins as one JSON array, and its {size:,} bytes would have to be read as a whole: write JSON "
            "lines, one object a line, which are read one by one"
        )
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    is_one_kind = isinstance(found, list) and any(all(isinstance(item, kind) for item in found) for kind in (dict, str))
    return found if is_one_kind else []


def _begins_as_array(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except OSError:
        return False


def array_texts(found: list[dict[str, Any] | str], key: str, file: Path) -> Iterator[str]:
    """Yield the texts of an array of a file.

    Raises:
        ConfigurationError: An object has no text in the field; names its number.
    """
    for number, item in enumerate(found, 1):
        if isinstance(item, str):
            yield whole_characters(item)
        else:
            yield _text_of(item, key, f"object {number} of {file}")


def json_texts(file: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file with a JSON object in each line.

    Raises:
        ConfigurationError: A line is something else, and is named; or the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield _text_in(line, key, f"line {number} of {file}")
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({error.strerror}): mend it, or leave it out") from None


def _text_in(line: bytes, key: str, place: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place} is not JSON ({error}): give one object a line") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{place} is {type(found).__name__} and no object: give objects with a field {key!r}")
    return _text_of(found, key, place)


def _text_of(found: dict[str, Any], key: str, place: str) -> str:
    text = found.get(key)
    if not isinstance(text, str):
        fields = [name for name, value in found.items() if isinstance(value, str)]
        raise ConfigurationError(f"{place} has no text in the field {key!r}: give --json-key {_one_of(fields)}")
    return whole_characters(text)


def _one_of(names: Iterable[str]) -> str:
    return "with one of " + ", ".join(map(repr, names)) if names else "with a field that holds text"


def whole_characters(text: str) -> str:
    """Replace what JSON can say and text has not: NUL, which would end a text, and halves of surrogate pairs."""
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def dataset_texts(folder: Path, key: str) -> Iterator[str]:
    """Yield the texts of a data set that `datasets` saved; of several parts, those of `train`.

    Raises:
        ConfigurationError: `datasets` is not installed, or there is no such part or column.
    """
    column = _dataset_column(folder, key)
    for rows in column.iter(batch_size=_ROWS):
        yield from (whole_characters(text) for text in rows[key] if text is not None)


def dataset_bytes(folder: Path, key: str) -> int:
    """Return about how many bytes of text a data set holds."""
    return int(_dataset_column(folder, key).data.nbytes)


def _dataset_column(folder: Path, key: str) -> Any:
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
    kind = getattr(found.features.get(key), "dtype", None)
    if kind not in ("string", "large_string"):
        texts = [name for name, feature in found.features.items() if getattr(feature, "dtype", None) == "string"]
        raise ConfigurationError(
            f"--data-path {folder} has no text in a column {key!r}: give --json-key {_one_of(texts)}"
        )
    return found.select_columns([key])
