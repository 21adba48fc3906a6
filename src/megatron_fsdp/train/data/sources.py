"""What `--data-path` names: texts, a saved data set, or token ids; nothing is read here but names and sizes."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.checkpoint.run_folder import MARK_OF_WHOLE, POINTER
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.indexed import bin_of, idx_of

LIBRARY_BYTES = 24 * 1024**2  # of the default text: seconds of tokenizing
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_RUN_MARKS = ({"applied.json", "metrics.jsonl"}, {"applied.json", "summary.json"})
_TOKENS_MARKS = {"data.json", "training.bin", "training.idx"}
_CHECKPOINT = re.compile(r"iter_\d{7,18}", re.ASCII)
_DATASET_MARKS = ({"dataset_dict.json"}, {"state.json", "dataset_info.json"})


@dataclass(frozen=True)
class TextFiles:
    """Files of text or of JSON lines.

    Attributes:
        root: What was named.
        files: Candidates, in an order that depends on names only; some may turn out not to be text.
        left_out: Folders of results of earlier runs.
    """

    root: Path
    files: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()


@dataclass(frozen=True)
class SavedDataset:
    """A folder that `datasets` wrote.

    Attributes:
        root: The folder.
        files: All files in it.
    """

    root: Path
    files: tuple[Path, ...]


@dataclass(frozen=True)
class TokenIds:
    """Token ids, made earlier.

    Attributes:
        root: The prefix of a .bin and .idx, or an .npy.
        files: These.
        is_indexed: Whether it is a pair.
    """

    root: Path
    files: tuple[Path, ...]
    is_indexed: bool


Source = TextFiles | SavedDataset | TokenIds


def find_source(path: Path | None, outputs: Collection[Path] = ()) -> Source:
    """Look what there is.

    Args:
        path: Of the user; None: the Python standard library without its tests, at most `LIBRARY_BYTES` of it.
        outputs: Absolute paths of folders that the run writes to; what lies in them is no text to learn.

    Raises:
        ConfigurationError: There is nothing, or half a pair.
    """
    if path is None:
        return _library()
    is_half = path.suffix in (".bin", ".idx") and path.is_file()
    prefix = path.with_suffix("") if is_half else path
    if is_half or (not path.exists() and idx_of(prefix).is_file()):
        return TokenIds(prefix, (bin_of(prefix), idx_of(prefix)), is_indexed=True)
    if not path.exists():
        raise ConfigurationError(
            f"--data-path {path} does not exist: give a text file, a folder of texts or JSON lines, a folder that "
            "`datasets` saved, the prefix of a .bin and .idx, or an .npy of token ids"
        )
    if path.suffix == ".npy" and path.is_file():
        return TokenIds(path, (path,), is_indexed=False)
    if path.is_file():
        return TextFiles(path, (path,))
    if not path.is_dir():
        raise ConfigurationError(f"--data-path {path} is a device, pipe or socket: give a file or a folder")
    if any(mark <= {file.name for file in path.iterdir()} for mark in _DATASET_MARKS):
        return SavedDataset(path, tuple(sorted(file for file in path.rglob("*") if file.is_file())))
    left_out: list[Path] = []
    return TextFiles(path, tuple(walk(path, outputs=outputs, left_out=left_out)), tuple(left_out))


def walk(
    folder: Path,
    skipped: frozenset[str] = SKIPPED_FOLDERS,
    outputs: Collection[Path] = (),
    left_out: list[Path] | None = None,
) -> Iterator[Path]:
    """Yield the files below a folder in the order of their names; hidden files and folders are left out.

    Links to folders are followed; a folder that is reached more than once, as by a link in a circle, is entered once.

    Args:
        folder: Where to begin.
        skipped: Names of folders that are not entered.
        outputs: Absolute paths of folders that are not entered.
        left_out: Where given, folders below the first that earlier runs left are not entered, and noted in it.
    """
    written, seen = {os.path.realpath(path) for path in outputs}, set()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        if here in seen or (here in written and place != str(folder)):
            subfolders.clear()
            continue
        seen.add(here)
        if left_out is not None and place != str(folder) and is_of_a_run(Path(place).name, {*subfolders, *names}):
            left_out.append(Path(place))
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith(".") and name != POINTER)


def is_of_a_run(name: str, contents: Collection[str]) -> bool:
    """Whether a folder of this name and with these entries holds the results of a run, its tokens, or a checkpoint."""
    found = set(contents)
    is_checkpoint = _CHECKPOINT.fullmatch(name) is not None and MARK_OF_WHOLE in found
    is_tokens = name.startswith("tokens-") and found >= _TOKENS_MARKS
    return any(found >= marks for marks in _RUN_MARKS) or is_tokens or is_checkpoint


def listing(source: Source) -> list[tuple[str, int, int]]:
    """Path, size in bytes and time of the last change (ns) of every file; -1 for a link to nothing.

    Raises:
        ConfigurationError: A file went away.
    """
    try:
        return [(str(file.absolute()), *_state_of(file)) for file in source.files]
    except OSError as error:
        raise ConfigurationError(f"--data-path: {error.filename} cannot be read ({error.strerror})") from None


def _state_of(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except FileNotFoundError:
        if not file.is_symlink():
            raise
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _library() -> TextFiles:
    root, left = Path(sysconfig.get_paths()["stdlib"]), LIBRARY_BYTES
    files = []
    for file in walk(root, SKIPPED_FOLDERS | _TEST_FOLDERS):
        size = file.stat().st_size
        if file.suffix == ".py" and size <= left:
            files.append(file)
            left -= size
    return TextFiles(root, tuple(files))
