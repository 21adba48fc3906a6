"""Mappings of plain values as YAML."""

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from megatron_fsdp.errors import ConfigurationError

_MOST_ALIASES = 16  # however they are nested, a page then stands for at most some hundred pages


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    yaml_implicit_resolvers = {  # noqa: RUF012 - whole numbers are decimal: YAML 1.1 takes 010 for 8 and 1:30 for 90
        first: [(tag, re.compile(r"[-+]?(0|[1-9][0-9_]*)$") if tag.endswith(":int") else found) for tag, found in known]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.aliases = getattr(self, "aliases", 0) + self.check_event(yaml.AliasEvent)
        if self.aliases > _MOST_ALIASES:
            problem = f"more than {_MOST_ALIASES} aliases could stand for any size; write the values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        self.lines = getattr(self, "lines", {}) | {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
        seen = set[Any]()
        for key, _ in node.value:  # of equal keys PyYAML would keep the last without a word
            if key.value in seen:
                problem = f"{key.value!r} is there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_mapping(source: str | os.PathLike[str]) -> tuple[dict[Any, Any], str, dict[str, int]]:
    """Read a mapping from text or a Path; return it, the beginning of errors about it, and the line of each key."""
    try:
        text = source if isinstance(source, str) else Path(source).read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ConfigurationError(f"{source} cannot be read: {reason}; give the path of a YAML file.") from None
    where = "" if isinstance(source, str) else f"{source}: "
    try:
        values = (loader := _Loader(text)).get_single_data()
        json.dumps(values, default=str, skipkeys=True)  # refuses what holds itself
    except Exception as error:  # noqa: BLE001 - PyYAML fails in many ways on what it does not expect
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        place = f" on line {mark.line + 1}, column {mark.column + 1}; put it right there." if mark is not None else ""
        raise ConfigurationError(f"{where}not YAML: {' '.join(str(problem).split())}{place}") from None
    if not isinstance(values, dict | None):
        hint = "; give a path as a pathlib.Path" if isinstance(source, str) and isinstance(values, str) else ""
        kind = type(values).__name__
        raise ConfigurationError(f"{where}the YAML is a {kind}; give a mapping of fields to values{hint}.")
    return values or {}, where, getattr(loader, "lines", {})
