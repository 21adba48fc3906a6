"""All options of a run in one object, put together from defaults, a preset, a configuration file and flags. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config_flags import MEGATRON_DEFAULTS, destination_of, flag_of, off_flag_of
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.checkpoint import CheckpointOptions
from megatron_fsdp.train.options.data import DataOptions
from megatron_fsdp.train.options.fields import Option, converter_of, options_of
from megatron_fsdp.train.options.giving_way import giving_way
from megatron_fsdp.train.options.known_flags import EXPLAINED, FIXED
from megatron_fsdp.train.options.model import ModelOptions
from megatron_fsdp.train.options.parallelism import ParallelOptions
from megatron_fsdp.train.options.recovery import RecoveryOptions
from megatron_fsdp.train.options.refused_flags import REFUSED
from megatron_fsdp.train.options.reporting import ReportingOptions
from megatron_fsdp.train.options.spellings import Spelling, spellings
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

SPELLINGS: Mapping[str, Spelling] = spellings(OPTIONS)
"""Flags that set an option and are not named like it."""


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

    def is_chosen(self, name: str) -> bool:
        """Whether the user said an option, in place of a preset."""
        return not self.origins.get(name, "preset").startswith("preset")

    def sections(self) -> tuple[object, ...]:
        """The sections but for `ddp`."""
        return tuple(getattr(self, attribute) for attribute in SECTIONS)


@dataclass(frozen=True)
class Layer:
    """Values from one origin.

    Attributes:
        origin: Such as `command line`.
        values: By the name of the option, with dashes or underscores; fields of `DistributedDataParallelConfig` by the
            name of the field or of its flag.
        gives_way: Whether values that fit no value of a later layer are dropped, as those of a preset are.
        places: File and line of each value, where it has one.
        problems: What is wrong besides, in words.
    """

    origin: str
    values: Mapping[str, Any]
    gives_way: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def at(self, key: str) -> str:
        """What a message about a value begins with."""
        return f"{self.places[key]}: " if key in self.places else ""


def assemble(layers: tuple[Layer, ...], explained: tuple[str, ...] = (), problems: Iterable[str] = ()) -> Options:
    """Put options together; later layers win.

    Args:
        layers: The first one counts least.
        explained: Flags without an effect, with the reason.
        problems: What was found wrong before.

    Raises:
        ConfigurationError: A name is no option, a value cannot be its value, or there were problems; with all of them.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notices, wrong = list(explained), list(problems)
    for layer in reversed(layers):
        wrong += layer.problems
        read = _read(layer, notices, wrong)
        for name in giving_way(read, values) if layer.gives_way else ():
            del read[name]
        values = {**read, **values}
        origins = {**dict.fromkeys(read, layer.origin), **origins}
    try:
        ddp = _ddp_config(values, notices)
    except ConfigurationError as error:
        wrong += [_placed(line, layers) for line in str(error).splitlines()]
    if wrong:
        raise ConfigurationError("\nerror: ".join(wrong))
    sections = {
        attribute: cls(**{option.name: values[option.name] for option in options_of(cls) if option.name in values})
        for attribute, cls in SECTIONS.items()
    }
    return Options(**sections, ddp=ddp, origins=origins, explained=tuple(notices))


def _read(layer: Layer, notices: list[str], problems: list[str]) -> dict[str, Any]:
    """The values of a layer by the names of options, in the types of these."""
    found: dict[str, Any] = {}
    for key, value in layer.values.items():
        try:
            said = _said(key, value, notices)
            if said is None:
                continue
            name, value = said
            if name in found:
                raise ConfigurationError(f"{flag_for(name)} is given twice ({key!r}): give it once")
            found[name] = converter_of(OPTIONS[name])(value) if _is_single(name) else _many(name, value)
        except ConfigurationError as error:
            problems.append(f"{layer.at(key)}{error}")
    return found


def _placed(message: str, layers: Iterable[Layer]) -> str:
    """A message about a flag, after the place in a file that sets it, where one does."""
    words = message.split()
    for layer in layers:
        for key in layer.places:
            name = DDP_FIELDS.get(key, key)
            if name in DDP_FIELDS.values() and flag_of(name) in words:
                return f"{layer.at(key)}{message}"
    return message


def _said(key: str, value: Any, notices: list[str]) -> tuple[str, Any] | None:
    """The option and its value that a key of a layer stands for; None where it sets none."""
    flag = "--" + key.removeprefix("--").replace("_", "-")
    if flag in FIXED:
        notices.append(fixed_notice(flag, str(value)))
        return None
    if flag in EXPLAINED:
        if value is not False:
            notices.append(f"{flag} has no effect: {EXPLAINED[flag].reason}")
        return None
    if flag not in SPELLINGS:
        return canonical_name(key), value
    spelling = SPELLINGS[flag]
    if spelling.value is None:
        return spelling.name, value
    if not isinstance(value, bool):
        raise ConfigurationError(f"invalid {flag[2:]}: {value!r}: give true or false")
    return (spelling.name, spelling.value) if value else None


def fixed_notice(flag: str, value: str) -> str:
    """What to tell of a flag of Megatron-LM that may only have one value.

    Raises:
        ConfigurationError: It has another one.
    """
    fixed = FIXED[flag]
    if not fixed.allows(value):
        raise ConfigurationError(
            f"invalid {flag} {value}: {fixed.reason}; give {' or '.join(fixed.values)}, or leave it out"
        )
    return f"{flag} {value} has no effect: {fixed.reason}"


def canonical_name(key: str) -> str:
    """The name of an option that was written with dashes or underscores.

    Raises:
        ConfigurationError: There is none; names the nearest, or the reason.
    """
    name = key.removeprefix("--").replace("-", "_")
    if name in OPTIONS or name in DDP_FIELDS:
        return name
    for destination, field_name in DDP_FIELDS.items():
        if name == field_name:
            return destination
    flag = "--" + name.replace("_", "-")
    if flag in REFUSED:
        raise ConfigurationError(f"{key!r} is not supported: {REFUSED[flag]}")
    near = difflib.get_close_matches(name, [*OPTIONS, *DDP_FIELDS], 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigurationError(f"{key!r} is no option{hint}")


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


def _ddp_config(values: Mapping[str, Any], notices: list[str]) -> DistributedDataParallelConfig:
    """The configuration that was asked for.

    The strategy without a flag is that of Megatron-LM's command line: everything is sharded. The other two defaults
    that differ there from the class (`MEGATRON_DEFAULTS`) are the class's here: a NaN is skipped and counted by the
    trainer, and gathers align only where pipelines are interleaved.
    """
    given = {DDP_FIELDS[name]: value for name, value in values.items() if name in DDP_FIELDS}
    if given.pop("use_custom_fsdp", False):
        notices.append("--use-custom-fsdp: the former name of --use-megatron-fsdp, and taken as such")
        given["use_megatron_fsdp"] = True
    if given.get("use_megatron_fsdp"):
        given.setdefault("data_parallel_sharding_strategy", MEGATRON_DEFAULTS["data_parallel_sharding_strategy"])
    try:
        return DistributedDataParallelConfig(**given)
    except ConfigurationError as error:
        raise ConfigurationError(in_flags(str(error))) from None


def in_flags(message: str) -> str:
    """A message about fields of `DistributedDataParallelConfig` in the words of the command line.

    `nccl_ub=True` becomes `--use-nccl-ub`, `overlap_grad_reduce=False` `--no-overlap-grad-reduce`, and so on.
    """
    names = "|".join(sorted(DDP_FIELDS.values(), key=len, reverse=True))
    value = r"""(?:=(True|False|None|'[^']*'|"[^"]*"|-?[\w.]*\w))?"""
    return re.sub(rf"\b({names})\b{value}", _in_flags, message)


def _in_flags(found: re.Match[str]) -> str:
    name, value = found.groups()
    if value == "False":
        return off_flag_of(name)
    if value in (None, "True", "None"):
        return flag_of(name)
    return f"{flag_of(name)} {value.strip(chr(39) + chr(34)).removeprefix('torch.')}"
