"""The values that fields of a data-parallel configuration may have, alone and together: tables, and their checks.

A field is checked by its declared type, so no field can be without a check. The combinations that are refused are
data, from which the documentation is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megatron_fsdp.config.precision import DTYPE_NAMES, GRADIENT_FORMAT_NAMES, check_main_dtype, weight_formats_of
from megatron_fsdp.config.strategy import ShardingStrategy, resolve_strategy
from megatron_fsdp.errors import ConfigurationError

MOST = 2**63 - 1
"""The largest whole number that a field takes: sizes are counted in 64 bits. Python cannot print all larger ones."""

FOLLOW = "auto"
"""How a dtype of None is written in flags and files."""


class Exclusion(NamedTuple):
    """Two fields of which at most one may be set, and what both do; that follows "both" in the error."""

    one: str
    other: str
    reason: str


class Need(NamedTuple):
    """A switch that means nothing unless other switches are on.

    The published class takes those that are not refused in silence, so only a front end refuses them
    (`DistributedDataParallelConfig.idle_settings`).
    """

    field: str
    on: tuple[str, ...]
    refused: bool


EXCLUSIONS = (
    Exclusion(
        "param_name_patterns_for_fp32_local_accumulation",
        "grad_reduce_in_fp32",
        "choose which gradients accumulate in float32",
    ),
    Exclusion("num_buckets", "bucket_size", "cut gradients into buckets"),
    Exclusion("fp8_param_gather", "fp4_param_gather", "choose the format in which parameters are kept and travel"),
    Exclusion("megatron_fsdp_weight_format", "fp8_param_gather", "choose the format in which parameters travel"),
    Exclusion("megatron_fsdp_weight_format", "fp4_param_gather", "choose the format in which parameters travel"),
    Exclusion("delay_wgrad_compute", "gradient_accumulation_fusion", "choose when linears compute weight gradients"),
)

NEEDS = (
    Need("reuse_grad_buf_for_mxfp8_param_ag", ("fp8_param_gather",), refused=True),
    Need("keep_fp8_transpose_cache", ("fp8_param_gather",), refused=False),
    Need("disable_symmetric_registration", ("nccl_ub",), refused=False),
    Need("fsdp_manual_registration", ("nccl_ub", "use_megatron_fsdp"), refused=False),
    Need("fsdp_db_use_persist_buf_on_alloc_fail", ("fsdp_double_buffer",), refused=False),
)

IMPLICATIONS = (
    ("nccl_ub", "fsdp_double_buffer"),
    ("megatron_fsdp_max_pool_double_buffer", "fsdp_double_buffer"),
    ("use_custom_fsdp", "use_megatron_fsdp"),
)
"""Switches that turn another one on."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "megatron_fsdp_version": (1, 2),
    "data_parallel_sharding_strategy": tuple(strategy.name for strategy in ShardingStrategy),
    "megatron_fsdp_outer_grad_comm_format": GRADIENT_FORMAT_NAMES,
    "outer_dp_sharding_strategy": (ShardingStrategy.no_shard.name, ShardingStrategy.optim.name),
}
"""The only values of a field, as it stores them."""


def checked_values(given: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of all fields and bring them into the form in which they are stored."""
    values: dict[str, Any] = {}
    wrong = []
    for name, value in given.items():
        try:
            if isinstance(value, int) and abs(value) > MOST:
                raise ConfigurationError(f"{name} is a whole number beyond 2**63 - 1 in size; give a smaller one.")
            values[name] = _CHECKS[types[name]](name, value)
        except ConfigurationError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    for rule in EXCLUSIONS:
        if _is_set(values[rule.one]) and _is_set(values[rule.other]):
            raise ConfigurationError(
                f"{rule.one}={values[rule.one]!r} and {rule.other}={values[rule.other]!r} both {rule.reason}; "
                "give only one of them."
            )
    for need in NEEDS:
        missing = missing_of(need, values)
        if need.refused and missing:
            raise ConfigurationError(f"{need.field}=True needs {missing}; set both or neither.")
    return values


def missing_of(need: Need, values: Mapping[str, Any]) -> str:
    """Say what a switch that is on lacks; empty where nothing is."""
    if not values[need.field]:
        return ""
    return " and ".join(f"{name}=True" for name in need.on if not values[name])


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} is not a bool; give True or False.")
    return value


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name}={value!r} is not a positive whole number; give 1 or more.")
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigurationError(
            f"{name}={value!r} does not exist; give {' or '.join(str(choice) for choice in CHOICES[name])}."
        )
    return value


def _strategy(name: str, value: Any) -> str:
    strategy = resolve_strategy(value, name)
    if strategy.name not in CHOICES[name]:
        allowed = ", or ".join(f'{int(ShardingStrategy[choice])} or "{choice}"' for choice in CHOICES[name])
        raise ConfigurationError(f"{name}={strategy.name!r} is not possible on the outer axis; give {allowed}.")
    return strategy.name


def _dtype(name: str, value: object) -> torch.dtype | None:
    if isinstance(value, str):
        given, value = value, DTYPE_NAMES.get(value.removeprefix("torch."))
        if value is None and given != FOLLOW:
            known = ", ".join(DTYPE_NAMES)
            raise ConfigurationError(
                f"{name}={given!r} is not a dtype name; give one of {known}, or {FOLLOW!r} or None to follow."
            )
    try:
        check_main_dtype(value, name)
    except TypeError as error:
        raise ConfigurationError(str(error)) from None
    assert value is None or isinstance(value, torch.dtype)
    return value


def _patterns(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigurationError(f"{name}={value!r} is not a tuple of strings; write a tuple such as ('*norm*',).")
    for index, pattern in enumerate(value):
        if not isinstance(pattern, str):
            raise ConfigurationError(f"{name}[{index}]={pattern!r} is not a string; give a pattern such as '*norm*'.")
    if name == "megatron_fsdp_weight_format":
        weight_formats_of(value)
    return tuple(value)


def _choice_or_none(name: str, value: object) -> object:
    if value is not None and value not in CHOICES[name]:
        raise ConfigurationError(f"{name}={value!r} does not exist; give one of {', '.join(CHOICES[name])}, or None.")
    return value


_CHECKS: Mapping[Any, Callable[[str, Any], object]] = {
    bool: _switch,
    int: _count,
    int | None: lambda name, value: None if value is None else _count(name, value),
    str: _strategy,
    str | None: _choice_or_none,
    tuple[str, ...]: _patterns,
    torch.dtype | None: _dtype,
}
"""Declared type of a field -> what checks its value and gives the form that is stored."""
