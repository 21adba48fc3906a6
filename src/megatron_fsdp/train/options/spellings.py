"""Other ways to write an option: switches turned off, and Megatron-LM's own spellings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config_flags import destination_of, off_flag_of
from megatron_fsdp.train.options.fields import Option


@dataclass(frozen=True)
class Spelling:
    """What a flag that is not the one of an option sets.

    Attributes:
        name: Of the option.
        value: What it is set to; None: the value that follows the flag.
    """

    name: str
    value: Any = None


ALIASES: Mapping[str, Spelling] = {
    "--disable-bias-linear": Spelling("add_bias_linear", False),
    "--use-rotary-position-embeddings": Spelling("position_embedding_type", "rope"),
    "--recompute-activations": Spelling("recompute_granularity", "selective"),
    "--layernorm-epsilon": Spelling("norm_epsilon"),
    "--model-parallel-size": Spelling("tensor_model_parallel_size"),
}
"""Megatron-LM's spellings, those of earlier versions included, that do not follow from the names of the options."""


def spellings(options: Mapping[str, Option]) -> dict[str, Spelling]:
    """Every flag that sets an option and is not named like it.

    Args:
        options: Those of the sections, by name.
    """
    found = {flag: Spelling(option.name, False) for option in options.values() for flag in option.off_flags}
    for name, field in DistributedDataParallelConfig.__dataclass_fields__.items():
        if field.type in (bool, "bool"):
            found[off_flag_of(name)] = Spelling(destination_of(name), False)
    return {**found, **{flag: alias for flag, alias in ALIASES.items() if flag not in found}}
