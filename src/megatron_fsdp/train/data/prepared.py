"""The side file of prepared tokens: where they lie, and what they add up to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.token_file import TokenFile, crc32_of, digest

SIDE_FILE = "data.json"
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Prepared:
    """What a preparation found.

    Attributes:
        training: Tokens to train on.
        held_out: Tokens to evaluate on.
        held_out_bytes: UTF-8 bytes that these stand for, ends of texts counted as one; 0: not known.
        vocab_size: Ids are below it.
        end: The token that ends a text, where there is a tokenizer file; else empty.
        checksum: Of all ids.
        notes: What else a person should know.
        crc32: Of the bytes of all ids; None: made by a version that did not write it.
    """

    training: TokenFile
    held_out: TokenFile
    held_out_bytes: int
    vocab_size: int
    end: str
    checksum: str
    notes: tuple[str, ...] = ()
    crc32: int | None = None


def write_prepared(prepared: Prepared, folder: Path) -> None:
    """Leave the side file in a folder; files of tokens there are named relative to it."""
    values = asdict(prepared)
    for name, file in (("training", prepared.training), ("held_out", prepared.held_out)):
        is_inside = file.path.is_relative_to(folder)
        values[name]["path"] = str(file.path.relative_to(folder) if is_inside else file.path.absolute())
    (folder / SIDE_FILE).write_text(json.dumps(values, indent=2), encoding="utf-8")


def require_unchanged(folder: Path) -> None:
    """Compare the ids in a folder with what they added up to when they were made.

    Ids of the user that lie elsewhere are not read again: the folder is named after their size and time.

    Raises:
        ConfigurationError: They differ, or cannot be read.
    """
    prepared = read_prepared(folder)
    files = (prepared.training, prepared.held_out)
    if not prepared.training.path.is_relative_to(folder):
        return
    if prepared.crc32 is None:
        is_same = digest(files, prepared.vocab_size) == prepared.checksum
    else:
        is_same = crc32_of(files) == prepared.crc32
    if not is_same:
        raise ConfigurationError(
            f"the tokens in {folder} were damaged: they do not have the checksum in {SIDE_FILE}; remove the folder, "
            "and they are made again"
        )


def read_prepared(folder: Path) -> Prepared:
    """Read what `write_prepared` wrote.

    Raises:
        ConfigurationError: It is not there, or is something else.
    """
    path = folder / SIDE_FILE
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = {name: dict(values[name]) for name in ("training", "held_out")}
        for file in files.values():
            file["path"] = folder / file["path"]
        found = {**values, **{name: TokenFile(**file) for name, file in files.items()}}
        return Prepared(**{**found, "notes": tuple(values["notes"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): tokens are made by the first rank of each machine, so --out and "
            "--data-cache-path have to be folders that all ranks of a machine see; or it was damaged: remove its folder"
        ) from None
