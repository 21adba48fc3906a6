"""All options of a run in one object, put together from defaults, a preset, a configuration file and flags. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp.ddp_config_flags import MEGATRON_DEFAULTS, destination_of, flag_of
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.checkpoint import CheckpointOptions
from megatron_fsdp.train.options.data import DataOptions
from megatron_fsdp.train.options.fields import Option, converter_of, options_of
from megatron_fsdp.train.options.model import ModelOptions
from megatron_fsdp.train.options.parallelism import ParallelOptions
from megatron_fsdp.train.options.recovery import RecoveryOptions
from megatron_fsdp.train.options.reporting import ReportingOptions
from megatron_fsdp.train.options.training import OptimizerOptions, TrainingOptions

SECTIONS: Mapping[str, type] = {
    "model": ModelOptions,
    "parallel": ParallelOptions,
    "training": TrainingOptions,
    "optimizer": OptimizerOptions,
    "data": DataOptions,
    "checkpoint": CheckpointOptions,
    "reporting": ReportingOptions,
    "recovery": RecoveryOptions,
}
"""The attributes of `Options` with their classes, but for `ddp`."""

OPTIONS: Mapping[str, Option] = {option.name: option for cls in SECTIONS.values() for option in options_of(cls)}
"""Every option of the sections, by its name."""

DDP_FIELDS: Mapping[str, str] = {
    destination_of(name): name for name in DistributedDataParallelConfig.__dataclass_fields__
}
"""From the key of an option to the field of `DistributedDataParallelConfig` that it sets."""


@dataclass(frozen=True)
class Options:
    """What a user said, section by section, with defaults where nothing was said.

    Attributes:
        model: What is trained.
        parallel: Ranks and engines.
        training: Batches, precision, when to end.
        optimizer: Optimizer and learning rate.
        data: Text and tokens.
        checkpoint: Saving and going on.
        reporting: What is shown and written.
        recovery: What may go wrong.
        ddp: How to shard and to reduce.
        origins: For every option that was said, by its name: `command line`, `config FILE` or `preset NAME`.
        explained: Flags that were given and have no effect, with the reason.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    data: DataOptions = field(default_factory=DataOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    reporting: ReportingOptions = field(default_factory=ReportingOptions)
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    origins: Mapping[str, str] = field(default_factory=dict)
    explained: tuple[str, ...] = ()

    def is_given(self, name: str) -> bool:
        """Whether an option was said, in whatever way."""
        return name in self.origins


@dataclass(frozen=True)
class Layer:
    """Values from one origin.

    Attributes:
        origin: Such as `command line`.
        values: By the name of the option; of fields of `DistributedDataParallelConfig`, by `DDP_FIELDS`.
    """

    origin: str
    values: Mapping[str, Any]


def assemble(layers: tuple[Layer, ...], explained: tuple[str, ...] = ()) -> Options:
    """Put options together; later layers win.

    Raises:
        ConfigurationError: A name is no option, or a value cannot be its value.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for key, value in layer.values.items():
            name = canonical_name(key, layer.origin)
            values[name] = converter_of(OPTIONS[name])(value) if _is_single(name) else _many(name, value)
            origins[name] = layer.origin
    sections = {
        attribute: cls(**{option.name: values[option.name] for option in options_of(cls) if option.name in values})
        for attribute, cls in SECTIONS.items()
    }
    return Options(**sections, ddp=_ddp_config(values), origins=origins, explained=explained)


def canonical_name(key: str, origin: str) -> str:
    """The name of an option that was written with dashes or underscores.

    Raises:
        ConfigurationError: There is none; names the nearest.
    """
    name = key.removeprefix("--").replace("-", "_")
    if name in OPTIONS or name in DDP_FIELDS:
        return name
    for destination, field_name in DDP_FIELDS.items():
        if name == field_name:
            return destination
    near = difflib.get_close_matches(name, [*OPTIONS, *DDP_FIELDS], 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigurationError(f"{key!r} in the {origin} is no option{hint}")


def flag_for(name: str) -> str:
    """The flag of an option."""
    return OPTIONS[name].flag if name in OPTIONS else flag_of(DDP_FIELDS[name])


def _is_single(name: str) -> bool:
    return name in OPTIONS and not OPTIONS[name].is_many


def _many(name: str, value: Any) -> Any:
    if name in DDP_FIELDS:
        return value  # the configuration reads its own values
    convert = converter_of(OPTIONS[name])
    return tuple(convert(part) for part in (value if isinstance(value, list | tuple) else [value]))


def _ddp_config(values: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """The configuration that was asked for.

    The strategy without a flag is that of Megatron-LM's command line: everything is sharded. The other two defaults
    that differ there from the class (`MEGATRON_DEFAULTS`) are the class's here: a NaN is skipped and counted by the
    trainer, and gathers align only where pipelines are interleaved.
    """
    given = {DDP_FIELDS[name]: value for name, value in values.items() if name in DDP_FIELDS}
    if given.get("use_megatron_fsdp"):
        given.setdefault("data_parallel_sharding_strategy", MEGATRON_DEFAULTS["data_parallel_sharding_strategy"])
    return DistributedDataParallelConfig(**given)
