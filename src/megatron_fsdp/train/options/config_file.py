"""Options from a YAML file; nothing in it is executed, and it cannot make a run write where it likes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.options import SECTIONS

WRITTEN = ("out", "save", "tensorboard_dir", "data_cache_path", "dump_param_to_param_group_map")
"""Options that name a place to write to."""

_OPEN = {"ddp", *SECTIONS}


def read_config_file(path: Path) -> Mapping[str, Any]:
    """Read options by name; a section (`model:`, `training:`, ... `ddp:`) may hold them, too.

    Raises:
        ConfigurationError: The file cannot be read, is no mapping, names an option twice, or names a place to write to
            that is not below the current folder.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} cannot be read ({error}): give a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"--config {path} is not a mapping of options to values")
    values: dict[str, Any] = {}
    for key, value in _flat(found, path):
        name = key.replace("-", "_")
        if name in values:
            raise ConfigurationError(f"--config {path} gives {key!r} twice: give it once")
        values[name] = value
    for name in WRITTEN:
        if values.get(name) is not None:
            require_inside(name, str(values[name]), path)
    return {name: value for name, value in values.items() if value is not None}


def require_inside(name: str, place: str, path: Path) -> None:
    """Refuse a place outside of the current folder.

    Someone else's file should not be able to write, or to delete old checkpoints, anywhere on the machine.

    Raises:
        ConfigurationError: It is outside.
    """
    here = Path.cwd().resolve()
    if not (here / Path(place).expanduser()).resolve().is_relative_to(here):
        raise ConfigurationError(
            f"{name}: {place} in --config {path} lies outside of the current folder {here}: a file may only name "
            f"places below it; give --{name.replace('_', '-')} on the command line"
        )


def _flat(found: Mapping[Any, Any], path: Path) -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if not isinstance(key, str):
            raise ConfigurationError(f"--config {path}: {key!r} is no option; give names")
        if key in _OPEN and isinstance(value, Mapping):
            yield from _flat(value, path)
        elif isinstance(value, Mapping):
            raise ConfigurationError(
                f"--config {path}: {key!r} is no section; sections are {', '.join(sorted(_OPEN))}, or give options "
                "without one"
            )
        else:
            yield key, value
