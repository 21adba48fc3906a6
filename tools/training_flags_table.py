"""Write docs/training_flags.md: every flag of `mfsdp train`, its default, meaning and effect; and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_fsdp.train.options.megatron_flags import ALIASES, EXPLAINED, FIXED, REFUSED
from megatron_fsdp.train.options.options import SECTIONS, Option, flag_for, options_of
from tools.training_flags_words import DIFFERENT_DEFAULTS, INTRODUCTION, RULES, SECTION_WORDS


def render() -> str:
    """The whole document."""
    parts = [INTRODUCTION.rstrip()]
    for attribute, cls in SECTIONS.items():
        summary = (cls.__doc__ or "").partition("\n")[0]
        parts += [f"## {attribute}", f"{summary} {SECTION_WORDS.get(attribute, '')}".rstrip(), option_table(cls)]
    parts += ["## ddp", SECTION_WORDS["ddp"]]
    parts += ["## Other spellings", table(("flag", "same as"), alias_rows())]
    parts += ["## Flags of Megatron-LM with one possible value", table(("flag", "value", "what happens"), fixed_rows())]
    parts += ["## Flags of Megatron-LM without an effect", _TAKEN, table(("flags", "why"), by_reason(EXPLAINED))]
    refused = table(("flags", "why, and what to do"), by_reason(REFUSED))
    parts += ["## Flags of Megatron-LM that are refused", refused]
    parts += ["## Defaults that differ from Megatron-LM's", table(("flag", "there", "here", "why"), DIFFERENT_DEFAULTS)]
    parts += ["## Rules that differ from Megatron-LM's", RULES_WORDS, table(("when", "Megatron-LM", "here"), RULES)]
    return "\n\n".join(parts) + "\n"


_TAKEN = "They are taken, and a notice in the header of the run says why they change nothing."

RULES_WORDS = (
    "Where Megatron-LM checks or changes flags because of other flags and this trainer does something else. What is "
    "changed or has no effect is always named in a notice."
)


def option_table(cls: type) -> str:
    """The options of a section."""
    return table(("flag", "default", "meaning"), (option_row(option) for option in options_of(cls)))


def option_row(option: Option) -> tuple[str, str, str]:
    """Flag, default and meaning of an option."""
    flag = f"`{option.flag}`"
    if option.is_switch and option.off_flags:
        flag = f"`--[no-]{option.flag.removeprefix('--')}`"
    elif option.choices:
        flag += " " + ", ".join(f"`{choice}`" for choice in option.choices)
    return flag, shown(option.default), option.meaning


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each reason once, with the flags that it is given for."""
    flags: dict[str, list[str]] = {}
    for flag, reason in reasons.items():
        flags.setdefault(reason, []).append(f"`{flag}`")
    return [(", ".join(named), reason) for reason, named in flags.items()]


def alias_rows() -> list[tuple[str, str]]:
    """Flags that are not named like their option."""
    return [
        (f"`{flag}`", f"`{flag_for(alias.name)}`" + ("" if alias.value is None else f" {shown(alias.value)}"))
        for flag, alias in ALIASES.items()
    ]


def fixed_rows() -> list[tuple[str, str, str]]:
    """Flags that may only ask for what happens anyway."""
    return [(f"`{flag}`", ", ".join(f"`{v}`" for v in fixed.values), fixed.reason) for flag, fixed in FIXED.items()]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def shown(value: object) -> str:
    """A default in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ((), ""):
        return "none"
    return f"`{str(value).removeprefix('torch.')}`"
