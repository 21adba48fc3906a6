"""`from_pretrained` and `from_config` that take a strategy and sizes, and return a model that is ready to train.

The model is built on the meta device, made parallel, and then given its weights shard by shard; nothing is downloaded.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.adapters import add_adapters, fill_adapters, without_copies
from megatron_fsdp.automodel.config import (
    SIZE_NAMES,
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    check_config,
    resolve_sizes,
)
from megatron_fsdp.automodel.initial_values import allocate, draw_missing
from megatron_fsdp.automodel.managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from megatron_fsdp.automodel.meshes import MeshContext, build_mesh_context, set_up_ranks
from megatron_fsdp.automodel.pipeline_parallel import Pipeline, PipelineConfig, build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.stages import merge_stages
from megatron_fsdp.automodel.saving import let_save
from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.checkpoint.hf.index import open_folder
from megatron_fsdp.checkpoint.report import LoadReport
from megatron_fsdp.comm.agreement import decided_by_first, together
from megatron_fsdp.errors import CheckpointError, ConfigurationError, warn_caller
from megatron_fsdp.optional_packages import require
from megatron_fsdp.plan.models import build_from_config, read_config

transformers: Any = require("transformers", "megatron_fsdp.automodel")


class _AutoModel:
    """What the three classes share."""

    _transformers_class: ClassVar[str]
    _new_head: ClassVar[bool] = False

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made by from_pretrained(...) or from_config(...)")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        distributed_config: DistributedConfig | None = None,
        dp_size: int | None = None,
        dp_replicate_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        pipeline_config: PipelineConfig | None = None,
        peft_config: Any = None,
        dtype: torch.dtype | str | None = "auto",
        attn_implementation: str | None = None,
        config: Any = None,
        key_mapping: Any = None,
        strict: bool = True,
        prepare_model: Callable[[nn.Module], object] | None = None,
        device_map: None = None,
        trust_remote_code: bool | None = False,
        **config_overrides: Any,
    ) -> Any:
        """Build a model without memory, make it parallel, and read its weights straight into the shards; collective.

        Each rank reads the bytes of its own shards; the most that exists beside them is 32 MiB of a tensor, and of
        weights that are not in the files, one layer.

        Args:
            pretrained_model_name_or_path: A local folder, or a name that is in the local cache of the hub. Nothing is
                downloaded.
            distributed_config: The strategy; None: `FSDP2Config()`.
            dp_size: Data-parallel ranks, copies included; None: what the other sizes leave.
            dp_replicate_size: Copies of the sharded model; `FSDP2Config` only.
            tp_size: Tensor-parallel ranks.
            pp_size: Pipeline-parallel ranks; `FSDP2Config` only.
            cp_size: Context-parallel ranks.
            ep_size: Expert-parallel ranks; `FSDP2Config` only.
            pipeline_config: With `pp_size` > 1, how microbatches pass through; None: its defaults.
            peft_config: A configuration of peft; the adapters are added before sharding, and the rest is frozen.
            dtype: Of the weights; "auto" or None: what the config says, else the files.
            attn_implementation: As in transformers; None: what transformers chooses.
            config: A config of transformers in place of the folder's.
            key_mapping: As of `load_hf`.
            strict: Refuse files that lack a weight or have more. False: draw what is missing, and warn.
            prepare_model: Called with the model before it is made parallel, on the meta device: to freeze parameters.
            device_map: Refused, as every rank holds a part of every layer.
            trust_remote_code: Refused where true: code that lies beside weights is never run.
            config_overrides: Fields of the config.

        Returns:
            The model: for FSDP2 the transformers model itself, for the others the wrapper around it, and a `Pipeline`
            with `pp_size` > 1. It has `save_pretrained(folder)` and `mesh_context`.

        Raises:
            ParallelSizeError: The sizes do not fit the strategy, the ranks or the model.
            CheckpointError: The files cannot be read or do not fit; names the weights.
            ConfigurationError: Another argument cannot be honoured.
        """

        def find() -> tuple[Path, Any]:
            refuse_foreign(device_map, trust_remote_code)
            found = find_folder(pretrained_model_name_or_path)
            return found, config_of(found, config, config_overrides)

        strategy, context, folder, model_config = agree_on(
            distributed_config,
            _sizes(dp_size, dp_replicate_size, tp_size, pp_size, cp_size, ep_size),
            find,
            {
                "pipeline_config": pipeline_config,
                "peft_config": peft_config,
                "dtype": dtype,
                "attn_implementation": attn_implementation,
                "strict": strict,
            },
        )
        assert folder is not None
        twin = cls._on_meta(model_config, resolve_dtype(dtype, model_config, folder), attn_implementation)
        adopt_generation_config(twin, folder)
        return ready_model(
            twin,
            strategy,
            context,
            pipeline_config=pipeline_config,
            peft_config=peft_config,
            folder=folder,
            key_mapping=key_mapping,
            strict=strict,
            new_head=cls._new_head,
            prepare_model=prepare_model,
        )

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        distributed_config: DistributedConfig | None = None,
        dp_size: int | None = None,
        dp_replicate_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        pipeline_config: PipelineConfig | None = None,
        peft_config: Any = None,
        dtype: torch.dtype | str | None = "auto",
        attn_implementation: str | None = None,
        prepare_model: Callable[[nn.Module], object] | None = None,
        device_map: None = None,
        trust_remote_code: bool | None = False,
    ) -> Any:
        """Build a model without memory, make it parallel, and draw its weights straight into the shards; collective.

        The weights are those that transformers draws under the same seed, whatever the strategy, the sizes and the
        number of ranks.

        Args:
            config: A config of transformers, or a local folder with one.
            distributed_config: As of `from_pretrained`, as all that follow.
            dp_size: See there.
            dp_replicate_size: See there.
            tp_size: See there.
            pp_size: See there.
            cp_size: See there.
            ep_size: See there.
            pipeline_config: See there.
            peft_config: See there.
            dtype: See there; "auto" or None: what the config says, else torch's default.
            attn_implementation: See there.
            prepare_model: See there.
            device_map: See there.
            trust_remote_code: See there.

        Returns:
            See there.

        Raises:
            ParallelSizeError: The sizes do not fit the strategy, the ranks or the model.
            ConfigurationError: Another argument cannot be honoured.
        """

        def find() -> tuple[None, Any]:
            refuse_foreign(device_map, trust_remote_code)
            is_folder = isinstance(config, str | Path)
            return None, config_of(find_folder(config) if is_folder else None, None if is_folder else config, {})

        strategy, context, _, model_config = agree_on(
            distributed_config,
            _sizes(dp_size, dp_replicate_size, tp_size, pp_size, cp_size, ep_size),
            find,
            {
                "pipeline_config": pipeline_config,
                "peft_config": peft_config,
                "dtype": dtype,
                "attn_implementation": attn_implementation,
            },
        )
        twin = cls._on_meta(model_config, resolve_dtype(dtype, model_config, None), attn_implementation)
        return ready_model(
            twin,
            strategy,
            context,
            pipeline_config=pipeline_config,
            peft_config=peft_config,
            prepare_model=prepare_model,
        )

    @classmethod
    def _on_meta(cls, config: Any, dtype: torch.dtype, attn_implementation: str | None) -> nn.Module:
        options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        return build_from_config(config, dtype, cls._transformers_class, **options)


def _sizes(
    dp_size: int | None,
    dp_replicate_size: int | None,
    tp_size: int | None,
    pp_size: int | None,
    cp_size: int | None,
    ep_size: int | None,
) -> dict[str, int | None]:
    return dict(zip(SIZE_NAMES, (dp_size, dp_replicate_size, tp_size, pp_size, cp_size, ep_size), strict=True))


class AutoModelForCausalLM(_AutoModel):
    """Causal language models of transformers, made parallel."""

    _transformers_class = "AutoModelForCausalLM"


class AutoModelForSequenceClassification(_AutoModel):
    """Sequence classifiers; a head that the files lack is drawn, with a warning, and their language head left out."""

    _transformers_class = "AutoModelForSequenceClassification"
    _new_head = True


class AutoModelForImageTextToText(_AutoModel):
    """Models that read images and text and write text."""

    _transformers_class = "AutoModelForImageTextToText"


def ready_model(
    twin: nn.Module,
    config: DistributedConfig,
    context: MeshContext,
    *,
    pipeline_config: PipelineConfig | None = None,
    peft_config: Any = None,
    folder: Path | None = None,
    key_mapping: Any = None,
    strict: bool = True,
    new_head: bool = False,
    prepare_model: Callable[[nn.Module], object] | None = None,
) -> nn.Module | Pipeline:
    """Make a model parallel and give it its weights; collective.

    Args:
        twin: The model on the meta device; used up.
        config: The strategy.
        context: Its meshes.
        pipeline_config: How microbatches pass through stages.
        peft_config: For adapters.
        folder: Of the weights; None: they are drawn.
        key_mapping: As of `load_hf`.
        strict: Whether the files must fit.
        new_head: Whether a head may be missing in the files, and another be there.
        prepare_model: Called with the model before anything is done to it.

    Raises:
        CheckpointError: The files do not fit.
        ConfigurationError: An argument cannot be honoured.
    """
    if pipeline_config is not None and context.sizes.pp == 1:
        raise ConfigurationError("pipeline_config is given and pp_size is 1; leave it out, or give pp_size")
    if peft_config is not None and context.sizes.pp > 1:
        raise ConfigurationError("peft_config with pp_size > 1: stages take no adapters; use another size than pp_size")
    refuse_quantised(twin)
    live: nn.Module = copy.deepcopy(twin)
    saved_config = copy.deepcopy(getattr(twin, "config", None))
    if prepare_model is not None:
        prepare_model(live)
    if peft_config is not None:
        live = add_adapters(live, peft_config)
    model = _parallel(live, config, context, pipeline_config)
    stages = model.parts if isinstance(model, Pipeline) else [model]
    whole = merge_stages(stages) if isinstance(model, Pipeline) else model
    copies = set(model.tied_copies) if isinstance(model, Pipeline) else set()
    filled = set(copies)
    base_twin = copy.deepcopy(twin) if peft_config is not None else None
    with without_copies(whole, *stages):
        if folder is not None:
            report = load_hf(whole, folder, key_mapping=key_mapping, strict=False)
            _check(replace(report, missing=_without(report.missing, copies)), folder, twin, strict, new_head)
            filled.update(report.loaded)
        drawn = draw_missing(twin, whole, stages, filled, context.device)
    if base_twin is not None:
        fill_adapters(whole, base_twin, peft_config, context.device)
    if isinstance(model, Pipeline):
        model.equalize_tied()
        kept: Any = whole
        kept._keys_to_ignore_on_save = {*(getattr(whole, "_keys_to_ignore_on_save", None) or ()), *copies}
    if folder is not None and drawn:
        warn_caller(f"{folder} lacks {len(drawn)} weights, which were drawn: {', '.join(drawn[:8])}; train them")
    if isinstance(config, DDPConfig):
        model = DDPManager(config).parallelize(live, sends_weights=False)
    let_save(model, whole, saved_config, folder)
    settable: Any = model
    settable.mesh_context = context
    settable.distributed_config = config
    return model


def _parallel(
    live: nn.Module, config: DistributedConfig, context: MeshContext, pipeline_config: PipelineConfig | None
) -> nn.Module | Pipeline:
    """The model, parallel and with memory but no values; of DDP, whose constructor sends values, not wrapped yet."""
    if isinstance(config, DDPConfig):
        allocate(live, context.device)
        return live
    mesh = context.device_mesh
    assert mesh is not None
    if isinstance(config, MegatronFSDPConfig):
        model, _ = MegatronFSDPManager(config, mesh).parallelize(live, leaves_empty=True)
        allocate(model, context.device)
        return model
    if context.sizes.pp == 1:
        return _shard_stage(live, config, mesh, context)
    return build_pipeline(
        live,
        mesh["pp"],
        pipeline_config or PipelineConfig(),
        parallelize_stage=lambda stage: _shard_stage(stage, config, mesh, context),
        device=context.device,
        activation_dtype=_dtype_between_stages(config),
    )


def _shard_stage(stage: nn.Module, config: FSDP2Config, mesh: DeviceMesh, context: MeshContext) -> nn.Module:
    model = FSDP2Manager(config, mesh, context.moe_mesh).parallelize(stage)
    allocate(model, context.device if config.offload_policy is None else torch.device("cpu"))
    return model


def _dtype_between_stages(config: FSDP2Config) -> torch.dtype | None:
    """What FSDP2 gives out at the end of a stage; None: the dtype of the parameters."""
    assert config.mp_policy is not None  # __post_init__ sets it
    return config.mp_policy.output_dtype or config.mp_policy.param_dtype


def _without(names: Sequence[str], left_out: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in left_out)


def _check(report: LoadReport, folder: Path, twin: nn.Module, strict: bool, new_head: bool) -> None:
    """Refuse files that do not fit, but for what the caller lets pass; the same on every rank.

    Raises:
        CheckpointError: Names what is missing, unexpected or of another shape.
    """
    prefix = f"{getattr(twin, 'base_model_prefix', '')}."
    missing: Sequence[str] = report.missing
    unexpected: Sequence[str] = report.unexpected
    if new_head:
        missing = [name for name in missing if name.startswith(prefix)]
        unexpected = [name for name in unexpected if name.startswith(prefix)]
    if not strict:
        missing, unexpected = (), ()
    if missing or unexpected or report.reshaped:
        raise CheckpointError(f"{folder} does not fit {type(twin).__name__}: {report}\nnothing can be trained from it")


# Text of values that ranks compare: the same in every process that was given the same.
#
# `repr` is not: strings are hashed by a seed of each process, so sets show their elements in another order, and objects
# without a `repr` of their own show where they lie in memory.

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def canonical_facts(given: Mapping[str, Any]) -> dict[str, str]:
    """The text of each value, of a dataclass of each field ("peft_config.r"), so that what differs is named."""
    facts = {}
    for name, value in given.items():
        if is_dataclass(value) and not isinstance(value, type):
            facts[name] = type(value).__name__
            facts |= canonical_facts({f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)})
        else:
            facts[name] = canonical_text(value)
    return facts


def canonical_text(value: Any) -> str:
    """A `repr` with the elements of sets and the keys of mappings sorted, of all fields of dataclasses, at any depth.

    Other objects show their own `repr` without addresses; those that have none are told apart by their class alone.
    """
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{field.name}={canonical_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        items = sorted((canonical_text(key), canonical_text(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, AbstractSet):
        return "{" + ", ".join(sorted(map(canonical_text, value))) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(canonical_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return _ADDRESS.sub("", repr(value))


def agree_on(
    distributed_config: DistributedConfig | None,
    sizes: Mapping[str, int | None],
    find: Callable[[], tuple[Path | None, Any]],
    options: Mapping[str, Any],
) -> tuple[DistributedConfig, MeshContext, Path | None, Any]:
    """Check what ranks were given, each by itself and against each other, and then build the meshes; collective.

    Args:
        distributed_config: The strategy; None: `FSDP2Config()`.
        sizes: As `resolve_sizes` takes them.
        find: Gives the folder of the model, if any, and its config.
        options: Other arguments that must be the same on every rank.

    Returns:
        The strategy, its meshes, the folder and the config.

    Raises:
        ConfigurationError: Ranks were given different arguments, or one of them is wrong; on every rank.
        CheckpointError: Only some ranks have the folder; on every rank, and names them.
    """
    strategy = FSDP2Config() if distributed_config is None else distributed_config
    set_up_ranks(str(getattr(strategy, "backend", "gloo")))

    def check() -> tuple[Path | None, Any]:
        resolve_sizes(check_config(strategy), dist.get_world_size(), **sizes)
        return find()

    given = {"distributed_config": strategy, **sizes, **options}
    folder, config = together("finding the model", check, facts=canonical_facts(given))
    of_config = {f"config.{name}": value for name, value in config.to_diff_dict().items()}
    together("comparing configs", lambda: None, facts=canonical_facts(of_config))
    return strategy, build_mesh_context(strategy, **sizes), folder, config


def find_folder(name_or_path: str | Path) -> Path:
    """The local folder of a model: the path itself, or where the hub's cache has the name.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(name_or_path, str | Path):
        raise ConfigurationError(f"the model is given as {name_or_path!r}; give a local folder, or a name in the cache")
    path = Path(name_or_path)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name_or_path), local_files_only=True))
    except Exception as error:
        raise ConfigurationError(
            f"{str(name_or_path)!r} is neither a local folder nor in the local cache of the hub; download it first, "
            "since nothing is downloaded here"
        ) from error


def refuse_foreign(device_map: object, trust_remote_code: object) -> None:
    """Refuse what transformers' own loaders take, and these cannot honour.

    Raises:
        ConfigurationError: One of them is given.
    """
    if device_map is not None:
        raise ConfigurationError(
            f"device_map={device_map!r} puts whole layers on devices, and here every rank holds a part of each layer; "
            "leave it out, and divide the model by distributed_config and sizes such as tp_size"
        )
    if trust_remote_code:
        raise ConfigurationError(
            f"trust_remote_code={trust_remote_code!r}, but code that lies beside weights is never run here; leave it "
            "out, and register classes of your own with transformers first (AutoConfig.register, "
            "AutoModelForCausalLM.register)"
        )


def config_of(folder: Path | None, given: Any, overrides: Mapping[str, Any]) -> Any:
    """The config of the model, as a copy: the one that is given, or the folder's.

    Raises:
        ConfigurationError: It cannot be read, is of another type, or has no field of an override's name.
    """
    if given is not None:
        if not isinstance(given, transformers.PretrainedConfig):
            raise ConfigurationError(f"config is a {type(given).__name__}; give a config of transformers or its folder")
        config: Any = copy.deepcopy(given)
    else:
        if folder is None:
            raise ConfigurationError("config is None; give a config of transformers, or a folder that has one")
        config = read_config(folder)
    for name, value in overrides.items():
        if not hasattr(config, name) or callable(getattr(type(config), name, None)):
            raise ConfigurationError(
                f"{name!r} is neither an argument nor a field of {type(config).__name__}; check its spelling"
            )
        setattr(config, name, value)
    return config


def resolve_dtype(dtype: torch.dtype | str | None, config: Any, folder: Path | None) -> torch.dtype:
    """The dtype of the weights.

    Args:
        dtype: A dtype or its name; "auto" or None: what the config says, else what most
            elements of the files have.
        config: Of the model.
        folder: Of the files; None: there are none, and torch's default is taken.

    Raises:
        ConfigurationError: It is no floating-point dtype.
    """
    if dtype in (None, "auto"):
        said = getattr(config, "dtype", None)
        if said not in (None, "auto"):
            return resolve_dtype(said, config, folder)
        if folder is None:
            return torch.get_default_dtype()
        stored = decided_by_first(lambda: open_folder(folder), f"opening {folder}")
        sizes: dict[torch.dtype, int] = {}
        for tensor in stored.tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
        return max(sizes, key=lambda found: sizes[found]) if sizes else torch.get_default_dtype()
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ConfigurationError(f"dtype={dtype!r}; give a floating-point torch.dtype, its name, or 'auto'")
    return resolved


def adopt_generation_config(model: Any, folder: Path) -> None:
    """Let a model generate as the folder says, where it does.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    if not (folder / "generation_config.json").is_file() or not model.can_generate():
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigurationError(f"{folder}: generation_config.json cannot be read: {error}") from error


def refuse_quantised(model: nn.Module) -> None:
    """Quantised weights are not cast into shards.

    Raises:
        CheckpointError: The config says that the weights are quantised.
    """
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise CheckpointError(
            "the weights are quantised (quantization_config); convert them to floating point first, or train adapters "
            "on a model that transformers has loaded"
        )
