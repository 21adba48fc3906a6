"""Real text that is already on the machine: which files to read, and which of them are held out."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.errors import ConfigurationError

MAX_FILE_BYTES = 4 * 1024**2  # larger files are tables and dumps, not text to learn from
MAX_CORPUS_BYTES = 24 * 1024**2  # seconds of tokenizing; more than a run of minutes can read
HELD_OUT_FRACTION = 0.05
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Source:
    """Where text comes from.

    Attributes:
        path: A file, or a folder that is walked in sorted order.
        suffixes: Read only files that end so; empty means every file that is valid UTF-8.
        skipped_folders: Names of folders that are not entered (hidden folders never are).
    """

    path: Path
    suffixes: tuple[str, ...] = ()
    skipped_folders: frozenset[str] = SKIPPED_FOLDERS


@dataclass(frozen=True)
class Corpus:
    """Texts, split by content into what is trained on and what is held out.

    Attributes:
        training: Texts to train on, in the order of their paths.
        held_out: Texts never trained on.
    """

    training: tuple[str, ...]
    held_out: tuple[str, ...]


def find_source(data: str | None) -> Source:
    """Return the source for a path given by the user, or the Python standard library without its tests.

    Raises:
        ConfigurationError: The path does not exist.
    """
    if data is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        return Source(library, suffixes=(".py",), skipped_folders=SKIPPED_FOLDERS | TEST_FOLDERS)
    path = Path(data).expanduser()
    if not path.exists():
        raise ConfigurationError(f"--data {data!r} does not exist: give a text file or a folder of text files")
    return Source(path)


def list_files(source: Source) -> Iterator[Path]:
    """Yield the candidate files of a source in an order that depends on names only."""
    if source.path.is_file():
        yield source.path
        return
    for folder, subfolders, names in os.walk(source.path):
        subfolders[:] = sorted(n for n in subfolders if n not in source.skipped_folders and not n.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and (not source.suffixes or name.endswith(source.suffixes)):
                yield Path(folder, name)


def read_text(path: Path, max_bytes: int) -> str | None:
    """Return the first `max_bytes` bytes of a file as text, or None if they are empty, binary or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes)
    except OSError:  # vanished or unreadable: not part of the corpus
        return None
    text = content.decode("utf-8", errors="ignore" if len(content) == max_bytes else "surrogateescape")
    is_text = bool(text) and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
    return text if is_text else None


def is_held_out(text: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Decide by the hash of the content, so that copies of one text lie on the same side and order does not matter."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


def split_texts(texts: tuple[str, ...], fraction: float = HELD_OUT_FRACTION) -> Corpus:
    """Split texts by content; where that leaves one side empty, hold out the end of the whole text instead."""
    held_out = tuple(text for text in texts if is_held_out(text, fraction))
    training = tuple(text for text in texts if not is_held_out(text, fraction))
    if held_out and training:
        return Corpus(training, held_out)
    whole = "\n".join(texts)
    cut = len(whole) - max(1, round(len(whole) * fraction))
    return Corpus((whole[:cut],), (whole[cut:],))


def load_corpus(source: Source, max_bytes: int = MAX_CORPUS_BYTES) -> Corpus:
    """Read a source up to `max_bytes` bytes of text and split it.

    Raises:
        ConfigurationError: The source holds no text at all.
    """
    single = source.path.is_file()
    texts, left = [], max_bytes
    for path in list_files(source):
        if left <= 0:
            break
        text = read_text(path, left if single else min(left, MAX_FILE_BYTES))
        if text is not None:
            texts.append(text)
            left -= len(text.encode())
    if not texts:
        raise ConfigurationError(
            f"{source.path} holds no UTF-8 text: give --data a text file or a folder of text files"
        )
    return split_texts(tuple(texts))
