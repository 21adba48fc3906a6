"""Mappings of plain values as YAML text, with PyYAML's safe loader and dumper and readable errors.

Whole numbers are decimal. YAML 1.1 also has octal and base 60, by which 010 is 8 and 1:30 is 90; here such words are
strings, as are those in base 2 and 16, and a field that needs a number refuses them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_fsdp.errors import ConfigurationError

_INT = "tag:yaml.org,2002:int"
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_BAD_VALUE = "some value does not fit the tag in front of it; leave tags such as !!bool out"


def _decimal(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Read a decimal whole number; checks the pattern again, since no resolver has where a tag asks for an int."""
    try:
        if isinstance(node.value, str) and _DECIMAL.match(node.value):
            return int(node.value.replace("_", ""))
        problem = "this is not a whole decimal number"
    except ValueError:  # Python limits the digits of a number
        problem = f"a whole number of {len(node.value):,} characters is too long"
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """The safe loader with decimal whole numbers only. Its tables are copies: other users of PyYAML keep theirs."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, _DECIMAL if tag == _INT else pattern) for tag, pattern in known]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {**yaml.SafeLoader.yaml_constructors, _INT: _decimal}  # noqa: RUF012


def read_mapping(source: str | os.PathLike[str]) -> tuple[dict[Any, Any], str]:
    """Read one mapping.

    A string is always text: whether a short string is a path would be a guess that depends on the current folder.

    Returns:
        The mapping, which is empty where there is nothing but comments; and what errors about it begin with, which is
        empty for text.
    """
    text, where = (source, "") if isinstance(source, str) else _text_of(source)
    try:
        root = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)
    except Exception as error:  # noqa: BLE001 - PyYAML's constructors fail in many ways on what they do not expect
        raise ConfigurationError(f"{where}not YAML: {one_line(error)}") from None
    if values is None:
        return {}, where
    if not isinstance(values, dict):
        hint = "; give a path as a pathlib.Path" if isinstance(source, str) and isinstance(values, str) else ""
        raise ConfigurationError(
            f"{where}the YAML is a {type(values).__name__}; give a mapping of fields to values{hint}."
        )
    _refuse_repeated_keys(root, where)
    return values, where


def lines_of_keys(source: os.PathLike[str]) -> dict[str, int]:
    """Return the line of each key of a YAML file that `read_mapping` has read, those of nested mappings included."""
    lines: dict[str, int] = {}
    waiting = [yaml.compose(_text_of(source)[0], Loader=_Loader)]
    while waiting:
        node = waiting.pop()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            lines[str(key.value)] = max(key.start_mark.line + 1, lines.get(str(key.value), 0))
            waiting.append(value)
    return lines


def write_mapping(values: Mapping[str, Any]) -> str:
    """Write plain values as YAML, in their order."""
    text: str = yaml.safe_dump(dict(values), sort_keys=False)
    return text


def _text_of(source: os.PathLike[str]) -> tuple[str, str]:
    """Read a file; return its text and the prefix of errors about it."""
    if not isinstance(source, os.PathLike):
        raise ConfigurationError(
            f"a configuration cannot be read from {type(source).__name__!r}; give YAML text, or the path of a YAML "
            "file as a pathlib.Path."
        )
    shown = repr(source)
    try:
        path = Path(source)
        shown = str(path) if str(path).isprintable() else shown
        return path.read_text(encoding="utf-8"), f"{shown}: "
    except Exception as error:  # noqa: BLE001 - also a path that Python or the system cannot take
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        raise ConfigurationError(f"{shown} cannot be read: {reason}; give the path of a YAML file.") from None


def _refuse_repeated_keys(root: Any, where: str) -> None:
    """Refuse equal keys, also in nested mappings, of which PyYAML would keep the last without a word."""
    if isinstance(root, yaml.SequenceNode):
        for entry in root.value:
            _refuse_repeated_keys(entry, where)
    if not isinstance(root, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in root.value:
        _refuse_repeated_keys(value, where)
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigurationError(
                f"{where}{key.value!r} is there twice, on lines {lines[key.value]} and {line}; keep one of them."
            )
        lines[key.value] = line


def one_line(error: Exception) -> str:
    """Return PyYAML's message, with its place, in one line."""
    if not isinstance(error, yaml.YAMLError | ValueError | RecursionError):  # ValueError: a date that does not exist
        return _BAD_VALUE
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"{problem} on line {mark.line + 1}, column {mark.column + 1}; put it right there."
