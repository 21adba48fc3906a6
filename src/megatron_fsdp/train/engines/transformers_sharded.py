"""Models of transformers on this package's engines: data, tensor, context, expert and pipeline parallelism."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.automodel import FSDP2Config, build_mesh_context
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.auto_model import adopt_generation_config, refuse_quantised
from megatron_fsdp.automodel.context_parallel import enable_context_parallel
from megatron_fsdp.automodel.expert_parallel import parallelize_experts
from megatron_fsdp.automodel.forwards import recompute_in_backward
from megatron_fsdp.automodel.initial_values import allocate, draw_missing
from megatron_fsdp.automodel.meshes import MeshContext
from megatron_fsdp.automodel.pipeline_parallel import build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.stages import tied_embeddings
from megatron_fsdp.automodel.tensor_parallel import parallelize_tensors
from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.engine.wrap import EMPTY
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.plan.models import build_from_config
from megatron_fsdp.train.engines.pipeline import LossInOrder, PipelineModel, pipeline_config
from megatron_fsdp.train.engines.sharded import ShardedModel, wrap
from megatron_fsdp.train.engines.trained import ContextCut, Place, Trained, call_transformers
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.models.build import check_fits, transformers_config
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import TrainingOptions

_EP = "ep"


def shard_transformers(job: Job, rank: Rank, vocab_size: int) -> Trained:
    """Build a model of transformers without memory, make it parallel, and fill its shards; collective.

    Args:
        job: Which model, and how.
        rank: This process.
        vocab_size: Token ids of the data.

    Raises:
        CheckpointError: Weights do not fit the model.
        ConfigurationError: The model cannot be built or cut so.
    """
    sizes, options = job.sizes, job.options
    config = transformers_config(options.model, vocab_size)
    check_fits(config, vocab_size, job.seq_length)
    context = build_mesh_context(
        FSDP2Config(backend=backend_of(rank)), tp_size=sizes.tensor, pp_size=sizes.pipeline, cp_size=sizes.context
    )
    twin = build_from_config(config, job.dtype)
    refuse_quantised(twin)
    if options.model.hf_model is not None:
        adopt_generation_config(twin, options.model.hf_model)
    torch.manual_seed(options.training.seed)
    place = place_in(context)
    if sizes.pipeline > 1:
        return _pipeline(job, place, twin, context)
    model = _parallelize(job, context, copy.deepcopy(twin))
    _fill(twin, model, options.model.hf_model, context.device)
    return ShardedModel(job, place, model)


def _pipeline(job: Job, place: Place, twin: nn.Module, context: MeshContext) -> PipelineModel:
    """Cut the model into stages, and shard and fill the stage of this rank."""
    if tied_embeddings(twin) is not None and context.sizes.dp_cp > 1:
        raise ConfigurationError(
            f"the embeddings and the head of {type(twin).__name__} are tied, and lie in two stages that this package's "
            f"engine cuts over {context.sizes.dp_cp} data- and context-parallel ranks at different places: give "
            "--untie-embeddings-and-output-weights (or a configuration that says so), --use-torch-fsdp2, or only "
            "pipeline-parallel ranks"
        )
    wrapped: list[DistributedDataParallel] = []

    def shard(stage: nn.Module) -> nn.Module:
        wrapped.append(_parallelize(job, context, stage))
        return stage

    loss = LossInOrder()
    pipeline = build_pipeline(
        copy.deepcopy(twin),
        context.axis("pp"),
        pipeline_config(job, loss),
        parallelize_stage=shard,
        device=context.device,
        activation_dtype=job.dtype,
    )
    (stage,) = wrapped
    _fill(twin, stage, job.options.model.hf_model, context.device, pipeline.tied_copies)
    pipeline.equalize_tied()
    stage.install_optimized_model_weights()
    return PipelineModel(job, place, pipeline, loss, stage)


def _parallelize(job: Job, context: MeshContext, model: nn.Module) -> DistributedDataParallel:
    """Parallelize a model on the meta device, or a stage, in place and in the only order that works; wrap it."""
    sizes, mesh = job.sizes, context.device_mesh
    assert mesh is not None  # only DDPConfig has none
    dim = "dp_shard_cp" if sizes.context > 1 else "dp_shard"
    cuts: dict[str, Any] = {"tp_dim": "tp"}
    if sizes.expert > 1:
        experts = _expert_mesh(context, sizes.expert, dim)
        _divide_experts(model, experts)
        cuts = {"expt_device_mesh": experts}  # experts have no tensor-parallel ranks
    if sizes.tensor > 1:
        parallelize_tensors(model, context.axis("tp"), sequence_parallel=job.options.parallel.sequence_parallel)
    if sizes.context > 1:
        enable_context_parallel(model, context.axis("cp"))
    recompute_layers(model, job.options.training)
    wrapped = wrap(job, model, mesh, dim, init_meta=EMPTY, **cuts)
    allocate(wrapped, context.device)
    return wrapped


def _expert_mesh(context: MeshContext, expert: int, dim: str) -> DeviceMesh:
    """Make the mesh of expert-parallel ranks, which are neighbours in one pipeline stage; collective.

    The data-parallel dimension has the name that it has for everything else.
    """
    sizes = context.sizes
    shape = (sizes.pp, sizes.dp_cp * sizes.tp // expert, expert)
    return init_device_mesh(context.device.type, shape, mesh_dim_names=("pp_of_experts", dim, _EP))[dim, _EP]


def _divide_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts as plain parameters, and send tokens to the ranks of their experts; in place."""
    for name in parallelize_experts(model, mesh[_EP]):
        experts = model.get_submodule(name)
        for key, param in list(experts.named_parameters(recurse=False)):
            assert isinstance(param, DTensor)
            own = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
            own.__dict__.update(param.__dict__)
            experts.register_parameter(key, own)


def _fill(
    twin: nn.Module, model: nn.Module, folder: Path | None, device: torch.device, copies: Collection[str] = ()
) -> None:
    """Load the shards' values from a folder, or draw them; collective.

    Args:
        twin: The whole model on the meta device; used up.
        model: Wrapped: the whole model, or a stage of it.
        folder: Of weights; None: they are drawn.
        device: Where values are drawn.
        copies: Names of tensors that get their values from another stage.
    """
    filled = set(copies)
    if folder is not None:
        report: Any = load_hf(model, folder, strict=False)
        if set(report.missing) - filled or report.unexpected or report.reshaped:
            raise CheckpointError(
                f"{folder} does not fit {type(twin).__name__}: {report}\nnothing can be trained from it"
            )
        filled.update(report.loaded)
    draw_missing(twin, model, [model], filled, device)


def place_in(context: MeshContext) -> Place:
    """Return the position of this rank, for a model of transformers."""
    cut = ContextCut(context.axis("cp")) if context.sizes.cp > 1 else ContextCut()
    return Place(context.device, context.data_rank, context.sizes.dp, call_transformers, cut)


def backend_of(rank: Rank) -> str:
    """Return the backend name for the configurations of automodel."""
    return "gloo" if rank.device.type == "cpu" else "nccl"


def recompute_layers(model: nn.Module, training: TrainingOptions) -> None:
    """Recompute the first decoder layers in backward, as many as `--recompute-num-layers` says; in place.

    Args:
        model: Or a stage of one, whose layers have the numbers of the whole model.
        training: Says whether, and how many.
    """
    if training.recompute_granularity is None:
        return
    first = training.recompute_num_layers
    for name, layer in find_layers(model).named():
        if first is None or int(name.rpartition(".")[2]) < first:
            recompute_in_backward(layer)
