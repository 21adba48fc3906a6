"""What editing a checkpoint does to its keys: keys in, keys out. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_fsdp.errors import ConfigurationError

KeyPath = tuple[str | int, ...]

_FORMS = '"remove REGEX", "rename REGEX REPLACEMENT", "cast REGEX DTYPE"'
_SHOWN = 5


@dataclass(frozen=True)
class Operation:
    r"""One thing to do to all keys that contain a match of a regular expression.

    Attributes:
        kind: `remove`, `rename` or `cast`.
        pattern: What to look for in keys.
        argument: The replacement (with `\1` or `\g<name>` for groups), or the name of a dtype.
        text: As the user gave it, for messages.
    """

    kind: str
    pattern: re.Pattern[str]
    argument: str
    text: str


@dataclass(frozen=True)
class Kept:
    """An entry that stays.

    Attributes:
        source: Its key before.
        key: Its key after.
        dtype: After; None for an object.
    """

    source: str
    key: str
    dtype: torch.dtype | None


def parse_operation(text: str) -> Operation:
    r"""Read an operation: words divided by spaces; a word in quotes may hold spaces or be empty; `\` is kept as it is.

    Raises:
        ConfigurationError: It has another form.
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        kind, *rest = list(lexer)
    except ValueError as error:
        raise ConfigurationError(f"--op {text!r} cannot be read; give one of {_FORMS}") from error
    if kind not in ("remove", "rename", "cast") or len(rest) != (1 if kind == "remove" else 2):
        raise ConfigurationError(f"--op {text!r} is not an operation; give one of {_FORMS}")
    try:
        pattern = re.compile(rest[0])
    except re.error as error:
        raise ConfigurationError(f"--op {text!r}: {rest[0]!r} is not a regular expression ({error})") from error
    argument = rest[1] if len(rest) == 2 else ""
    if kind == "cast":
        dtype_named(argument, text)
    return Operation(kind, pattern, argument, text)


def dtype_named(name: str, text: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        ConfigurationError: There is none of this name.
    """
    found = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(found, torch.dtype) and _can_hold_values(found):
        return found
    raise ConfigurationError(f"--op {text!r}: {name!r} is no dtype of torch; give one such as float32 or bfloat16")


def _can_hold_values(dtype: torch.dtype) -> bool:
    """Some dtypes are mere names."""
    try:
        torch.zeros(1).to(dtype)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def plan_edit(dtypes: Mapping[str, torch.dtype | None], operations: Sequence[Operation]) -> list[Kept]:
    """Apply operations in their order, each to what the one before left.

    Args:
        dtypes: Dtype of every key; None for an object.
        operations: At least one.

    Returns:
        What stays, in the order of `dtypes`.

    Raises:
        ConfigurationError: There is no operation, one matches nothing, keys would collide, or nothing would be left.
    """
    if not operations:
        raise ConfigurationError(f"there is nothing to do: give at least one --op of the forms {_FORMS}")
    kept = [Kept(key, key, dtype) for key, dtype in dtypes.items()]
    for operation in operations:
        kept = _apply(operation, kept)
        _require_distinct(kept, operation)
    if not kept:
        raise ConfigurationError("the operations remove every key; leave some")
    return kept


def _apply(operation: Operation, entries: Sequence[Kept]) -> list[Kept]:
    is_cast = operation.kind == "cast"
    matching = {
        entry.source
        for entry in entries
        if operation.pattern.search(entry.key) and not (is_cast and entry.dtype is None)
    }
    if not matching:
        what = "no tensor's key" if is_cast else "no key"
        raise ConfigurationError(
            f"--op {operation.text!r} matches {what}; it is applied after the operations before it, and `inspect "
            "--filter` shows what an expression matches"
        )
    if operation.kind == "remove":
        return [entry for entry in entries if entry.source not in matching]
    return [_changed(operation, entry) if entry.source in matching else entry for entry in entries]


def _changed(operation: Operation, entry: Kept) -> Kept:
    if operation.kind == "cast":
        return replace(entry, dtype=dtype_named(operation.argument, operation.text))
    try:
        key = operation.pattern.sub(operation.argument, entry.key)
    except (re.error, IndexError) as error:
        raise ConfigurationError(f"--op {operation.text!r}: the replacement is wrong ({error})") from error
    if not key:
        raise ConfigurationError(f"--op {operation.text!r} leaves nothing of the key {entry.key}")
    return replace(entry, key=key)


def _require_distinct(entries: Sequence[Kept], operation: Operation) -> None:
    sources: dict[str, list[str]] = {}
    for entry in entries:
        sources.setdefault(entry.key, []).append(entry.source)
    twice = [f"{' and '.join(found)} as {key}" for key, found in sources.items() if len(found) > 1]
    if twice:
        more = f" and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
        raise ConfigurationError(f"--op {operation.text!r} would store {'; '.join(twice[:_SHOWN])}{more}")


def edited_paths(paths: Mapping[str, KeyPath], kept: Sequence[Kept]) -> dict[str, KeyPath]:
    """Paths in the nested state dict (torch's `planner_data`) for the keys after an edit.

    Args:
        paths: Of the keys before; a key that has none is its own path.
        kept: As `plan_edit` gives it.

    Raises:
        ConfigurationError: A key would be both an entry and a group of entries.
    """
    found = {entry.key: edited_path(paths.get(entry.source, (entry.source,)), entry) for entry in kept}
    groups = {path[:depth]: key for key, path in found.items() for depth in range(1, len(path))}
    for key, path in found.items():
        if path in groups:
            raise ConfigurationError(
                f"{key} would be an entry, and also the group that holds {groups[path]}; rename one of them differently"
            )
    return _as_text_where_mixed(found)


def edited_path(path: KeyPath, entry: Kept) -> KeyPath:
    """The path of a renamed key: parts at both ends that the renaming left stay parts, what lies between is one."""
    if entry.key == entry.source:
        return path
    rest = entry.key
    front: list[str | int] = []
    back: list[str | int] = []
    parts = list(path)
    while len(parts) > 1 and rest.startswith(f"{parts[0]}."):
        rest = rest[len(f"{parts[0]}.") :]
        front.append(parts.pop(0))
    while len(parts) > 1 and rest.endswith(f".{parts[-1]}"):
        rest = rest[: -len(f".{parts[-1]}")]
        back.insert(0, parts.pop())
    middle: str | int = int(rest) if len(parts) == 1 and isinstance(parts[0], int) and rest.isdecimal() else rest
    return (*front, middle, *back)


def _as_text_where_mixed(paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """Lists whose elements are no longer all numbered become dicts."""
    has_text = {path[:depth] for path in paths.values() for depth in range(len(path)) if isinstance(path[depth], str)}
    return {
        key: tuple(str(part) if path[:depth] in has_text else part for depth, part in enumerate(path))
        for key, path in paths.items()
    }
