"""Options from a YAML file; nothing in it is executed, and it cannot make a run write where it likes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_fsdp.config.yaml_mapping import one_line
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.fields import converter_of
from megatron_fsdp.train.options.options import OPTIONS, SECTIONS, Layer

WRITTEN = ("out", "save", "tensorboard_dir", "data_cache_path", "dump_param_to_param_group_map")
"""Options that name a place to write to."""

_OPEN = {"ddp", *SECTIONS}
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"
_NUMBERS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_SURPRISING = re.compile(r"[-+]?0\d[\d_]*|.*:.*")  # octal, and to the base of 60


class _TwiceError(Exception):
    """A key stands twice in one mapping."""


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]  # the library has no types
    """The safe loader without what it does in silence.

    It would let the last of two equal keys win, and change what looks like a number: 010 into 8, 1:30 into 90, the text
    1.10 into 1.1. That means here what it means on the command line.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.lines: dict[str, int] = {}  # of the keys of all mappings

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """As the safe loader's, with values that stay the text that they are."""
        super().flatten_mapping(node)
        for key, value in node.value:
            is_number = isinstance(value, yaml.ScalarNode) and value.tag in _NUMBERS
            if is_number and (_takes_text(str(key.value)) or _SURPRISING.fullmatch(value.value)):
                value.tag = _TEXT

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the safe loader's.

        Raises:
            _TwiceError: A key stands twice; with its name and line.
        """
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _TwiceError(f"gives {key.value!r} twice, in lines {lines[key.value]} and {line}")
                lines[key.value] = line
        self.lines.update(lines)
        return super().construct_mapping(node, deep)


def _takes_text(key: str) -> bool:
    option = OPTIONS.get(key.replace("-", "_"))
    return option is not None and option.kind in (str, Path)


def read_config_file(path: Path, out: Path | None = None) -> Layer:
    """Read options by name; a section (`model:`, `training:`, ... `ddp:`) may hold them, too.

    Args:
        path: The file.
        out: The folder for results, where the command line names one: places to write to that the file names lie below
            it, and are relative to it. Else the same holds of the current folder.

    Returns:
        What it says, with the line of each value. It has problems where the file names an option twice, or a place to
        write to that is none or lies elsewhere.

    Raises:
        ConfigurationError: The file cannot be read, is no mapping, or has a key twice.
    """
    try:
        loader = _UniqueKeys(path.read_text(encoding="utf-8"))
        try:
            found = loader.get_single_data()
        finally:
            loader.dispose()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} cannot be read ({error}): give a YAML file") from None
    except _TwiceError as error:
        raise ConfigurationError(f"--config {path} {error}: give it once") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"--config {path} is not YAML: {one_line(error)}") from None
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"--config {path} is not a mapping of options to values")
    places = {key: f"{path}:{line}" for key, line in loader.lines.items()}
    values: dict[str, Any] = {}
    problems: list[str] = []
    try:
        for key, value in _flat(found, str(path), places, problems):
            name = key.replace("-", "_")
            if name in values:
                problems.append(f"{places.get(key, path)}: {key!r} is given twice: give it once")
            elif value is not None:
                values[name] = value
    except RecursionError:
        raise ConfigurationError(f"--config {path} has a section that holds itself: leave the alias out") from None
    layer = Layer(f"config {path}", values, places={key.replace("-", "_"): place for key, place in places.items()})
    for name in (*WRITTEN, "mlflow_tracking_uri"):
        try:
            if name == "mlflow_tracking_uri":
                require_no_file_uri(values.get(name))
            elif name in values:
                root = Path.cwd() if out is None or name == "out" else out
                values[name] = str(require_inside(name, converter_of(OPTIONS[name])(values[name]), root))
        except ConfigurationError as error:
            problems.append(f"{layer.at(name)}{error}")
            del values[name]
    return replace(layer, problems=tuple(problems))


def require_inside(name: str, place: Path, root: Path) -> Path:
    """The place below a folder that a file names.

    Someone else's file should not be able to write, or to delete old checkpoints, anywhere on the machine.

    Args:
        name: Of the option.
        place: What the file says; relative to the folder.
        root: The folder.

    Raises:
        ConfigurationError: It is outside, symbolic links and `..` followed.
    """
    found = root / place
    if not found.resolve().is_relative_to(root.resolve()):
        raise ConfigurationError(
            f"{name}: {place} lies outside of {root.resolve()}: a file may only name places below --out, or without "
            f"it below the current folder; give --{name.replace('_', '-')} on the command line"
        )
    return found


def require_no_file_uri(uri: object) -> None:
    """Refuse a place for MLflow that is a folder or a file of this machine.

    Raises:
        ConfigurationError: It is one.
    """
    if uri is not None and not str(uri).startswith(("http://", "https://")):
        raise ConfigurationError(
            f"mlflow_tracking_uri: {uri} is no server: a file may only name http:// and https:// ones; give "
            "--mlflow-tracking-uri on the command line"
        )


def _flat(
    found: Mapping[Any, Any], file: str, places: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yield options and values, out of their sections; what is none of these is added to the problems."""
    for key, value in found.items():
        place = places.get(key, file) if isinstance(key, str) else file
        if not isinstance(key, str):
            problems.append(f"{place}: {key!r} is no option; give names")
        elif key in _OPEN and isinstance(value, Mapping):
            yield from _flat(value, file, places, problems)
        elif key in SECTIONS and key not in OPTIONS and value is not None:
            problems.append(f"{place}: {key!r} is a section, and {value!r} is no mapping of options")
        elif isinstance(value, Mapping):
            problems.append(
                f"{place}: {key!r} is no section; sections are {', '.join(sorted(_OPEN))}, or give options without one"
            )
        else:
            yield key, value
