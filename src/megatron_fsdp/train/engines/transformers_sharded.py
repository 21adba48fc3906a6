"""Models of transformers on this package's engines: data-, tensor-, context- and expert-parallel."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.automodel import MegatronFSDPConfig, build_mesh_context
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.blueprints import adopt_generation_config, refuse_quantised
from megatron_fsdp.automodel.context_parallel import enable_context_parallel
from megatron_fsdp.automodel.forwards import recompute_in_backward
from megatron_fsdp.automodel.initial_values import allocate, draw_missing
from megatron_fsdp.automodel.meshes import MeshContext, get_megatron_dp_axis
from megatron_fsdp.automodel.tensor_parallel import parallelize_tensors
from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.engine.wrap import EMPTY
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.plan.models import build_from_config
from megatron_fsdp.train.engines.context_cut import ContextCut
from megatron_fsdp.train.engines.experts import expert_ranks
from megatron_fsdp.train.engines.sharded import ShardedModel, wrap
from megatron_fsdp.train.engines.stepping import Place, call_transformers
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.models.transformers_config import check_fits, transformers_config
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import TrainingOptions


def shard_transformers(job: Job, rank: Rank, vocab_size: int) -> ShardedModel:
    """Build a model of transformers without memory, make it parallel, and fill its shards; collective.

    Args:
        job: Which model, and how.
        rank: This process.
        vocab_size: Token ids of the data.

    Raises:
        CheckpointError: Weights do not fit the model.
        ConfigurationError: The model cannot be built or cut so.
    """
    options = job.options
    config = transformers_config(options.model, vocab_size)
    known = check_fits(config, vocab_size, job.seq_length)
    backend = backend_of(rank)
    context = build_mesh_context(
        MegatronFSDPConfig(backend=backend), tp_size=job.sizes.tensor, cp_size=job.sizes.context
    )
    twin = build_from_config(config, job.dtype)
    refuse_quantised(twin)
    if options.model.hf_model is not None:
        adopt_generation_config(twin, options.model.hf_model)
    torch.manual_seed(options.training.seed)
    mesh = context.device_mesh
    assert mesh is not None  # only DDPConfig has none
    dim = get_megatron_dp_axis(mesh)
    experts = expert_ranks(context, job.sizes.expert, dim)
    live = copy.deepcopy(twin)
    experts.divide(live)
    cut = cut_over_ranks(job, live, context)
    recompute_layers(live, options.training)
    model = wrap(job, live, mesh, dim, units=None, tp_dim=experts.tp_dim, expert_mesh=experts.mesh, init_meta=EMPTY)
    allocate(model, context.device)
    fill(twin, model, options.model.hf_model, context.device)
    place = Place(context.device, context.data_rank, context.sizes.dp, known, call_transformers, cut)
    return ShardedModel(job, place, model)


def backend_of(rank: Rank) -> str:
    """What tells the configurations of automodel where ranks compute."""
    return "gloo" if rank.device.type == "cpu" else "nccl"


def recompute_layers(model: nn.Module, training: TrainingOptions) -> None:
    """Let backward compute the first decoder layers again, as many as `--recompute-num-layers` says; in place.

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


def cut_over_ranks(job: Job, model: nn.Module, context: MeshContext) -> ContextCut:
    """Cut the matrices, and let attention see sequences that are cut; in place."""
    cut = ContextCut()
    if job.sizes.tensor > 1:
        parallelize_tensors(model, context.axis("tp"), sequence_parallel=job.options.parallel.sequence_parallel)
    if job.sizes.context > 1:
        cut = ContextCut(context.axis("cp"))
        enable_context_parallel(model, context.axis("cp"))
    return cut


def fill(
    twin: nn.Module, model: nn.Module, folder: Path | None, device: torch.device, copies: Collection[str] = ()
) -> None:
    """Give the shards their values: of a folder, or drawn; collective.

    Args:
        twin: The whole model on the meta device; used up.
        model: Wrapped: the whole model, or a stage of it.
        folder: Of weights; None: they are drawn.
        device: Where values are drawn.
        copies: Names of what gets its values from another stage.

    Raises:
        CheckpointError: The weights do not fit the model.
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
