"""The tables of docs/ddp.md: the fields of `DistributedDataParallelConfig` with flag, default, meaning and rules."""

import dataclasses
import re
from typing import Any

import torch

from megatron_fsdp.config.ddp_config import CHOICES, EXCLUSIONS, IMPLICATIONS, NEEDS
from megatron_fsdp.config.ddp_config_flags import MEGATRON_DEFAULTS, field_meanings, flag_of
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig


def different_defaults() -> str:
    """Return a table of the fields whose default differs in Megatron-LM's parser."""
    defaults = vars(DistributedDataParallelConfig())
    rows = [
        f"| `{name}` | `{shown(defaults[name])}` | `{shown(value)}` | `{given(name, value)}` |"
        for name, value in MEGATRON_DEFAULTS.items()
    ]
    return "\n".join(["| field | here | in Megatron-LM | flag for theirs |\n|---|---|---|---|", *rows])


def given(name: str, value: object) -> str:
    """Return a value as typed on a command line."""
    return f"{flag_of(name)} {value}" if isinstance(value, str) else flag_of(name)


def rules_of(name: str) -> list[str]:
    """Return the rules between a field and others, in words."""
    rules = [f"one of {listed(CHOICES[name])}"] if name in CHOICES else []
    others = [rule.other if rule.one == name else rule.one for rule in EXCLUSIONS if name in (rule.one, rule.other)]
    rules += [f"not with `{other}`" for other in others]
    for need in NEEDS:
        if need.field == name:
            rules.append(f"{'needs' if need.refused else 'idle without'} {listed(need.on)}")
    rules += [f"sets `{target}`" for source, target in IMPLICATIONS if source == name]
    rules += [f"set by `{source}`" for source, target in IMPLICATIONS if target == name]
    return rules


def _is_said(rule: str, meaning: str) -> bool:
    """Return True if a meaning names all that a rule does."""
    said = all(name in re.findall(r"\w+", meaning) for name in re.findall("`(.+?)`", rule))
    return said and rule.startswith(("one of", "sets", "needs"))


def row(field: dataclasses.Field[Any], meaning: str) -> str:
    """Return the table's row of a field."""
    flag = f"`{flag_of(field.name)}`"
    if field.type is bool:
        flag = flag.replace("--", "--[no-]")
    meaning = meaning.replace("``", "`").replace("|", "\\|")
    told = [rule for rule in rules_of(field.name) if not _is_said(rule, meaning)]
    if rules := "; ".join(told):
        meaning += f" {rules[0].upper()}{rules[1:]}."
    return f"| `{field.name}`<br>{flag} | `{shown(field.default)}` | {meaning} |"


def shown(value: object) -> str:
    """Return a default as Python code, a dtype by name."""
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def listed(names: tuple[Any, ...]) -> str:
    """Return names as code."""
    return ", ".join(f"`{name}`" for name in names)


def fields() -> str:
    """Return the table of all fields."""
    meanings = field_meanings()
    rows = [row(field, meanings[field.name]) for field in dataclasses.fields(DistributedDataParallelConfig)]
    return "\n".join(["| field, flag | default | meaning |\n|---|---|---|", *rows])
