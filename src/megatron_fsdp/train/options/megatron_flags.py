"""Flags of Megatron-LM that are no options here: respelled, tied to one value, without effect, or refused.

`megatron_flags.toml` beside this file has them, with reasons and remedies.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple


class FixedFlag(NamedTuple):
    """The allowed values of a flag, which request the actual behaviour, and the reason with a remedy."""

    values: tuple[str, ...]
    reason: str

    def allows(self, text: str) -> bool:
        """Return True if a text is one of the values, or the same number as one."""
        with suppress(ValueError):
            return text in self.values or float(text) in map(float, self.values)
        return False


class Spelling(NamedTuple):
    """The option that an alternative flag sets, and its value; None: the value after the flag."""

    name: str
    value: Any = None


_TABLES: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_IDLE = _TABLES["without_effect"]["flags"].split()

ALIASES = {flag: Spelling(to["option"], to.get("to")) for flag, to in _TABLES["other_spellings"].items()}
"""Megatron-LM's spellings, those of earlier versions included, that do not follow from the names of the options."""

FIXED = {flag: FixedFlag(tuple(one["values"]), one["reason"]) for flag, one in _TABLES["one_value"].items()}
"""Flags that are accepted with these values, and named in the note, and refused with others."""

IDLE_VALUES: Mapping[str, list[str]] = _TABLES["values_without_effect"]
"""Flag of an option -> values that are accepted, and named in a note, as if the flag were left out."""

IDLE = tuple(flag.removesuffix("=") for flag in _IDLE)
"""Flags that are accepted, and named in a note, since they have no effect."""

ELSEWHERE: Mapping[str, str] = _TABLES["elsewhere"]
"""Flag of other trainers -> the equivalent one of this trainer."""

VALUED = frozenset(flag.removesuffix("=") for flag in _IDLE if flag.endswith("="))
"""Those that need one or more values."""

REFUSED: Mapping[str, str] = {flag: reason for reason, flags in _TABLES["refused"].items() for flag in flags.split()}
"""Flag -> reason and remedy."""

OF_CONFIGURATIONS = REFUSED["--multi-latent-attention"]
"""The reason of those that describe models of which only a configuration can be given."""
