"""Mappings of plain values as YAML text: what PyYAML's safe loader and dumper do, with errors in words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_fsdp.errors import ConfigurationError


def read_mapping(source: str | os.PathLike[str]) -> tuple[dict[Any, Any], str]:
    """Read one mapping.

    A string is always text: whether a short string is a path would be a guess that depends on the current folder.

    Args:
        source: YAML text, or a path object.

    Returns:
        The mapping, which is empty where there is nothing but comments; and what errors about it begin with, which is
        empty for text.

    Raises:
        ConfigurationError: The file cannot be read, or does not hold one YAML mapping with every key once.
    """
    text, where = (source, "") if isinstance(source, str) else (_text_of(Path(source)), f"{os.fspath(source)}: ")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise ConfigurationError(f"{where}not YAML: {_one_line(error)}") from None
    if values is None:
        return {}, where
    if not isinstance(values, dict):
        hint = "; give a path as a pathlib.Path" if isinstance(source, str) and isinstance(values, str) else ""
        raise ConfigurationError(
            f"{where}this is YAML of a {type(values).__name__}, and a mapping of fields to values is needed{hint}."
        )
    _refuse_repeated_keys(root, where)
    return values, where


def write_mapping(values: Mapping[str, Any]) -> str:
    """Write plain values as YAML, in their order."""
    text: str = yaml.safe_dump(dict(values), sort_keys=False)
    return text


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"{path} cannot be read: {reason}; give the path of a YAML file.") from None


def _refuse_repeated_keys(root: Any, where: str) -> None:
    """PyYAML keeps the last of several equal keys in silence."""
    lines: dict[str, int] = {}
    for key, _ in root.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigurationError(
                f"{where}{key.value!r} is there twice, on lines {lines[key.value]} and {line}; keep one of them."
            )
        lines[key.value] = line


def _one_line(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"{problem} on line {mark.line + 1}, column {mark.column + 1}; put it right there."
