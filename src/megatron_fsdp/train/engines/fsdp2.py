"""PyTorch's FSDP2 as the engine, for this package's decoder or models of transformers, with further parallelism."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    FSDP2Config,
    accumulation_context,
    clip_grad_norm_,
    connect_optimizer,
)
from megatron_fsdp.automodel.gradients import count_zero_gradients, gather_gradients, norm_of_parameters
from megatron_fsdp.automodel.initial_values import allocate, draw_missing
from megatron_fsdp.automodel.managers import shard_by_layers
from megatron_fsdp.train.engines.pipeline import LossInOrder, PipelineModel, pipeline_config
from megatron_fsdp.train.engines.trained import MicrobatchModel, Place, build_optimizer
from megatron_fsdp.train.engines.transformers_sharded import backend_of, place_in, recompute_layers
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.models.build import build_decoder, check_fits, transformers_config
from megatron_fsdp.train.options.job import Job


class Fsdp2Model(MicrobatchModel):
    """A model that FSDP2 shards."""

    def __init__(self, job: Job, place: Place, model: nn.Module) -> None:
        """Take a sharded model with its weights."""
        optimizer = connect_optimizer(model, build_optimizer(model, job.options.optimizer))
        super().__init__(job, place, model, optimizer)

    def _microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        return accumulation_context(self.model, is_last, defer_grad_sync=True)

    def _scale_gradients(self, factor: float) -> None:
        gather_gradients(self.model).scale(factor)

    def _clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self.model, max_norm)

    def norm_of_parameters(self) -> float:
        """Return the norm of all weights (see `Trained`)."""
        return norm_of_parameters(self.model)

    def count_zero_gradients(self) -> int:
        """Return the number of zeros (see `Trained`)."""
        return count_zero_gradients(self.model)


def policy_of(job: Job) -> MixedPrecisionPolicy:
    """Return the dtypes: weights and optimizer in float32, compute and gradient reduction as the job says."""
    return MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=job.fsdp2_reduce_dtype, output_dtype=None)


def shard_decoder_by_fsdp2(job: Job, rank: Rank, vocab_size: int) -> Fsdp2Model:
    """Shard the decoder of this package, data-parallel over all ranks.

    Args:
        job: How.
        rank: This process.
        vocab_size: Token ids of the data.
    """
    decoder = build_decoder(job, vocab_size, rank.device)
    is_meta = job.options.parallel.init_model_with_meta_device
    twin = copy.deepcopy(decoder) if is_meta else None
    mesh = init_device_mesh(rank.device.type, (rank.count,), mesh_dim_names=("dp",))
    shard_by_layers(decoder, mesh, mp_policy=policy_of(job), offload_policy=None)
    if twin is not None:
        allocate(decoder, rank.device)
        torch.manual_seed(job.options.training.seed)
        draw_missing(twin, decoder, [decoder], set(), rank.device)
    _reshard_as_told(decoder, job)
    return Fsdp2Model(job, Place(rank.device, rank.index, rank.count), decoder)


def shard_transformers_by_fsdp2(job: Job, rank: Rank, vocab_size: int) -> Fsdp2Model | PipelineModel:
    """Build a model of transformers without memory, make it parallel, and fill its shards; collective.

    Args:
        job: Which model, and how.
        rank: This process.
        vocab_size: Token ids of the data.

    Raises:
        CheckpointError: Weights do not fit the model.
        ConfigurationError: The model cannot be built or cut so.
    """
    config = transformers_config(job.options.model, vocab_size)
    check_fits(config, vocab_size, job.seq_length)
    torch.manual_seed(job.options.training.seed)
    loss = LossInOrder()
    model = _build(job, rank, config, loss)
    for part in model.parts if job.sizes.pipeline > 1 else [model]:
        recompute_layers(part, job.options.training)
        _reshard_as_told(part, job)
    place = place_in(model.mesh_context)
    return PipelineModel(job, place, model, loss) if job.sizes.pipeline > 1 else Fsdp2Model(job, place, model)


def _build(job: Job, rank: Rank, config: Any, loss: LossInOrder) -> Any:
    sizes, parallel = job.sizes, job.options.parallel
    arguments: dict[str, Any] = {
        "distributed_config": FSDP2Config(
            sequence_parallel=parallel.sequence_parallel, mp_policy=policy_of(job), backend=backend_of(rank)
        ),
        "tp_size": sizes.tensor,
        "pp_size": sizes.pipeline,
        "cp_size": sizes.context,
        "ep_size": sizes.expert,
        "dtype": torch.float32,
    }
    if sizes.pipeline > 1:
        arguments["pipeline_config"] = pipeline_config(job, loss)
    folder = job.options.model.hf_model
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, **arguments)
    return AutoModelForCausalLM.from_config(config, **arguments)


def _reshard_as_told(model: nn.Module, job: Job) -> None:
    """With `--torch-fsdp2-no-reshard-after-forward`, keep every unit unsharded from forward to backward."""
    if not job.options.parallel.torch_fsdp2_no_reshard_after_forward:
        return
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_reshard_after_forward(False, recurse=False)
