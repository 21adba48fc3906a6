"""Cut a model into the stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.pipeline_parallel.config import PipelineConfig
from megatron_fsdp.automodel.pipeline_parallel.pipeline import Pipeline, PipelineParts
from megatron_fsdp.automodel.pipeline_parallel.schedules import count_microbatches, schedule_named
from megatron_fsdp.automodel.pipeline_parallel.split import count_stages, split_layers
from megatron_fsdp.automodel.pipeline_parallel.stage_model import cut_stage, find_ends, tied_embeddings
from megatron_fsdp.errors import ConfigurationError


def build_pipeline(
    model: nn.Module | Callable[[], nn.Module],
    pp_mesh: DeviceMesh,
    config: PipelineConfig,
    *,
    parallelize_stage: Callable[[nn.Module], nn.Module],
    device: torch.device,
    activation_dtype: torch.dtype | None = None,
) -> Pipeline:
    """Cut a causal language model of transformers into stages, and prepare those of this rank.

    Stage i is on rank i modulo the number of ranks. The embeddings are in the first stage, the final norm and the head
    in the last, rotary embeddings everywhere.

    Args:
        model: The whole model, on the meta device or with memory, or a function that gives it. It is left as it is;
            the parts have its tensors, so drop it to free those of other stages.
        pp_mesh: 1-D mesh of the pipeline's ranks.
        config: Schedule and sizes.
        parallelize_stage: Makes a part of a rank ready: memory, weights, sharding. What it gives must be the part
            itself or stand for it, so wrap the part itself by `fully_shard` besides its layers: gradients are then
            reduced once in a step. `reshard_after_forward=False` spares gathers between microbatches.
        device: Of this rank's parts.
        activation_dtype: Of the hidden states that stages send; None: that of the parameters. Under mixed precision
            give the dtype of FSDP2's outputs.

    Raises:
        ConfigurationError: The model cannot be cut, or sizes do not fit; the same on all ranks.
    """
    if pp_mesh.ndim != 1:
        raise ConfigurationError(
            f"pp_mesh has {pp_mesh.ndim} dimensions ({pp_mesh.mesh_dim_names}) but has to have one; give mesh['pp']"
        )
    whole = model if isinstance(model, nn.Module) else model()
    find_ends(whole)
    kind, ranks = schedule_named(config.pp_schedule), pp_mesh.size()
    num_layers = len(find_layers(whole).modules())
    num_stages = count_stages(kind, num_layers, ranks, config.layers_per_stage)
    pieces = split_layers(num_layers, num_stages, config.layers_per_stage)
    if config.pp_batch_size > 1:
        count_microbatches(kind, config.pp_batch_size, config.pp_microbatch_size, ranks, num_stages)
    tied = tied_embeddings(whole)
    if tied is not None and ranks == 1 and num_stages > 1:
        raise ConfigurationError(
            f"{type(whole).__name__} has tied embeddings, whose ends must be on two ranks, but the pipeline has one; "
            "use no pipeline"
        )
    dtype = activation_dtype or next(param.dtype for param in whole.parameters() if param.is_floating_point())
    parts = {}
    for index in range(pp_mesh.get_local_rank(), num_stages, ranks):
        part = cut_stage(_copy_of_modules(whole), *pieces[index], index == 0, index == num_stages - 1)
        parts[index] = parallelize_stage(part)
    return Pipeline(PipelineParts(parts, num_stages, dtype, tied), pp_mesh, config, device)


def _copy_of_modules(model: nn.Module) -> nn.Module:
    """Modules of their own that share all tensors with the model's."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
