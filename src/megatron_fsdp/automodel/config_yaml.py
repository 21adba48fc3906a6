"""A strategy from YAML: one flat section with its name, the sizes and the fields of its config.

    distributed:
      strategy: fsdp2
      tp_size: 2
      sequence_parallel: true
      mp_policy:
        _target_: torch.distributed.fsdp.MixedPrecisionPolicy
        param_dtype: bfloat16
        reduce_dtype: float32

Only the objects in a table here are built; no other `_target_` is imported.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from megatron_fsdp.automodel.config import (
    SIZE_NAMES,
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    ParallelismSizes,
    check_config,
)
from megatron_fsdp.automodel.pipeline_parallel import PipelineConfig
from megatron_fsdp.config.precision import dtype_from_name
from megatron_fsdp.config.yaml_mapping import read_mapping
from megatron_fsdp.errors import ConfigurationError, warn_caller

SECTION = "distributed"

STRATEGIES: Mapping[str, type[Any]] = {"fsdp2": FSDP2Config, "megatron_fsdp": MegatronFSDPConfig, "ddp": DDPConfig}
_OTHER_NAMES = {"megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"}

_CONFIG_MODULES = (
    "megatron_fsdp.automodel",
    "megatron_fsdp.automodel.config",
    "nemo_automodel.components.distributed.config",
)
_OBJECTS: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {
    "mp_policy": (
        MixedPrecisionPolicy,
        ("torch.distributed.fsdp.MixedPrecisionPolicy", "torch.distributed._composable.fsdp.MixedPrecisionPolicy"),
    ),
    "offload_policy": (
        CPUOffloadPolicy,
        ("torch.distributed.fsdp.CPUOffloadPolicy", "torch.distributed._composable.fsdp.CPUOffloadPolicy"),
    ),
    "pipeline": (
        PipelineConfig,
        (
            "megatron_fsdp.automodel.PipelineConfig",
            "megatron_fsdp.automodel.pipeline_parallel.PipelineConfig",
            "nemo_automodel.components.distributed.pipelining.config.PipelineConfig",
        ),
    ),
}
"""Field -> the class built from its mapping, and the allowed `_target_`s."""

_IGNORED = ("_recursive_", "_convert_")
"""Words to other loaders, without meaning here."""


@dataclass(frozen=True)
class DistributedSetup:
    """A strategy and sizes from a section of YAML: `from_pretrained(path, distributed_setup=setup)`.

    Attributes:
        config: The strategy.
        sizes: Those that are given, by the names of `from_pretrained`'s arguments.
        pipeline_config: How microbatches pass through stages; None: not said.
    """

    config: DistributedConfig
    sizes: Mapping[str, int] = field(default_factory=dict)
    pipeline_config: PipelineConfig | None = None

    @classmethod
    def build(
        cls,
        strategy: DistributedConfig | str = "fsdp2",
        sizes: ParallelismSizes | None = None,
        pipeline_config: PipelineConfig | None = None,
        **size_arguments: int | None,
    ) -> DistributedSetup:
        """Build a setup in code.

        Args:
            strategy: A config, or its name in YAML.
            sizes: In one object; or one by one, as `size_arguments`.
            pipeline_config: How microbatches pass through stages.
            size_arguments: `dp_size`, `dp_replicate_size`, `tp_size`, `pp_size`, `cp_size` and `ep_size`.

        Raises:
            ConfigurationError: The strategy has no such name, or sizes are given in both ways.
            TypeError: There is no such size.
        """
        if sizes is not None and size_arguments:
            raise ConfigurationError(f"sizes and {', '.join(size_arguments)} are both given; keep one")
        config = _strategy(strategy, None)() if isinstance(strategy, str) else check_config(strategy)
        chosen = vars(sizes or ParallelismSizes(**size_arguments))
        return cls(config, {name: size for name, size in chosen.items() if size is not None}, pipeline_config)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `from_pretrained(path, **setup.arguments())` and `from_config`."""
        found: dict[str, Any] = {"distributed_config": self.config, **self.sizes}
        if self.pipeline_config is not None:
            found["pipeline_config"] = self.pipeline_config
        return found


def load_distributed_config(source: str | os.PathLike[str]) -> DistributedSetup:
    """Read a strategy from YAML.

    Args:
        source: Text, or a path object. A mapping with `distributed:` in it, or that section alone.

    Raises:
        ConfigurationError: It is no YAML mapping, or see `parse_distributed_section`.
    """
    values, where, _ = read_mapping(source)
    section = values.get(SECTION, values)
    if not isinstance(section, Mapping):
        raise ConfigurationError(f"{where}{SECTION} is a {type(section).__name__}; write a mapping of fields to values")
    try:
        return parse_distributed_section(section)
    except ConfigurationError as error:
        raise type(error)(f"{where}{error}") from None


def parse_distributed_section(section: Mapping[str, Any]) -> DistributedSetup:
    """Build a strategy from a mapping; the mapping is not changed.

    Args:
        section: `strategy` (default "fsdp2"), sizes, `pipeline`, and fields of the config. A size of None is not
            given. A `_target_` that names one of the configs may replace `strategy`.

    Raises:
        ConfigurationError: A strategy, field, target or dtype is unknown, or a value does not fit.
    """
    if not isinstance(section, Mapping):
        raise ConfigurationError(
            f"the section is a {type(section).__name__}; give a mapping of fields to values (load_distributed_config "
            "reads text and files)"
        )
    values = {name: _plain(value) for name, value in section.items() if name not in _IGNORED}
    kind = _strategy(values.pop("strategy", None), values.pop("_target_", None))
    sizes = {name: size for name in SIZE_NAMES if (size := values.pop(name, None)) is not None}
    pipeline, experts = values.pop("pipeline", None), values.pop("moe", None)
    if pipeline is not None and sizes.get("pp_size", 1) == 1:
        warn_caller("the section pipeline is ignored, since pp_size is 1")
        pipeline = None
    if pipeline is not None and not isinstance(pipeline, Mapping):
        raise ConfigurationError(f"pipeline={pipeline!r}; write a mapping of fields to values")
    if experts and sizes.get("ep_size", 1) == 1:
        warn_caller("the section moe is ignored, since ep_size is 1")
    elif experts:
        has = ", ".join(map(str, experts)) if isinstance(experts, Mapping) else repr(experts)
        raise ConfigurationError(f"moe has {has}, and there are no options of experts; leave the section out")
    return DistributedSetup(_built(kind, values), sizes, None if pipeline is None else _object("pipeline", pipeline))


def _plain(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


def _strategy(name: Any, target: Any) -> type[Any]:
    if target is not None:
        targets = {f"{module}.{kind.__name__}": kind for module in _CONFIG_MODULES for kind in STRATEGIES.values()}
        if not isinstance(target, str) or target not in targets:
            raise ConfigurationError(
                f"_target_={target!r} is not built from YAML; allowed are {', '.join(list(targets)[:3])}, or write "
                "strategy: fsdp2"
            )
        if name is not None:
            raise ConfigurationError(f"strategy={name!r} and _target_={target!r} are both given; keep one")
        return targets[target]
    short = str(name if name is not None else "fsdp2").strip().lower()
    short = _OTHER_NAMES.get(short, short)
    if short not in STRATEGIES:
        raise ConfigurationError(f"Unknown strategy {name!r}; write {', '.join(STRATEGIES)}")
    return STRATEGIES[short]


def _object(name: str, values: Mapping[str, Any]) -> Any:
    """Build the object that a mapping describes, for a field that takes an object."""
    kind, targets = _OBJECTS[name]
    target = values.get("_target_", kind)
    if target is not kind and target not in targets:
        raise ConfigurationError(
            f"{name} has _target_={target!r}; the only one allowed is {targets[0]}, and it may be left out"
        )
    return _built(kind, {key: _plain(value) for key, value in values.items() if key not in (*_IGNORED, "_target_")})


def _built(kind: type[Any], values: Mapping[str, Any]) -> Any:
    _check_names(kind, values)
    return kind(**{name: _value(kind, name, value) for name, value in values.items()})


def _value(kind: type[Any], name: str, value: Any) -> Any:
    if value is None:
        return getattr(kind, name, None)  # where a dataclass keeps the default
    if name in _OBJECTS and isinstance(value, Mapping):
        return _object(name, value)
    if name.endswith("_dtype"):
        return value if isinstance(value, torch.dtype) else dtype_from_name(str(value).strip().lower(), name)
    if kind in (MixedPrecisionPolicy, CPUOffloadPolicy) and not isinstance(value, bool):
        # torch does not look, and a string such as "false" would count as true
        raise ConfigurationError(f"{kind.__name__}.{name}={value!r}; give true or false")
    return value


def _check_names(kind: type[Any], values: Mapping[str, Any]) -> None:
    known = _names(kind)
    unknown = sorted(set(values) - set(known), key=str)
    if not unknown:
        return
    hints = []
    for name in unknown:
        others = [other.__name__ for other in STRATEGIES.values() if other is not kind and name in _names(other)]
        nearest = difflib.get_close_matches(str(name), [*known, *SIZE_NAMES], n=1)
        if others:
            hints.append(f"{name} is a field of {' and '.join(others)}")
        elif nearest:
            hints.append(f"did you mean {nearest[0]} by {name}?")
    hint = f" ({'; '.join(hints)})" if hints else ""
    raise ConfigurationError(f"Unknown options for {kind.__name__}: {unknown}{hint}; it has {', '.join(known)}")


def _names(kind: type[Any]) -> list[str]:
    return list(inspect.signature(kind).parameters)
