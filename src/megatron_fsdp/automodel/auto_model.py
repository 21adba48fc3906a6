"""`from_pretrained` and `from_config` with a strategy and sizes; they return a model that is ready to train.

The model is built on the meta device, made parallel, and then given its weights shard by shard; nothing is downloaded.
"""

from __future__ import annotations

import copy
import math
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
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
    MoEParallelizerConfig,
    check_config,
    resolve_sizes,
)
from megatron_fsdp.automodel.config_yaml import DistributedSetup
from megatron_fsdp.automodel.gradients import reshard_units
from megatron_fsdp.automodel.initial_values import draw_missing
from megatron_fsdp.automodel.managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from megatron_fsdp.automodel.meshes import MeshContext, build_mesh_context, set_up_ranks
from megatron_fsdp.automodel.pipeline_parallel import Pipeline, PipelineConfig, build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.stages import merge_stages
from megatron_fsdp.automodel.quantized_base import QuantizedBase
from megatron_fsdp.checkpoint.hf import load_hf, save_adapter, save_hf
from megatron_fsdp.checkpoint.hf.files import open_folder
from megatron_fsdp.checkpoint.hf.live import unwrap
from megatron_fsdp.checkpoint.report import LoadReport, decided_by_first, together
from megatron_fsdp.comm.agreement import agreed
from megatron_fsdp.config.hf_config import build_from_config, read_config
from megatron_fsdp.errors import CheckpointError, ConfigurationError, NotSupportedYetError, warn_caller, words_of
from megatron_fsdp.optional_packages import require
from megatron_fsdp.wrap.meta_init import allocate

transformers: Any = require("transformers", "megatron_fsdp.automodel")


_COMPARED = (
    *("distributed_config", *SIZE_NAMES, "device_mesh", "moe_mesh", "pipeline_config", "moe_parallel_config"),
    *("peft_config", "quantization_config", "dtype", "attn_implementation", "strict"),
)
"""Arguments that have to be the same on every rank; functions among the others cannot be compared."""


_NOT_YET: Mapping[str, str] = {
    "fp8_config": "give MegatronFSDPConfig(weight_format='fp8_compute'), whose linears multiply float8 weights",
    "qat_config": "train in floating point, and quantise the saved files",
    "compile_config": "give FSDP2Config(enable_compile=True), which compiles the layers",
}
"""Arguments of NeMo AutoModel that are not supported, and their replacements."""


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace omitted arguments by the setup's or by the default strategy."""
    setup: DistributedSetup | None = given["distributed_setup"]
    given = dict(given)
    if given.get("torch_dtype") is not None:
        given["dtype"] = given["torch_dtype"]
    if setup is not None:
        return {**given, **setup.arguments()}
    strategy = given["distributed_config"]
    return {**given, "distributed_config": FSDP2Config() if strategy is None else strategy}


def _backend_of(given: Mapping[str, Any]) -> str:
    """Return the back end of unchecked arguments: ranks need process groups to raise together."""
    with suppress(AttributeError, TypeError):
        return str(_resolved(given)["distributed_config"].backend)
    return "gloo"


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Raise for contradicting arguments, unsupported ones, and sizes that do not fit."""
    if given["device_map"] is not None:
        raise ConfigurationError(
            f"device_map={given['device_map']!r} puts whole layers on devices, and here every rank holds a part of "
            "each layer; leave it out, and divide the model by distributed_config and sizes such as tp_size"
        )
    if given["trust_remote_code"]:
        raise ConfigurationError(
            f"trust_remote_code={given['trust_remote_code']!r}, but code from a model's folder is never run; leave it "
            "out, and register classes of your own with transformers first (AutoConfig.register, "
            "AutoModelForCausalLM.register)"
        )
    for name, instead in _NOT_YET.items():
        if given.get("config_overrides", {}).get(name) is not None:
            raise NotSupportedYetError(f"{name} is not supported yet: {instead}")
    sizes = [name for name in SIZE_NAMES if given[name] is not None]
    others = ("distributed_config", "pipeline_config", "moe_parallel_config", "device_mesh", "moe_mesh")
    if given["distributed_setup"] is not None and (sizes or any(given[name] is not None for name in others)):
        raise ConfigurationError(
            "distributed_setup replaces distributed_config, sizes, meshes and options of stages and experts, and some "
            "of these are given; leave them out, or pass **distributed_setup.arguments() and change that"
        )
    mesh, moe_mesh = given["device_mesh"], given["moe_mesh"]
    if (sizes and mesh is not None) or (moe_mesh is not None and mesh is None):
        raise ConfigurationError(
            f"device_mesh and moe_mesh replace sizes, and {', '.join(sizes) or 'moe_mesh alone'} is "
            "given; give sizes, or device_mesh with the moe_mesh that belongs to it"
        )
    resolved = _resolved(given)
    config = check_config(resolved["distributed_config"])
    if mesh is None:
        resolve_sizes(config, dist.get_world_size(), **{name: resolved[name] for name in SIZE_NAMES})


class _AutoModel:
    """The base of the three public classes: `from_pretrained` and `from_config`."""

    _transformers_class: ClassVar[str]
    _new_head: ClassVar[bool] = False

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} cannot be constructed; call from_pretrained(...) or from_config(...)")

    @classmethod
    @agreed("building the model", lambda *_, **__: ())
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
        device_mesh: DeviceMesh | None = None,
        moe_mesh: DeviceMesh | None = None,
        distributed_setup: DistributedSetup | None = None,
        pipeline_config: PipelineConfig | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
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

        Each rank reads only the bytes of its own shards; besides them at most 32 MiB of a tensor are in memory, and one
        layer of the weights that are not in the files.

        Args:
            pretrained_model_name_or_path: A local folder, or a name that is in the local cache of the hub. Nothing is
                downloaded.
            distributed_config: The strategy; None: `FSDP2Config()`.
            dp_size: Data-parallel ranks, copies included; None: what the other sizes leave.
            dp_replicate_size: Copies of the sharded model; `FSDP2Config` only.
            tp_size: Tensor-parallel ranks.
            pp_size: Pipeline-parallel ranks; `FSDP2Config` only.
            cp_size: Context-parallel ranks.
            ep_size: Expert-parallel ranks.
            device_mesh: Instead of sizes: a mesh of `create_device_mesh`, or one with the same axes.
            moe_mesh: The mesh of experts that belongs to it.
            distributed_setup: Instead of `distributed_config`, sizes and `pipeline_config`.
            pipeline_config: With `pp_size` > 1, how microbatches pass through; None: its defaults.
            moe_parallel_config: With `ep_size` > 1, how experts are sharded; None: as all other layers.
            peft_config: A configuration of peft; the adapters are added before sharding, and the rest is frozen.
            quantization_config: `BitsAndBytesConfig` or `TorchAoConfig` of transformers, with `peft_config`: each rank
                reads and quantises one weight of the base at a time, and keeps its shard of the bytes. A folder that
                bitsandbytes has quantised needs none.
            dtype: Of the weights; "auto" or None: what the config says, else the files.
            torch_dtype: An older name of `dtype`.
            attn_implementation: As in transformers; None: what transformers chooses.
            config: A config of transformers instead of the folder's.
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
        given = locals()

        def find() -> tuple[Path, Any]:
            found = _find_folder(pretrained_model_name_or_path)
            return found, _config_of(found, config, config_overrides)

        return cls._make(find, given)

    @classmethod
    @agreed("building the model", lambda *_, **__: ())
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
        device_mesh: DeviceMesh | None = None,
        moe_mesh: DeviceMesh | None = None,
        distributed_setup: DistributedSetup | None = None,
        pipeline_config: PipelineConfig | None = None,
        moe_parallel_config: MoEParallelizerConfig | None = None,
        peft_config: Any = None,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
        attn_implementation: str | None = None,
        prepare_model: Callable[[nn.Module], object] | None = None,
        device_map: None = None,
        trust_remote_code: bool | None = False,
    ) -> Any:
        """Build a model without memory, make it parallel, and draw its weights straight into the shards; collective.

        The weights are those that transformers draws under the same seed, for any strategy, sizes and number of ranks.

        The config is one of transformers, or a local folder with one; the other arguments and the result are those of
        `from_pretrained`. If neither `dtype` nor the config gives one, torch's default is used.

        Raises:
            ParallelSizeError: The sizes do not fit the strategy, the ranks or the model.
            ConfigurationError: Another argument cannot be honoured.
        """
        given = locals()

        def find() -> tuple[None, Any]:
            is_folder = isinstance(config, str | Path)
            return None, _config_of(_find_folder(config) if is_folder else None, None if is_folder else config, {})

        return cls._make(find, given)

    @classmethod
    def _make(cls, find: Callable[[], tuple[Path | None, Any]], given: Mapping[str, Any]) -> nn.Module | Pipeline:
        """Agree on the model over the ranks, and build it: on the meta device, parallel, with its weights."""
        # Before any check: ranks raise the same error only if they can communicate.
        set_up_ranks(_backend_of(given))
        if isinstance(given["device_mesh"], MeshContext):
            raise TypeError("device_mesh is a MeshContext; give its device_mesh, or a distributed_setup")
        asked = together("building the model", lambda: _resolved(given))
        strategy = asked["distributed_config"]

        def check() -> tuple[Path | None, Any]:
            _check_arguments(given)
            return find()

        compared = facts_of({name: asked[name] for name in _COMPARED if name in asked})
        folder, config = together("finding the model", check, facts=compared)
        of_config = {f"config.{name}": value for name, value in config.to_diff_dict().items()}
        together("comparing configs", lambda: None, facts=facts_of(of_config))
        if (setup := given["distributed_setup"]) is not None:
            context = setup.mesh_context
            if context.strategy_config is None:  # built from meshes that were there
                context = MeshContext.from_meshes(strategy, context.device_mesh, context.moe_mesh)
        elif asked["device_mesh"] is None:
            context = build_mesh_context(strategy, **{name: asked[name] for name in SIZE_NAMES})
        else:
            context = MeshContext.from_meshes(strategy, asked["device_mesh"], asked["moe_mesh"])
        attention = asked["attn_implementation"]
        more = {} if attention is None else {"attn_implementation": attention}
        dtype = _resolve_dtype(asked["dtype"], config, folder)
        meta_model = build_from_config(config, dtype, cls._transformers_class, **more)
        if folder is not None:
            load_generation_config(meta_model, folder)
        return _fill(meta_model, asked, context, folder, cls._new_head)


class AutoModelForCausalLM(_AutoModel):
    """Causal language models of transformers, made parallel."""

    _transformers_class = "AutoModelForCausalLM"


class AutoModelForSequenceClassification(_AutoModel):
    """Sequence classifiers; a head that the files lack is drawn, with a warning, and their language head ignored."""

    _transformers_class = "AutoModelForSequenceClassification"
    _new_head = True


class AutoModelForImageTextToText(_AutoModel):
    """Models that read images and text and write text."""

    _transformers_class = "AutoModelForImageTextToText"


def _fill(
    meta_model: nn.Module, asked: Mapping[str, Any], context: MeshContext, folder: Path | None, new_head: bool
) -> nn.Module | Pipeline:
    """Make a parallel model like `meta_model`, on the meta device, and give it its weights; consumes `meta_model`."""
    strategy, peft_config = asked["distributed_config"], asked["peft_config"]
    if asked["pipeline_config"] is not None and context.sizes.pp == 1:
        raise ConfigurationError("pipeline_config is given and pp_size is 1; leave it out, or give pp_size")
    if peft_config is not None and context.sizes.pp > 1:
        raise ConfigurationError("peft_config cannot be combined with pp_size > 1; use tp_size or dp_size instead")
    # The model on the meta device stays as transformers built it: values are drawn in it, a layer at a time.
    live: nn.Module = copy.deepcopy(meta_model)
    base = _quantized_base(live, asked, context, folder)
    saved_config = copy.deepcopy(getattr(meta_model, "config", None))
    if asked["prepare_model"] is not None:
        asked["prepare_model"](live)
    if peft_config is not None:
        live = add_adapters(live, peft_config)
    if asked["moe_parallel_config"] is not None and context.sizes.ep == 1:
        raise ConfigurationError("moe_parallel_config is given and ep_size is 1; leave it out, or give ep_size")
    model: Any = _parallel(live, strategy, context, asked["pipeline_config"], asked["moe_parallel_config"])
    is_pipeline = isinstance(model, Pipeline)
    stages = model.parts if is_pipeline else [model]
    whole: Any = merge_stages(stages)
    copies = set(model.tied_copies) if is_pipeline else set()
    # Filling consumes the model on the meta device, and adapters need one too.
    meta_base = copy.deepcopy(meta_model) if peft_config is not None else None
    with without_copies(whole, *stages):
        drawn = fill_weights(
            (meta_model, whole, stages),
            folder,
            context.device,
            copies,
            key_mapping=asked.get("key_mapping"),
            strict=asked.get("strict", True),
            new_head=new_head,
            base=base,
        )
    if meta_base is not None:
        fill_adapters(whole, meta_base, peft_config, context.device)
    if is_pipeline:
        model.equalize_tied()
        whole._keys_to_ignore_on_save = {*(getattr(whole, "_keys_to_ignore_on_save", None) or ()), *copies}
    if folder is not None and drawn:
        warn_caller(
            f"{folder} lacks {len(drawn)} weights, which were drawn at random: {', '.join(drawn[:8])}; train them"
        )
    if isinstance(strategy, DDPConfig):
        model = DDPManager(strategy).parallelize(live, sends_weights=False)
    attach_save_pretrained(model, whole, saved_config, folder)
    model.mesh_context = context
    model.distributed_config = strategy
    made: nn.Module | Pipeline = model
    return made


def _parallel(
    live: nn.Module,
    config: DistributedConfig,
    context: MeshContext,
    pipeline_config: PipelineConfig | None,
    moe_parallel_config: MoEParallelizerConfig | None,
) -> nn.Module | Pipeline:
    """Make a model parallel, with memory but no values; DDP is wrapped later, since its constructor sends values."""
    if isinstance(config, DDPConfig):
        allocate(live, context.device)
        return live
    mesh = context.device_mesh
    assert mesh is not None
    experts = context.moe_mesh, moe_parallel_config
    if isinstance(config, MegatronFSDPConfig):
        model, _ = MegatronFSDPManager(config, mesh, *experts).parallelize(live, leaves_empty=True)
        allocate(model, context.device)
        return model
    manager = FSDP2Manager(config, mesh, *experts)

    def shard(stage: nn.Module) -> nn.Module:
        sharded = manager.parallelize(stage)
        allocate(sharded, context.device if config.offload_policy is None else torch.device("cpu"))
        return sharded

    if context.sizes.pp == 1:
        return shard(live)
    policy = config.mp_policy
    assert policy is not None  # __post_init__ sets it
    stages = pipeline_config or PipelineConfig()
    sent = policy.output_dtype or policy.param_dtype
    if stages.dtype not in (None, sent):
        raise ConfigurationError(
            f"pipeline_config has dtype={stages.dtype}, but mp_policy makes stages send {sent}; leave dtype out, or "
            "change output_dtype of mp_policy"
        )
    return build_pipeline(
        live,
        mesh["pp"],
        stages,
        parallelize_stage=shard,
        device=context.device,
        activation_dtype=sent,
    )


def fill_weights(
    models: tuple[nn.Module, nn.Module, Sequence[nn.Module]],
    folder: Path | None,
    device: torch.device,
    copies: Collection[str] = (),
    *,
    key_mapping: Any = None,
    strict: bool = True,
    new_head: bool = False,
    base: QuantizedBase | None = None,
) -> tuple[str, ...]:
    """Load the values of shards from a folder of Hugging Face files, and draw missing ones; collective.

    `models` are the whole model on the meta device, which is consumed; this rank's part of it; and its stages. Random
    states are sent on `device`. `copies` names parameters that get their values from another stage. `strict` raises if
    files lack a weight or have more; with `new_head` the head may be missing, or another. Without a folder all values
    are drawn. Returns the names of the parameters that were drawn on this rank.
    """
    meta_model, model, stages = models
    filled = set(copies)
    if folder is not None:
        # Not strict: copies of tied weights are not stored here, and a new head may be missing.
        report = load_hf(model, folder, key_mapping=key_mapping, strict=False)
        quantized, read = (frozenset[str](),) * 2 if base is None else base.fill(model, device, key_mapping)
        filled.update(quantized)
        report = replace(
            report,
            missing=tuple(name for name in report.missing if name not in filled),
            unexpected=tuple(key for key in report.unexpected if key not in read),
        )
        _check(report, folder, meta_model, strict, new_head)
        filled.update(report.loaded)
    return draw_missing(meta_model, model, stages, filled, device)


def _check(report: LoadReport, folder: Path, meta_model: nn.Module, strict: bool, new_head: bool) -> None:
    """Raise if files do not fit, except as the caller allows; the same on every rank."""
    prefix = f"{getattr(meta_model, 'base_model_prefix', '')}."
    missing: Sequence[str] = report.missing
    unexpected: Sequence[str] = report.unexpected
    if new_head:
        missing = [name for name in missing if name.startswith(prefix)]
        unexpected = [name for name in unexpected if name.startswith(prefix)]
    if report.reshaped or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"{folder} does not fit {type(meta_model).__name__}: {report}\ngive the folder of such a model"
        )


# ---- arguments that all ranks must share -----------------------------------------------------------------------------

# Ranks compare the text of values, which is the same in every process that was given the same. `repr` is not: strings
# are hashed by a seed of each process, so sets show their elements in another order, and objects without a `repr` of
# their own show where they lie in memory.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def facts_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return each value as text, a dataclass field by field ("peft_config.r"), so that errors name the difference."""
    facts = {}
    for name, value in given.items():
        own = _fields_of(value)
        facts[name] = canonical_text(value) if own is None else type(value).__name__
        facts |= facts_of({f"{name}.{key}": each for key, each in (own or {}).items()})
    return facts


def canonical_text(value: Any) -> str:
    """Return a `repr` with sorted elements of sets and keys of mappings, at any depth, and without addresses."""
    if (own := _fields_of(value)) is not None:
        return f"{type(value).__name__}{canonical_text(own)}"
    if isinstance(value, Mapping):
        items = sorted((canonical_text(key), canonical_text(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, AbstractSet):
        return "{" + ", ".join(sorted(map(canonical_text, value))) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(canonical_text, value))})"
    return _ADDRESS.sub("", repr(value))


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass, including those without `repr`; None for anything else.

    Attributes are among them: those of BitsAndBytesConfig are no fields.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return None
    return getattr(value, "__dict__", {}) | {field.name: getattr(value, field.name) for field in fields(value)}


# ---- the model on the meta device ------------------------------------------------------------------------------------


def _find_folder(name_or_path: str | Path) -> Path:
    """Return the local folder of a model: the path itself, or its entry in the hub's cache."""
    if not isinstance(name_or_path, str | Path):
        raise ConfigurationError(
            f"the model is given as {name_or_path!r}; give a local folder, or a name in the hub's local cache"
        )
    path = Path(name_or_path)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name_or_path), local_files_only=True))
    except Exception as error:
        raise ConfigurationError(
            f"{str(name_or_path)!r} is neither a local folder nor in the local cache of the hub; nothing is "
            "downloaded here, but `hf download NAME --local-dir DIR` does so"
        ) from error


def _config_of(folder: Path | None, given: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a copy of the given config, or of the folder's, with fields changed."""
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


def _resolve_dtype(dtype: torch.dtype | str | None, config: Any, folder: Path | None) -> torch.dtype:
    """Return the dtype of the weights; for "auto" or None the config's, else that of most weights in the files."""
    if dtype in (None, "auto"):
        said = getattr(config, "dtype", None)
        if said not in (None, "auto"):
            return _resolve_dtype(said, config, folder)
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


def load_generation_config(model: Any, folder: Path) -> None:
    """Apply the folder's generation_config.json, if any."""
    if not (folder / "generation_config.json").is_file() or not model.can_generate():
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigurationError(f"{folder}: generation_config.json cannot be read: {words_of(error)}") from error


def _quantized_base(
    live: nn.Module, asked: Mapping[str, Any], context: MeshContext, folder: Path | None
) -> QuantizedBase | None:
    """Make modules of a model those of a quantised base, if one is asked for, or in the folder."""
    given = asked.get("quantization_config")
    found = getattr(getattr(live, "config", None), "quantization_config", None)
    if given is None and found is None:
        return None
    sizes = context.sizes
    if folder is None or max(sizes.tp, sizes.pp, sizes.ep) > 1 or asked["peft_config"] is None:
        raise ConfigurationError(
            "a quantised base is frozen, and its weights are sharded as bytes: give a folder and peft_config, and "
            "leave tp_size, pp_size and ep_size out"
        )
    if given is not None and found is not None:
        raise ConfigurationError("the folder is quantised already; leave quantization_config out")
    return QuantizedBase(found if given is None else given, live, folder, is_ready=given is None)


def refuse_quantised(model: nn.Module) -> None:
    """Raise for quantised weights, which cannot be cast into shards."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise CheckpointError(
            "the weights are quantised (quantization_config); convert them to floating point first, or train adapters "
            "on a model that transformers has loaded"
        )


# ---- files that plain transformers (or peft) loads -------------------------------------------------------------------

_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([KMG])(I?)B")


def attach_save_pretrained(model: Any, whole: nn.Module, config: Any, folder: Path | None) -> None:
    """Give a model its `save_pretrained`.

    `whole` is the model to save for a `Pipeline`: the stages of this rank as one model. `config` becomes config.json,
    as it was before the model was made parallel. Tokenizer and templates are copied from `folder`, if given.
    """

    def save_pretrained(
        self: Any,
        save_directory: str | Path,
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Save in the format of transformers; collective: all ranks call it. See docs/integrations.md.

        Args:
            self: The model; a deep copy saves its own weights.
            save_directory: Not there yet, or empty; seen by all ranks.
            max_shard_size: Of one file, in bytes or as "5GB".
            dtype: Of the weights in the files; None: that of the main weights.
            tokenizer: Saved along; None: what the source folder had.

        Raises:
            CheckpointError: It cannot be saved; nothing is left of it.
            ConfigurationError: An argument is out of range.
        """
        target = whole if isinstance(self, Pipeline) else self  # a deep copy saves itself
        given = {"save_directory": repr(save_directory), "max_shard_size": repr(max_shard_size), "dtype": repr(dtype)}
        target_bytes = together("saving the model", lambda: _checked(save_directory, max_shard_size), facts=given)
        reshard_units(target)  # after a forward without its backward, weights are views of memory that FSDP2 frees
        if getattr(unwrap(target), "peft_config", None):
            save_adapter(target, save_directory)
            return
        save_hf(
            target,
            save_directory,
            max_shard_bytes=target_bytes,
            dtype=dtype,
            carry_from=folder,
            config=config,
            tokenizer=tokenizer,
        )

    model.save_pretrained = types.MethodType(save_pretrained, model)


def _checked(folder: object, size: int | str) -> int:
    """Return the size of a file in bytes."""
    if not isinstance(folder, str | Path):
        raise ConfigurationError(f"save_directory is {folder!r}; give the path of a folder")
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(str(size).strip().upper())
    if found is None:
        raise ConfigurationError(f"max_shard_size={size!r}; give a number of bytes, or a string such as '5GB'")
    number, prefix, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** ("KMG".index(prefix) + 1))
