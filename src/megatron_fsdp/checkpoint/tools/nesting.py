"""Nested state dicts as flat keys and back, with nothing of their shape lost.

torch flattens dicts and lists, turns every key of a dict into text and forgets empty containers. What it forgets is
noted in a small file beside the checkpoint, `structure.json`, which torch ignores.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.safe_read import read_json, shortened
from megatron_fsdp.errors import CheckpointError

KeyPath = tuple[str | int, ...]

STRUCTURE_FILE = "structure.json"
_MAX_DEPTH = 100
_MAX_LIST = 1 << 20
_MAX_LITERAL = 1000


@dataclass(frozen=True)
class Structure:
    """What flat keys do not tell.

    Attributes:
        keys: (path of text and list indices, the last key of it as a Python literal), where that key is no text.
        empty: (path, `dict` or `list`) of containers without elements.
    """

    keys: tuple[tuple[KeyPath, str], ...] = ()
    empty: tuple[tuple[KeyPath, str], ...] = ()

    def files(self) -> dict[str, bytes]:
        """`structure.json` with its content, if there is anything to tell."""
        if not (self.keys or self.empty):
            return {}
        return {STRUCTURE_FILE: json.dumps({"version": 1, **asdict(self)}, indent=1).encode()}

    @classmethod
    def read(cls, folder: Path) -> Structure:
        """From `structure.json`; nothing where there is none.

        Raises:
            CheckpointError: It is damaged.
        """
        path = folder / STRUCTURE_FILE
        if not path.is_file():
            return cls()
        found = read_json(path)
        try:
            keys = tuple((_path(parts), str(literal)) for parts, literal in found["keys"])
            empty = tuple((_path(parts), str(kind)) for parts, kind in found["empty"])
            for _, literal in keys:
                _key_of(literal)
        except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"{path} is damaged ({shortened(str(error))}); remove it if the shape of the state is unimportant"
            ) from error
        return cls(keys, empty)


def nested_paths(folder: CheckpointFolder) -> dict[str, KeyPath] | None:
    """Path of each key in the nested state dict (torch's `planner_data`); None where keys are not nested.

    Raises:
        CheckpointError: The metadata hold something else there.
    """
    found = folder.metadata.planner_data
    if found is None:
        return None
    try:
        return {str(key): _path(path) for key, path in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder.path}: the metadata say nonsense about how keys nest ({error})") from error


def _key_of(literal: str) -> Any:
    """The key of a dict that a literal of Python writes.

    Raises:
        ValueError: It is none, or longer than anyone writes; Python's parser takes a hundred times its length.
    """
    if len(literal) > _MAX_LITERAL:
        raise ValueError(f"a key of {len(literal)} characters")
    key = ast.literal_eval(literal)
    hash(key)
    return key


def _path(parts: Any) -> KeyPath:
    if not isinstance(parts, tuple | list) or not 0 < len(parts) <= _MAX_DEPTH:
        raise ValueError(f"{str(parts)[:100]} is no path")
    if not all(type(part) is str or (type(part) is int and 0 <= part < _MAX_LIST) for part in parts):
        raise ValueError(f"{str(parts)[:100]} is no path of names and indices")
    return tuple(parts)


def flattened(state: Mapping[Any, Any], where: str) -> tuple[dict[str, Any], dict[str, KeyPath], Structure, list[str]]:
    """Leaves by flat key, as torch names them.

    Args:
        state: Nested dicts and lists.
        where: Names it in messages.

    Returns:
        Leaves; the path of each; what the paths do not tell; and keys that had to become text, in words.

    Raises:
        CheckpointError: Two leaves would have one key.
    """
    try:
        leaves, paths = flatten_state_dict(dict(state))
    except ValueError as error:
        raise CheckpointError(
            f"{where}: two of its entries would be stored under one key ({error}); rename one"
        ) from error
    keys: list[tuple[KeyPath, str]] = []
    empty: list[tuple[KeyPath, str]] = []
    notes: list[str] = []
    seen: set[KeyPath] = set()
    for path, keyed, key, value in _containers(state, ()):
        name = ".".join(map(str, path))
        if path in seen:
            raise CheckpointError(f"{where}: two of its entries would be stored under {name}; rename one")
        seen.add(path)
        if keyed and not isinstance(key, str):
            if _is_literal(key):
                keys.append((path, repr(key)))
            else:
                notes.append(f"the key {key!r} becomes text in {name}")
        if isinstance(value, Mapping) and not value:
            empty.append((path, "dict"))
    return leaves, dict(paths), Structure(tuple(keys), tuple(empty)), notes


def _containers(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, bool, Any, Any]]:
    """(path, whether a dict holds it, its key there, it) of everything that torch's rule walks through or to."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*path, str(key)), True, key, inner
            yield from _containers(inner, (*path, str(key)))
    elif isinstance(value, list) and _is_walked(value):
        for index, inner in enumerate(value):
            yield (*path, index), False, None, inner
            yield from _containers(inner, (*path, index))


def _is_walked(values: Sequence[Any]) -> bool:
    """The rule of torch: a list is walked into where it holds tensors, dicts or lists of such."""
    return any(
        isinstance(value, torch.Tensor | Mapping) or (isinstance(value, list) and _is_walked(value)) for value in values
    )


def _is_literal(key: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(key)) == key)
    except (ValueError, SyntaxError):
        return False


def unflattened(leaves: Mapping[str, Any], paths: Mapping[str, KeyPath] | None, structure: Structure) -> dict[Any, Any]:
    """The nested state dict again.

    Raises:
        CheckpointError: Paths contradict each other.
    """
    root = _Plain()
    literals = dict(structure.keys)
    for key, value in leaves.items():
        _set(root, (key,) if paths is None else paths.get(key, (key,)), value)
    for path, kind in structure.empty:
        _set(root, path, [] if kind == "list" else {}, keep=True)
    return _restored(root, (), literals)


def _set(root: _Plain, path: KeyPath, value: Any, *, keep: bool = False) -> None:
    here: Any = root
    for part, following in zip(path, [*path[1:], None], strict=True):
        if type(here) is not (_Sparse if isinstance(part, int) else _Plain):
            raise CheckpointError(
                f"the metadata contradict themselves about what {'.'.join(map(str, path))} is part of"
            )
        if following is None:
            if keep and part in here:
                return
            if part in here:
                raise CheckpointError(f"the metadata name {'.'.join(map(str, path))} twice")
            here[part] = value
            return
        here = here.setdefault(part, _Sparse() if isinstance(following, int) else _Plain())


class _Plain(dict[Any, Any]):
    """A dict that paths lead into; told from dicts that are leaves."""


class _Sparse(dict[Any, Any]):
    """A list that is being filled, by index."""


def _restored(value: Any, path: KeyPath, literals: Mapping[KeyPath, str]) -> Any:
    if isinstance(value, _Sparse):
        return [_restored(value.get(index), (*path, index), literals) for index in range(max(value) + 1)]
    if not isinstance(value, _Plain):
        return value
    found = {}
    for key, inner in value.items():
        literal = literals.get((*path, key))
        name = key if literal is None or str(_key_of(literal)) != key else _key_of(literal)
        found[name] = _restored(inner, (*path, key), literals)
    return found
