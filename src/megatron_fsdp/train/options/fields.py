"""Makes flags from the fields of a dataclass: name, type, bounds, choices, help and the way to turn a switch off."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from megatron_fsdp.config.ddp_config_flags import field_meanings
from megatron_fsdp.errors import ConfigurationError


class Bound(NamedTuple):
    """A bound on a number: what is allowed, in words, and whether a value is."""

    words: str
    allows: Callable[[Any], bool]


_YEAR = 365 * 24 * 60  # timers of libraries overflow somewhere above
_TOO_LARGE = 2**63  # below it, tensors take a size, and generators a seed, as it is
_POSITIVE = Bound("a finite number above 0", lambda value: 0 < value < math.inf)
_NOT_NEGATIVE = Bound("a finite number, 0 or more", lambda value: 0 <= value < math.inf)

Count = Annotated[int, Bound("1 or more", lambda v: v >= 1), Bound("less than 2^63", lambda v: v < _TOO_LARGE)]
Whole = Annotated[int, _NOT_NEGATIVE]
Seed = Annotated[int, Bound(f"0 to {_TOO_LARGE - 1}", lambda v: 0 <= v < _TOO_LARGE)]
LogLevel = Annotated[int, Bound("0 to 50", lambda v: 0 <= v <= 50)]
Positive = Annotated[float, _POSITIVE]
NotNegative = Annotated[float, _NOT_NEGATIVE]
Share = Annotated[float, Bound("0 or more, and less than 1", lambda v: 0 <= v < 1)]
Minutes = Annotated[float, _POSITIVE, Bound(f"at most {_YEAR}, a year", lambda v: v <= _YEAR)]
Duration = Annotated[float, Bound("a number above 0", lambda v: v > 0)]


@dataclass(frozen=True)
class Option:
    """One field as a flag; its name is also the key in a configuration file.

    Attributes:
        kind: The type of a value, without None.
        bounds: What a number must be.
        choices: The values that are possible; empty: any.
        meaning: One sentence or more.
    """

    name: str
    kind: type
    bounds: tuple[Bound, ...]
    choices: tuple[Any, ...]
    default: Any
    meaning: str

    @property
    def flag(self) -> str:
        """The flag that turns a switch on, or precedes a value; also for switches that are on by default."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether it is a boolean."""
        return self.kind is bool

    @property
    def off_flags(self) -> tuple[str, ...]:
        """The flags that turn a switch off: `--no-x`, and as in Megatron-LM `--disable-x` if it is on by default.

        A switch named `no_x` has the flag `--no-x` only.
        """
        if not self.is_switch or self.name.startswith("no_"):
            return ()
        kebab = self.flag.removeprefix("--")
        return (f"--no-{kebab}", f"--disable-{kebab}") if self.default else (f"--no-{kebab}",)

    def read(self, value: Any) -> Any:
        """Parse a text, or a value of a configuration file, into a value of the field.

        Raises:
            ConfigurationError: It cannot be one; with what is allowed.
        """
        read, words = _READERS[self.kind]
        found = read(value)
        if found is None or (self.choices and found not in self.choices):
            allowed = "one of " + ", ".join(map(str, self.choices)) if self.choices else words
            raise ConfigurationError(f"invalid {self.flag} {str(value) or repr('')}: give {allowed}")
        for bound in self.bounds:
            if not bound.allows(found):
                raise ConfigurationError(f"invalid {self.flag} {value}: give {bound.words}")
        return found


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the fields of a dataclass as options, in their order."""
    hints, meanings = typing.get_type_hints(cls, include_extras=True), field_meanings(cls)
    return tuple(
        Option(field.name, *_kind_of(hints[field.name]), field.default, meanings.get(field.name, ""))
        for field in dataclasses.fields(cls)
    )


def _kind_of(hint: Any) -> tuple[type, tuple[Bound, ...], tuple[Any, ...]]:
    """Return the type of a value, its bounds, and its choices."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Annotated:
        kind, *bounds = get_args(hint)
        return kind, tuple(bounds), ()
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]), (), get_args(hint)
    return hint, (), ()


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,3}(_?\d){0,30}", value.strip()):
        return int(value)
    return value if type(value) is int else None


def _real(value: Any) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        found = float(value)
        return None if isinstance(value, bool) or math.isnan(found) else found
    return None


def _text(value: Any) -> str | None:
    with suppress(AttributeError, UnicodeEncodeError):  # no text; half of a pair of surrogates, which YAML can say
        # Where the locale knows ASCII only, Python keeps the bytes of an argument as lone surrogates.
        return str(value.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    return None


def _path(value: Any) -> Path | None:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        return None
    with suppress(RuntimeError):  # there is no user of this name
        return Path(value).expanduser()
    return None


_READERS: Mapping[type, tuple[Callable[[Any], Any], str]] = {
    int: (_whole, "a whole number"),
    float: (_real, "a finite number"),
    str: (_text, "a text, in a file with quotes around it"),
    Path: (_path, "a path"),
    bool: (lambda value: value if isinstance(value, bool) else None, "true or false"),
}
"""How values of a type are read (None: it is none), and what to give."""
