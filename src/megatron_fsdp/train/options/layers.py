"""Puts options together from layers: defaults, a preset, a configuration file and flags; later ones win."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config_flags import MEGATRON_DEFAULTS, destination_of, off_flag_of
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.checks import ALTERNATIVES, NEEDS, SHAPE, is_met
from megatron_fsdp.train.options.fields import options_of
from megatron_fsdp.train.options.megatron_flags import ALIASES, EXPLAINED, FIXED, REFUSED, Spelling
from megatron_fsdp.train.options.options import DDP_FIELDS, OPTIONS, SECTIONS, Options, flag_for, in_flags


@dataclass(frozen=True)
class Layer:
    """Values from one origin.

    Attributes:
        origin: Such as `command line`.
        values: By the name of the option, with dashes or underscores; fields of `DistributedDataParallelConfig` by the
            name of the field or of its flag.
        gives_way: Whether values that fit no value of a later layer are dropped, as those of a preset are.
        place: What messages about its values begin with, such as the name of a file and a colon.
        places: The same of single values, with the line, by key.
        problems: What is wrong besides, in words.
    """

    origin: str
    values: Mapping[str, Any]
    gives_way: bool = False
    place: str = ""
    places: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def at(self, key: str) -> str:
        """Return how a message about the value of a key begins."""
        return self.places.get(key, self.place)


def assemble(layers: tuple[Layer, ...], problems: Iterable[str] = ()) -> Options:
    """Combine layers into options; later layers win.

    Args:
        layers: The first one counts least.
        problems: What was found wrong before.

    Raises:
        ConfigurationError: A name is no option, a value cannot be its value, or there were problems; with all of them.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notices: list[str] = []
    places: dict[str, str] = {}
    wrong = list(problems)
    for layer in reversed(layers):
        wrong += layer.problems
        read = _read(layer, notices, wrong, places)
        for name in list(_giving_way(read, values)) if layer.gives_way else ():
            del read[name]
        values = {**read, **values}
        origins = {**dict.fromkeys(read, layer.origin), **origins}
    try:
        ddp = _ddp_config(values, notices)
    except ConfigurationError as error:
        by_flag = {flag_for(name): place for name, place in places.items()}
        wrong += [by_flag.get(line.split(" ")[0], "") + line for line in str(error).splitlines()]
    if wrong:
        raise ConfigurationError("\nerror: ".join(wrong))
    sections = {
        attribute: cls(**{option.name: values[option.name] for option in options_of(cls) if option.name in values})
        for attribute, cls in SECTIONS.items()
    }
    return Options(**sections, ddp=ddp, origins=origins, explained=tuple(notices))


def _spellings() -> dict[str, Spelling]:
    found = {flag: Spelling(option.name, False) for option in OPTIONS.values() for flag in option.off_flags}
    for name, each in DistributedDataParallelConfig.__dataclass_fields__.items():
        if each.type in (bool, "bool"):
            found[off_flag_of(name)] = Spelling(destination_of(name), False)
    return {**ALIASES, **found}


SPELLINGS: Mapping[str, Spelling] = _spellings()
"""Flags that set an option and are not named like it: switches turned off, and Megatron-LM's own spellings."""


def _read(layer: Layer, notices: list[str], problems: list[str], places: dict[str, str]) -> dict[str, Any]:
    """Return the values of a layer by the names of options, parsed; record places not known before."""
    found: dict[str, Any] = {}
    for key, value in layer.values.items():
        try:
            said = _said(key, value, notices)
            if said is None:
                continue
            name, value = said
            if name in found:
                raise ConfigurationError(f"{flag_for(name)} is given twice ({key!r}): give it once")
            places.setdefault(name, layer.at(key))
            found[name] = OPTIONS[name].read(value) if name in OPTIONS else value  # the engine's read their own
        except ConfigurationError as error:
            problems.append(f"{layer.at(key)}{error}")
    return found


def _said(key: str, value: Any, notices: list[str]) -> tuple[str, Any] | None:
    """Return the option and value that a key of a layer stands for; None if it sets none."""
    flag = f"--{key}" if f"--{key}" in EXPLAINED else "--" + key.replace("_", "-")
    if flag in FIXED:
        if not FIXED[flag].allows(str(value)):
            allowed = " or ".join(FIXED[flag].values)
            raise ConfigurationError(f"invalid {flag} {value}: {FIXED[flag].reason}; give {allowed}, or leave it out")
        notices.append(f"{flag} {value} has no effect: {FIXED[flag].reason}")
        return None
    if flag in EXPLAINED:
        if value is not False:
            notices.append(f"{flag} has no effect: {EXPLAINED[flag]}")
        return None
    spelling = SPELLINGS.get(flag)
    if spelling is None:
        return _canonical_name(key), value
    if spelling.value is None:
        return spelling.name, value
    if not isinstance(value, bool):
        raise ConfigurationError(f"invalid {flag[2:]}: {value!r}: give true or false")
    return (spelling.name, spelling.value) if value else None


def _canonical_name(key: str) -> str:
    """Return the name of an option that was written with dashes or underscores; else name the nearest, or a reason."""
    name = key.replace("-", "_")
    if name in OPTIONS or name in DDP_FIELDS:
        return name
    if name in DDP_FIELDS.values():
        return destination_of(name)
    flag = "--" + name.replace("_", "-")
    if flag in REFUSED:
        raise ConfigurationError(f"{key!r} is not supported: {REFUSED[flag]}")
    near = difflib.get_close_matches(name, [*OPTIONS, *DDP_FIELDS], 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigurationError(f"{key!r} is no option{hint}")


def _giving_way(preset: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a preset that would contradict what the user gave, or do nothing beside it."""
    both = {**preset, **given}
    has_configuration = bool(given.get("hf_config") or given.get("hf_model"))
    is_unsharded = given.get("use_megatron_fsdp") is False or bool(given.get("use_torch_fsdp2"))
    for name in preset.keys() - given.keys():
        rivals = {second if name == first else first for first, second, _ in ALTERNATIVES if name in (first, second)}
        needed = [needed for names, needed in NEEDS.items() if name in names.split()]
        reasons = (
            any(given.get(rival) is not None and given[rival] is not False for rival in rivals),
            not all(is_met(each, lambda other: both.get(other, OPTIONS[other].default)) for each in needed),
            has_configuration and name in SHAPE,
            is_unsharded and name in ("use_megatron_fsdp", "data_parallel_sharding_strategy"),
            name == "auto_bf16" and "bf16" in given,  # --no-bf16 asks for float32
            name == "min_lr" and "lr" in given and given["lr"] < preset["min_lr"],
        )
        if any(reasons):
            yield name


def _ddp_config(values: Mapping[str, Any], notices: list[str]) -> DistributedDataParallelConfig:
    """Build the configuration of the engine.

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
