"""Nested state as a flat dict of dotted keys, the way torch.distributed.checkpoint names what it stores. Pure."""

from __future__ import annotations

import unicodedata
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_fsdp.errors import ConfigurationError

KeyPath = tuple[str, ...]


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Leaves of nested dicts by dotted key.

    A dict whose keys are all text is walked into; everything else (a list, an empty dict, a dict with other keys or of
    another kind, but for OrderedDict) is a leaf and stored in one piece.

    Returns:
        Leaf by key, and the path of each key, which tells `a.b` of {"a": {"b": ...}} from that of {"a.b": ...}.

    Raises:
        ConfigurationError: Two leaves would have the same key, or a key holds control characters.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in _leaves(state, ()):
        key = ".".join(path)
        if not is_key(key):
            raise ConfigurationError(f"{key!a} holds control characters, which no key of a checkpoint may; rename it")
        if key in leaves:
            raise ConfigurationError(f"two values of the state would be stored as {key}; rename one of them")
        leaves[key], paths[key] = value, path
    return leaves, paths


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """The nested dicts again."""
    nested: dict[str, Any] = {}
    for key, value in leaves.items():
        *outer, last = paths[key]
        inside = nested
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return nested


def is_key(key: str) -> bool:
    """Whether a text may be a key: control characters would act on terminals, and surrogates cannot be written."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in key)


def is_walked(value: object) -> bool:
    """Whether `flatten` looks inside."""
    if not isinstance(value, dict) or type(value) not in (dict, OrderedDict):
        return False
    return bool(value) and all(isinstance(key, str) for key in value)


def _leaves(state: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in state.items():
        if is_walked(value):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
