"""The manifest of a checkpoint: its entries with a checksum of each, in readable JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fsdp.checkpoint import checksum
from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.errors import CheckpointError

FILE_NAME = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class TensorSeal:
    """The sealed properties of a tensor; its checksum (`checksum.py`) does not depend on cut and number of ranks."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The sealed content of a checkpoint: tensors by key, SHA-256 of the bytes of objects, and facts for people."""

    tensors: Mapping[str, TensorSeal]
    objects: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION
    checksum_name: str = checksum.NAME

    def __contains__(self, key: str) -> bool:
        return key in self.tensors or key in self.objects

    def to_json(self) -> str:
        """Return the manifest as JSON; keys are sorted, so that equal contents give equal text."""
        tensors = {key: {**vars(seal), "shape": list(seal.shape)} for key, seal in self.tensors.items()}
        return json.dumps({**vars(self), "tensors": tensors}, sort_keys=True)  # indenting takes five times as long

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; None if there is none, as in checkpoints of other programs."""
        path = folder / FILE_NAME
        if not path.exists():
            return None
        found = read_json(path)
        version = found.get("version") if isinstance(found, dict) else None
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                f"{path} is of version {version}, and this library reads up to version {VERSION}; update the library"
            )
        try:
            tensors = {key: _tensor_seal(value) for key, value in found["tensors"].items()}
            objects = {key: _text(value) for key, value in found["objects"].items()}
            facts, name = dict(found["facts"]), _text(found["checksum_name"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}") from error
        if type(version) is not int or version < 1:
            raise CheckpointError(f"{path} is damaged: version {version!r}")
        return cls(tensors, objects, facts, version, name)


def _tensor_seal(value: Any) -> TensorSeal:
    shape = value["shape"]
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"shape {str(shape)[:100]}")
    return TensorSeal(tuple(shape), _text(value["dtype"]), _text(value["checksum"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:100]} where text should stand")
    return value
