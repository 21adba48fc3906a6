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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from megatron_fsdp.automodel.config import (
    SIZE_NAMES,
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    ParallelismSizes,
)
from megatron_fsdp.automodel.meshes import MeshContext, check_all_ranks, set_up_ranks
from megatron_fsdp.automodel.multimodal import (
    CpVisionFrameShardingConfig,
    MultimodalDistributedConfig,
    MultimodalVisionConfig,
)
from megatron_fsdp.automodel.pipeline_parallel import PipelineConfig
from megatron_fsdp.comm.agreement import agreed
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
    "pipeline_config": (
        PipelineConfig,
        (
            "megatron_fsdp.automodel.PipelineConfig",
            "megatron_fsdp.automodel.pipeline_parallel.PipelineConfig",
            "nemo_automodel.components.distributed.pipelining.config.PipelineConfig",
        ),
    ),
    "moe_parallel_config": (
        MoEParallelizerConfig,
        ("megatron_fsdp.automodel.MoEParallelizerConfig", "nemo_automodel.components.moe.config.MoEParallelizerConfig"),
    ),
    "multimodal": (MultimodalDistributedConfig, ("megatron_fsdp.automodel.MultimodalDistributedConfig",)),
    "vision": (MultimodalVisionConfig, ("megatron_fsdp.automodel.MultimodalVisionConfig",)),
    "frame_sharding": (CpVisionFrameShardingConfig, ("megatron_fsdp.automodel.CpVisionFrameShardingConfig",)),
}
"""Field -> the class built from its mapping, and the allowed `_target_`s."""

_IGNORED = ("_recursive_", "_convert_")
"""Words to other loaders, without meaning here."""


@dataclass(frozen=True, init=False)
class DistributedSetup(Mapping[str, Any]):
    """A strategy, sizes, and the settings of stages and experts: `from_pretrained(path, distributed_setup=setup)`.

    It reads as a dictionary, too, with the keys of NeMo AutoModel's parser of the YAML section.

    Attributes:
        config: The strategy.
        sizes: Those that are given, by the names of `from_pretrained`'s arguments.
        pipeline_config: How microbatches pass through stages; None: not said.
        moe_parallel_config: How experts are sharded; None: as all other layers.
        activation_checkpointing: As of the strategies; False: what the strategy says itself.
        timeout_minutes: Of the meshes' process groups; None: torch's default.
    """

    config: DistributedConfig
    sizes: Mapping[str, int]
    pipeline_config: PipelineConfig | None
    moe_parallel_config: MoEParallelizerConfig | None
    activation_checkpointing: bool | str
    timeout_minutes: float | None

    def __init__(
        self,
        config: DistributedConfig | None = None,
        sizes: Mapping[str, int] | None = None,
        pipeline_config: PipelineConfig | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
        activation_checkpointing: bool | str = False,
        timeout_minutes: float | None = None,
        *,
        mesh_context: MeshContext | None = None,
        strategy_config: DistributedConfig | None = None,
    ) -> None:
        """Store the parts; meshes that exist already come with `mesh_context`, and sizes then from them."""
        strategy = config if config is not None else strategy_config
        if strategy is None:
            strategy = (mesh_context.strategy_config if mesh_context else None) or FSDP2Config()
        if mesh_context is not None and sizes is None:
            own = mesh_context.sizes.arguments()
            sizes = {name: size for name, size in own.items() if size > 1 or name == "dp_size"}
        vars(self).update(
            config=strategy,
            sizes=sizes or {},
            pipeline_config=pipeline_config,
            moe_parallel_config=moe_parallel_config,
            activation_checkpointing=activation_checkpointing,
            timeout_minutes=timeout_minutes,
            _mesh_context=mesh_context,
        )

    @classmethod
    def build(
        cls,
        strategy: DistributedConfig | str = "fsdp2",
        sizes: ParallelismSizes | None = None,
        pipeline_config: PipelineConfig | Mapping[str, Any] | None = None,
        moe_parallel_config: MoEParallelizerConfig | Mapping[str, Any] | None = None,
        activation_checkpointing: bool | str = False,
        world_size: int | None = None,
        timeout_minutes: float | None = None,
        ranks: Sequence[int] | None = None,
        *,
        parallelism_sizes: ParallelismSizes | None = None,
        **size_arguments: int | None,
    ) -> DistributedSetup:
        """Build a setup in code.

        Args:
            strategy: A config, or its name in YAML.
            sizes: In one object; or one by one, as `size_arguments`. An earlier name of `parallelism_sizes`.
            pipeline_config: How microbatches pass through stages; with `pp_size` > 1 only.
            moe_parallel_config: How experts are sharded; with `ep_size` > 1 only.
            activation_checkpointing: As of the strategies; False: what the strategy says itself.
            world_size: None: what torch.distributed says; another number is refused.
            timeout_minutes: Of the meshes' process groups.
            ranks: All ranks; others are not supported yet.
            parallelism_sizes: As `sizes`.
            size_arguments: `dp_size`, `dp_replicate_size`, `tp_size`, `pp_size`, `cp_size` and `ep_size`.

        Raises:
            ConfigurationError: The strategy has no such name, sizes are given in several ways, or options are given
                for stages or experts that are not divided.
            NotSupportedYetError: `ranks` leaves ranks out.
            TypeError: There is no such size.
        """
        given = [each for each in (sizes, parallelism_sizes) if each is not None]
        if len(given) + bool(size_arguments) > 1:
            both = ["sizes"] * (sizes is not None) + ["parallelism_sizes"] * (parallelism_sizes is not None)
            raise ConfigurationError(f"{' and '.join([*both, *size_arguments])} are both given; keep one")
        if isinstance(strategy, str):
            config = _strategy(strategy, None)()
        elif isinstance(strategy, FSDP2Config | MegatronFSDPConfig | DDPConfig):
            config = strategy
        else:
            raise ConfigurationError(
                f"Unknown distributed strategy type {type(strategy).__name__}; give an FSDP2Config, a "
                f"MegatronFSDPConfig, a DDPConfig, or one of the names {', '.join(STRATEGIES)}"
            )
        chosen = vars(given[0] if given else ParallelismSizes(**size_arguments))
        defaults = vars(ParallelismSizes())
        named = {name: size for name, size in chosen.items() if size not in (None, defaults[name])}
        check_all_ranks(world_size, ranks)
        parts: dict[str, Any] = {"pipeline_config": pipeline_config, "moe_parallel_config": moe_parallel_config}
        for (name, option), size_name in zip(list(parts.items()), ("pp_size", "ep_size"), strict=True):
            is_divided = named.get(size_name, 1) > 1
            if option is not None and not is_divided:
                raise ConfigurationError(f"{name} requires {size_name} > 1; give that size, or leave {name} out")
            if isinstance(option, Mapping) or (option is None and is_divided):
                parts[name] = _object(name, option or {})
        recomputed = checked_recomputation(config, activation_checkpointing)
        return cls(config, named, **parts, activation_checkpointing=recomputed, timeout_minutes=timeout_minutes)

    @property
    def strategy_config(self) -> DistributedConfig:
        """The strategy."""
        return self.config

    @property
    def mesh_context(self) -> MeshContext:
        """The meshes of these sizes; built when they are first asked for, which is collective."""
        made: MeshContext | None = vars(self)["_mesh_context"]
        if made is None:
            made = MeshContext.build(self.config, self["parallelism_sizes"], timeout_minutes=self.timeout_minutes)
            vars(self)["_mesh_context"] = made
        return made

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `from_pretrained(path, **setup.arguments())` and `from_config`."""
        config = self.config
        if self.activation_checkpointing is not False:
            config = replace(config, activation_checkpointing=self.activation_checkpointing)
        found: dict[str, Any] = {"distributed_config": config, **self.sizes}
        if self.pipeline_config is not None:
            found["pipeline_config"] = self.pipeline_config
        if self.moe_parallel_config is not None:
            found["moe_parallel_config"] = self.moe_parallel_config
        return found

    def __getitem__(self, key: str) -> Any:
        """Return a part by its name in NeMo AutoModel's parsed section."""
        sizes = vars(ParallelismSizes(**self.sizes))
        if key in sizes:
            return sizes[key]
        if key == "parallelism_sizes":
            return ParallelismSizes(**self.sizes)
        if key == "pp_enabled":
            return (sizes["pp_size"] or 1) > 1
        if key not in _KEYS:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter((*_KEYS, "parallelism_sizes", "pp_enabled", *SIZE_NAMES))

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(list(iter(self)))


_KEYS = ("strategy_config", "pipeline_config", "moe_parallel_config", "activation_checkpointing")

_RECOMPUTED: Mapping[str, bool | str] = {
    **dict.fromkeys(("off", "none", "no", "disabled", "false"), False),
    **dict.fromkeys(("on", "yes", "enabled", "true"), True),
    "full": "full",
    "selective": "selective",
}


def checked_recomputation(config: DistributedConfig, given: bool | str | None) -> bool | str:
    """Return `activation_checkpointing` in its stored form; "full" is True but for `MegatronFSDPConfig`.

    Raises:
        ConfigurationError: It is another word.
    """
    found = _RECOMPUTED.get(given.strip().lower()) if isinstance(given, str) else bool(given)
    if found is None or not isinstance(given, bool | str | None):
        raise ConfigurationError(
            f"activation_checkpointing={given!r}; give True, False, 'full' or 'selective', or words such as 'off', 'on'"
        )
    return True if found == "full" and not isinstance(config, MegatronFSDPConfig) else found


@agreed("building the meshes", lambda *_, **__: ())
def create_distributed_setup_from_config(
    cfg: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    *,
    timeout_minutes: float | None = None,
    ranks: Sequence[int] | None = None,
    **section: Any,
) -> DistributedSetup:
    """Build a setup with its meshes from a configuration or its section, and from keywords, which win; collective.

    Args:
        cfg: A mapping with `distributed` in it, or that section alone. `dist_env.timeout_minutes` is used, too.
        world_size: None: what torch.distributed says; another number is refused.
        timeout_minutes: Of the meshes' process groups.
        ranks: All ranks; others are not supported yet.
        section: `strategy`, sizes, `pipeline`, `moe`, `activation_checkpointing` and fields of the strategy.

    Raises:
        ConfigurationError: See `parse_distributed_section`.
        NotSupportedYetError: `ranks` leaves ranks out.
    """
    whole = cfg or {}
    if timeout_minutes is None and isinstance(whole.get("dist_env"), Mapping):
        timeout_minutes = whole["dist_env"].get("timeout_minutes")
    own = whole.get(SECTION, {} if "dist_env" in whole else whole)
    parsed = parse_distributed_section({**own, **{name: value for name, value in section.items() if value is not None}})
    setup = replace(parsed, timeout_minutes=timeout_minutes)
    set_up_ranks(setup.config.backend, timeout_minutes)
    check_all_ranks(world_size, ranks)
    assert setup.mesh_context is not None
    return setup


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
    recomputed = values.pop("activation_checkpointing", False)
    parts = {name: values.pop(name, None) for name in ("pipeline", "moe")}
    config = _built(kind, values)
    for name, size_name in (("pipeline", "pp_size"), ("moe", "ep_size")):
        is_divided, part = sizes.get(size_name, 1) not in (0, 1), parts[name]
        if part is not None and not is_divided:
            if part or name == "pipeline":
                warn_caller(f"the section {name} is ignored, since {size_name} is 1")
            parts[name] = None
        elif part is not None and not isinstance(part, Mapping):
            raise ConfigurationError(f"{name}={part!r}; write a mapping of fields to values")
        elif name == "pipeline" and is_divided and part is None:
            warn_caller(f"{size_name}={sizes[size_name]} without a section pipeline: its defaults are used; write one")
    pipeline = None if parts["pipeline"] is None else _object("pipeline_config", _with_dtype(parts["pipeline"], config))
    experts = None if parts["moe"] is None else _object("moe_parallel_config", parts["moe"])
    return DistributedSetup(config, sizes, pipeline, experts, checked_recomputation(config, recomputed))


def _with_dtype(pipeline: Mapping[str, Any], config: DistributedConfig) -> Mapping[str, Any]:
    """Add the dtype that stages send, which is that of the strategy's outputs."""
    policy = getattr(config, "mp_policy", None)
    return {"dtype": policy and (policy.output_dtype or policy.param_dtype), **pipeline}


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
    return kind(**{name: _value(kind, name, value) for name, value in values.items() if value is not None})


def _value(kind: type[Any], name: str, value: Any) -> Any:
    if name in _OBJECTS and isinstance(value, Mapping):
        return _object(name, value)
    if name == "dtype" or name.endswith(("_dtype", "lm_head_precision")):
        return value if isinstance(value, torch.dtype) else dtype_from_name(str(value).strip().lower(), name)
    if name == "mesh_dims" and isinstance(value, list):
        return tuple(value)
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
