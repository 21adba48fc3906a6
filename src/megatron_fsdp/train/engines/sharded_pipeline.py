"""A model of transformers in stages over pipeline-parallel ranks, each stage on this package's engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from megatron_fsdp.automodel import FSDP2Config, Pipeline, build_mesh_context
from megatron_fsdp.automodel.auto_model import refuse_quantised
from megatron_fsdp.automodel.initial_values import allocate
from megatron_fsdp.automodel.meshes import MeshContext
from megatron_fsdp.automodel.pipeline_parallel import build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.stages import tied_embeddings
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp import DistributedDataParallel, DistributedOptimizer
from megatron_fsdp.engine.wrap import EMPTY
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.models import build_from_config
from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.engines.context_cut import ContextCut
from megatron_fsdp.train.engines.experts import expert_ranks
from megatron_fsdp.train.engines.pipeline import LossInOrder, PipelineModel, pipeline_config
from megatron_fsdp.train.engines.sharded import wrap
from megatron_fsdp.train.engines.stepping import Place, call_transformers
from megatron_fsdp.train.engines.transformers_sharded import backend_of, cut_over_ranks, fill, recompute_layers
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.models.transformers_config import check_fits, transformers_config
from megatron_fsdp.train.options.job import Job


class ShardedPipelineModel(PipelineModel):
    """A pipeline with one stage per rank, each a wrapped model of this package; see `Trained`."""

    def __init__(
        self, job: Job, place: Place, pipeline: Pipeline, loss: LossInOrder, stage: DistributedDataParallel
    ) -> None:
        """Take a pipeline with its weights.

        Args:
            job: How it is trained.
            place: Of this rank.
            pipeline: Made with `pipeline_config`; its part is the module inside of `stage`.
            loss: That of its configuration.
            stage: Of this rank.
        """
        self._stage = stage
        super().__init__(job, place, pipeline, loss)
        self._sums = job.options.training.calculate_per_token_loss
        self._defers = stage.resolved.strategy <= ShardingStrategy.optim
        if self._defers:
            pipeline.finish_gradients = stage.finish_grad_sync

    @property
    def model(self) -> nn.Module:
        """The wrapped stage of this rank."""
        return self._stage

    def _connected(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return DistributedOptimizer(optimizer, self._stage)

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """See `Trained`; gradients of strategies without sharded gradients are reduced once."""
        once: AbstractContextManager[None] = self._stage.no_sync() if self._defers else nullcontext()
        with once:
            return super().accumulate(batches, factors)

    def _gradient_factor(self) -> float:
        """As without a pipeline: the engine averages over ranks, unless it was told to sum."""
        return 1.0 if self._sums else super()._gradient_factor()


def shard_stages(job: Job, rank: Rank, vocab_size: int) -> ShardedPipelineModel:
    """Build a model of transformers without memory, cut it into stages, and fill the shards of each; collective.

    Args:
        job: Which model, and how.
        rank: This process.
        vocab_size: Token ids of the data.

    Raises:
        CheckpointError: Weights do not fit the model.
        ConfigurationError: The model cannot be built or cut so.
    """
    sizes = job.sizes
    config = transformers_config(job.options.model, vocab_size)
    known = check_fits(config, vocab_size, job.seq_length)
    context = build_mesh_context(
        FSDP2Config(backend=backend_of(rank)), tp_size=sizes.tensor, pp_size=sizes.pipeline, cp_size=sizes.context
    )
    twin = build_from_config(config, job.dtype)
    refuse_quantised(twin)
    _refuse_tied_shards(twin, context)
    torch.manual_seed(job.options.training.seed)
    loss, wrapped = LossInOrder(), list[DistributedDataParallel]()
    pipeline = build_pipeline(
        copy.deepcopy(twin),
        context.axis("pp"),
        pipeline_config(job, loss),
        parallelize_stage=_sharding(job, context, wrapped),
        device=context.device,
        activation_dtype=job.dtype,
    )
    (stage,) = wrapped
    fill(twin, stage, job.options.model.hf_model, context.device, pipeline.tied_copies)
    pipeline.equalize_tied()
    stage.install_optimized_model_weights()
    cut = ContextCut(context.axis("cp")) if sizes.context > 1 else ContextCut()
    place = Place(context.device, context.data_rank, context.sizes.dp, known, call_transformers, cut)
    return ShardedPipelineModel(job, place, pipeline, loss, stage)


def _sharding(
    job: Job, context: MeshContext, wrapped: list[DistributedDataParallel]
) -> Callable[[nn.Module], nn.Module]:
    """What makes a stage parallel in place; its wrapper is added to the list."""
    mesh = context.device_mesh
    assert mesh is not None  # only DDPConfig has none
    dim = "dp_shard_cp" if job.sizes.context > 1 else "dp_shard"
    experts = expert_ranks(context, job.sizes.expert, dim)

    def shard(stage: nn.Module) -> nn.Module:
        experts.divide(stage)
        cut_over_ranks(job, stage, context)
        recompute_layers(stage, job.options.training)
        made = wrap(job, stage, mesh, dim, units=None, tp_dim=experts.tp_dim, expert_mesh=experts.mesh, init_meta=EMPTY)
        allocate(made, context.device)
        wrapped.append(made)
        return stage

    return shard


def _refuse_tied_shards(twin: nn.Module, context: MeshContext) -> None:
    """Refuse tied embeddings where the two ends would be cut at different places of the buffers of their stages."""
    if tied_embeddings(twin) is not None and context.sizes.dp_cp > 1:
        raise ConfigurationError(
            f"the embeddings and the head of {type(twin).__name__} are tied, and lie in two stages that this package's "
            f"engine cuts over {context.sizes.dp_cp} data- and context-parallel ranks at different places: give "
            "--untie-embeddings-and-output-weights (or a configuration that says so), --use-torch-fsdp2, or only "
            "pipeline-parallel ranks"
        )
