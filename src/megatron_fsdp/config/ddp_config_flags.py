"""Command-line flags of the fields of `DistributedDataParallelConfig`, named as Megatron-LM names them.

Every field has one flag; a switch has a second one that turns it off (`--x`, `--no-x`). The namespace that argparse
returns has Megatron-LM's attribute names too. Not giving a flag gives the default of the class, also for the three
fields whose default is another one in Megatron-LM's parser (`MEGATRON_DEFAULTS`). Help comes from the docstring of the
class.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch

from megatron_fsdp.config.ddp_config import CHOICES, FOLLOW, DistributedDataParallelConfig, ShardingStrategy
from megatron_fsdp.config.precision import dtype_from_name
from megatron_fsdp.errors import ConfigurationError

_RENAMED: Mapping[str, str] = {
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "check_for_nan_in_grad": "--check-for-nan-in-loss-and-grad",
    "bucket_size": "--ddp-bucket-size",
    "num_buckets": "--ddp-num-buckets",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "param_name_patterns_for_fp32_local_accumulation": "--ddp-param-name-patterns-for-fp32-local-accumulation",
    "average_in_collective": "--ddp-average-in-collective",
    "nccl_ub": "--use-nccl-ub",
}
"""Flags that are not named like their field."""

MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "align_param_gather": True,
    "check_for_nan_in_grad": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
}
"""Defaults of Megatron-LM's parser that differ from those of the class."""

DTYPE_CHOICES: Mapping[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    FOLLOW: None,
}
"""Flag values of dtypes; float64 is not one of Megatron-LM's."""

_FIELDS = {field.name: field for field in dataclasses.fields(DistributedDataParallelConfig)}


def flag_of(name: str) -> str:
    """Return the flag of a field (of a switch, the one that turns it on)."""
    return _RENAMED.get(name, "--" + _FIELDS[name].name.replace("_", "-"))


def off_flag_of(name: str) -> str:
    """Return the flag that turns a switch off."""
    return "--no-" + flag_of(name).removeprefix("--")


def destination_of(name: str) -> str:
    """Return the name of a field in a parsed namespace."""
    return "nccl_ub" if name == "nccl_ub" else flag_of(name).removeprefix("--").replace("-", "_")


def field_meanings(cls: type = DistributedDataParallelConfig) -> dict[str, str]:
    """Return the description of each field from a dataclass's docstring; empty under `python -OO`."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: " ".join(meaning.split()) for name, meaning in entries if name in names}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all fields, in an argument group.

    Args:
        parser: Has none of them yet.

    Raises:
        argparse.ArgumentError: It has one of them.
    """
    group = parser.add_argument_group("data parallelism", "fields of DistributedDataParallelConfig")
    meanings = field_meanings()
    for name, field in _FIELDS.items():
        action = group.add_argument(flag_of(name), dest=destination_of(name), **_options(field))
        # Set afterwards, since some versions of argparse add the default to the help of switches, and others do not.
        action.help = _help(name, meanings.get(name, "")).replace("%", "%%")


def config_from_flags(namespace: argparse.Namespace) -> DistributedDataParallelConfig:
    """Build the configuration from parsed flags.

    Args:
        namespace: What a parser with these flags returned. Attributes that it lacks take the default of the class.

    Raises:
        ConfigurationError: The values are not possible together.
    """
    parsed = vars(namespace)
    given = {name: parsed[destination_of(name)] for name in _FIELDS if destination_of(name) in parsed}
    try:
        return DistributedDataParallelConfig(**given)
    except ConfigurationError as error:
        raise ConfigurationError(in_flags(str(error))) from None


def in_flags(message: str) -> str:
    """Replace fields of `DistributedDataParallelConfig` in a message by their flags.

    `nccl_ub=True` becomes `--use-nccl-ub`, `overlap_grad_reduce=False` `--no-overlap-grad-reduce`, and so on.
    """
    names = "|".join(sorted(_FIELDS, key=len, reverse=True))
    value = r"""(?:=(True|False|None|'[^']*'|"[^"]*"|-?[\w.]*\w))?"""
    return re.sub(rf"\b({names})\b{value}", _in_flags, message)


def _in_flags(found: re.Match[str]) -> str:
    name, value = found.groups()
    if value == "False":
        return off_flag_of(name)
    if value in (None, "True", "None"):
        return flag_of(name)
    return f"{flag_of(name)} {value.strip(chr(39) + chr(34)).removeprefix('torch.')}"


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a field, by its declared type."""
    default = field.default
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction, "default": default}
    if field.type == tuple[str, ...]:
        return {"action": "extend", "nargs": "+", "metavar": "PATTERN", "default": []}
    if field.type == torch.dtype | None:
        return {"type": _dtype_choice, "choices": list(DTYPE_CHOICES), "default": _dtype_name(default)}
    if field.type in (str, str | None):
        return {"type": _strategy_choice, "choices": list(CHOICES[field.name]), "default": default}
    if field.name in CHOICES:
        return {"type": int, "choices": list(CHOICES[field.name]), "default": default}
    return {"type": _count, "metavar": "N", "default": default}


def _help(name: str, meaning: str) -> str:
    default = f"default: {_shown(_FIELDS[name].default)}"
    if name in MEGATRON_DEFAULTS:
        default += f"; in Megatron-LM: {_shown(MEGATRON_DEFAULTS[name])}"
    return f"{meaning.replace('``', '')} ({default})".strip()


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, torch.dtype):
        return _dtype_name(value)
    return "none" if value in (None, ()) else str(value)


def _dtype_name(dtype: Any) -> str:
    return next(name for name, known in DTYPE_CHOICES.items() if known is dtype)


def _dtype_choice(text: str) -> str:
    """Map a dtype's name to a choice, such as float32 to fp32; argparse refuses other words."""
    try:
        return text if text in DTYPE_CHOICES else _dtype_name(dtype_from_name(text))
    except ConfigurationError:
        return text


def _strategy_choice(text: str) -> str:
    """Map a strategy's number to its name; argparse refuses other words."""
    numbers = {str(int(strategy)): strategy.name for strategy in ShardingStrategy}
    return numbers.get(text, text)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number; give 1 or more")
    return value
