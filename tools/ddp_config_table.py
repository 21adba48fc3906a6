"""Write docs/ddp_config.md: every field of `DistributedDataParallelConfig`, its default, flag, meaning and rules."""

import dataclasses
from typing import Any

import torch

from megatron_fsdp.config.ddp_config_checks import CHOICES, EXCLUSIONS, IMPLICATIONS, NEEDS
from megatron_fsdp.config.ddp_config_flags import DTYPE_CHOICES, MEGATRON_DEFAULTS, field_meanings, flag_of
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig

INTRODUCTION = """\
# `DistributedDataParallelConfig`

Made by `make pages` from the class; a test keeps it true.

    from megatron_fsdp import DistributedDataParallelConfig

    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=40_000_000)
    config.average_in_collective = True   # a plain dataclass: set what you like, when you like
    print(config.checked_copy())          # runs all checks on what is set now; front ends work on such a copy

The class holds every field of the published package and of Megatron-Core. That a field is here does not mean that every
front end can honour it: one that cannot refuses it with a reason.

## Checks

Construction refuses what is impossible, in one sentence that names the field, the value and what is allowed: a value
of another type (1 is not True, True is not 1), a strategy or dtype that does not exist, fields that exclude each other.
Errors are `ConfigurationError`, which is a `ValueError`. Strategies may be numbers, dtypes names (`"bf16"`,
`"float32"`, `"torch.float16"`, `"auto"` for None), patterns a list; they are stored as names, dtypes and a tuple.

A switch that is harmless but idle without another one is accepted, as the published class does.
`config.idle_settings()` gives a sentence for each of them: "idle without" in the table.

## Files and command lines

    DistributedDataParallelConfig.from_dict(config.to_dict())   # plain values, fit for JSON
    DistributedDataParallelConfig.from_yaml(config.to_yaml())   # YAML text; from_yaml(Path("ddp.yaml")) reads a file

    from megatron_fsdp.config.ddp_config_flags import add_flags, config_from_flags, flags_of

    parser = argparse.ArgumentParser()
    add_flags(parser)
    config = config_from_flags(parser.parse_args())
    parser.parse_args(flags_of(config))                         # the way back

All three give back an equal configuration. What a file leaves out takes its default; an unknown key is an error that
names the nearest field, and so are a key that is there twice and a string that only looks like a number (`1e6`).
Whole numbers in YAML are decimal (`80_000_000`): what YAML 1.1 reads as octal or base 60 (`010`, `1:30`) is refused.

Flags, and the attributes of the parsed namespace, have the names that Megatron-LM gives them. A switch has a flag for
on and one for off, written `--[no-]x` below, of which the last one given counts. Strategies may be numbers, dtypes any
name that the class takes, patterns are one or more words after the flag. `--grad-reduce-in-bf16` is not among them, nor
are the rules by which Megatron-LM changes one flag because of another (training in bf16 turns
`--accumulate-allreduce-grads-in-fp32` on there).

**Without a flag a field has the default of the class.** Megatron-LM's own parser has other defaults for these fields:

@DIFFERENCES@
"""

TABLE_HEAD = "| field | default | flag | meaning | rules |\n|---|---|---|---|---|"


def different_defaults() -> list[str]:
    """One line for each field whose default is another one in Megatron-LM's parser."""
    defaults = vars(DistributedDataParallelConfig())
    return [
        f"- `{name}`: `{shown(value)}` there, `{shown(defaults[name])}` here; for theirs write `{given(name, value)}`."
        for name, value in MEGATRON_DEFAULTS.items()
    ]


def given(name: str, value: object) -> str:
    """What to type for a value."""
    return f"{flag_of(name)} {value}" if isinstance(value, str) else flag_of(name)


def rules_of(name: str) -> list[str]:
    """What a field has to do with others, in words."""
    rules = [f"one of {listed(CHOICES[name])}"] if name in CHOICES else []
    others = [rule.other if rule.one == name else rule.one for rule in EXCLUSIONS if name in (rule.one, rule.other)]
    rules += [f"not with `{other}`" for other in others]
    for need in NEEDS:
        if need.field == name:
            rules.append(f"{'needs' if need.refused else 'idle without'} {listed(need.on)}")
    rules += [f"sets `{target}`" for source, target in IMPLICATIONS if source == name]
    rules += [f"set by `{source}`" for source, target in IMPLICATIONS if target == name]
    return rules


def row(field: dataclasses.Field[Any], meaning: str) -> str:
    """The line of one field."""
    flag = f"`{flag_of(field.name)}`"
    if field.type is bool:
        flag = flag.replace("--", "--[no-]")
    meaning = meaning.replace("``", "`").replace("|", "\\|")
    return f"| `{field.name}` | `{shown(field.default)}` | {flag} | {meaning} | {'; '.join(rules_of(field.name))} |"


def shown(value: object) -> str:
    """A default as Python code, a dtype by name."""
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def listed(names: tuple[Any, ...]) -> str:
    """Names, as code."""
    return ", ".join(f"`{name}`" for name in names)


def render() -> str:
    """The whole document."""
    meanings = field_meanings()
    rows = [row(field, meanings[field.name]) for field in dataclasses.fields(DistributedDataParallelConfig)]
    head = INTRODUCTION.replace("@DIFFERENCES@", "\n".join(different_defaults()))
    dtypes = f"Dtype flags take {listed(tuple(DTYPE_CHOICES))}; `fp64` is not one of Megatron-LM's."
    return "\n".join([head, dtypes, "", "## Fields", "", TABLE_HEAD, *rows]) + "\n"
