"""The tables of docs/training_flags.md: every flag of `mfsdp train`, its default and meaning; and refused flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from megatron_fsdp.train.options import SECTIONS, Option, flag_for, options_of
from megatron_fsdp.train.options.command_line import ALIASES, FIXED, IDLE, REFUSED


def option_table(cls: type) -> str:
    """Return the table of a section's options."""
    return table(("flag", "default", "meaning"), (option_row(option) for option in options_of(cls)))


def option_row(option: Option) -> tuple[str, str, str]:
    """Return flag, default and meaning of an option."""
    flag = f"`{option.flag}`"
    if option.is_switch and option.off_flags:
        flag = f"`--[no-]{option.flag.removeprefix('--')}`"
    elif option.choices:
        flag += " " + ", ".join(f"`{choice}`" for choice in option.choices)
    return flag, shown(option.default), option.meaning


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each reason once, with its flags."""
    flags: dict[str, list[str]] = {}
    for flag, reason in reasons.items():
        flags.setdefault(reason, []).append(f"`{flag}`")
    return [(", ".join(named), reason) for reason, named in flags.items()]


def alias_rows() -> list[tuple[str, str]]:
    """Return the rows of flags that are not named like their option."""
    return [
        (f"`{flag}`", f"`{flag_for(alias.name)}`" + ("" if alias.value is None else f" {shown(alias.value)}"))
        for flag, alias in ALIASES.items()
    ]


def fixed_rows() -> list[tuple[str, str, str]]:
    """Return the rows of flags with a single allowed value."""
    return [(f"`{flag}`", ", ".join(f"`{v}`" for v in fixed.values), fixed.reason) for flag, fixed in FIXED.items()]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def shown(value: object) -> str:
    """Return a default in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ((), ""):
        return "none"
    return f"`{str(value).removeprefix('torch.')}`"


TABLES: dict[str, Callable[[], str]] = {
    **{f"flags_{name}": partial(option_table, cls) for name, cls in SECTIONS.items()},
    "flags_respelled": lambda: table(("flag", "same as"), alias_rows()),
    "flags_with_one_value": lambda: table(("flag", "value", "what happens"), fixed_rows()),
    "flags_without_effect": lambda: ", ".join(f"`{flag}`" for flag in IDLE),
    "flags_refused": lambda: table(("flags", "why, and what to do"), by_reason(REFUSED)),
}
"""The tables, by their names in the page."""
