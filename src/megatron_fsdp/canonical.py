"""Text of values that ranks compare: the same in every process that was given the same.

`repr` is not: strings are hashed by a seed of each process, so sets show their elements in another order, and objects
without a `repr` of their own show where they lie in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def canonical_facts(given: Mapping[str, Any]) -> dict[str, str]:
    """The text of each value, of a dataclass of each field ("peft_config.r"), so that what differs is named."""
    facts = {}
    for name, value in given.items():
        if is_dataclass(value) and not isinstance(value, type):
            facts[name] = type(value).__name__
            facts |= canonical_facts({f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)})
        else:
            facts[name] = canonical_text(value)
    return facts


def canonical_text(value: Any) -> str:
    """A `repr` with the elements of sets and the keys of mappings sorted, of all fields of dataclasses, at any depth.

    Other objects show their own `repr` without addresses; those that have none are told apart by their class alone.
    """
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{field.name}={canonical_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        items = sorted((canonical_text(key), canonical_text(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, AbstractSet):
        return "{" + ", ".join(sorted(map(canonical_text, value))) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(canonical_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return _ADDRESS.sub("", repr(value))
