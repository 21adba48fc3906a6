"""From a model on the meta device to one that is parallel, has its weights, and can save itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.adapters import add_adapters, fill_adapters, without_copies
from megatron_fsdp.automodel.blueprints import refuse_quantised
from megatron_fsdp.automodel.config import DDPConfig, DistributedConfig, FSDP2Config, MegatronFSDPConfig
from megatron_fsdp.automodel.initial_values import allocate, draw_missing
from megatron_fsdp.automodel.managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from megatron_fsdp.automodel.merged_stages import merge_stages
from megatron_fsdp.automodel.meshes import MeshContext
from megatron_fsdp.automodel.pipeline_parallel import Pipeline, PipelineConfig, build_pipeline
from megatron_fsdp.automodel.saving import let_save
from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.checkpoint.report import LoadReport
from megatron_fsdp.errors import CheckpointError, ConfigurationError, warn_caller


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
