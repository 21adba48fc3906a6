"""Data-parallel configurations for property tests: every field drawn, then what cannot stand together put right."""

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st

from megatron_fsdp.config.ddp_config_checks import CHOICES, EXCLUSIONS, NEEDS
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig

_COUNTS = st.integers(min_value=1, max_value=2**63 - 1)
_PATTERNS = st.one_of(
    st.sampled_from(["*norm*", "all", "-x", "--nccl-ub", "", "null", "a b", "@f", "[!a]=?"]), st.text()
)

_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: _COUNTS,
    int | None: st.none() | _COUNTS,
    tuple[str, ...]: st.lists(_PATTERNS, max_size=4).map(tuple),
    torch.dtype | None: st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32, torch.float64]),
}


def _values_of(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    if field.name == "use_custom_fsdp":
        return st.just(False)  # the other value is another field's, with a warning
    return st.sampled_from(CHOICES[field.name]) if field.name in CHOICES else _BY_TYPE[field.type]


def _consistent(values: dict[str, Any]) -> DistributedDataParallelConfig:
    defaults = vars(DistributedDataParallelConfig())
    for rule in EXCLUSIONS:
        if values[rule.one] != defaults[rule.one] and values[rule.other] != defaults[rule.other]:
            values[rule.other] = defaults[rule.other]
    for need in NEEDS:
        if need.refused and not all(values[name] for name in need.on):
            values[need.field] = False
    return DistributedDataParallelConfig(**values)


def valid_configs() -> st.SearchStrategy[DistributedDataParallelConfig]:
    """Configurations that construction accepts."""
    fields = dataclasses.fields(DistributedDataParallelConfig)
    return st.fixed_dictionaries({field.name: _values_of(field) for field in fields}).map(_consistent)
