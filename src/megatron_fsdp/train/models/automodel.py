"""Engines over `megatron_fsdp.automodel`: models of transformers, in all kinds of parallelism, and PyTorch's FSDP2.

Importing this imports transformers. Pipelines run all microbatches of a step in one call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    FSDP2Config,
    MegatronFSDPConfig,
    Pipeline,
    PipelineConfig,
    build_mesh_context,
    connect_optimizer,
)
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.auto_model import fill_weights, load_generation_config, refuse_quantised
from megatron_fsdp.automodel.expert_parallel import engine_mesh
from megatron_fsdp.automodel.forwards import MLP_NAMES, recompute_in_backward
from megatron_fsdp.automodel.initial_values import draw_missing
from megatron_fsdp.automodel.managers import divide, shard_by_layers
from megatron_fsdp.automodel.meshes import MeshContext
from megatron_fsdp.automodel.pipeline_parallel import build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.stages import tied_embeddings
from megatron_fsdp.config.engine_options import ALLOCATE_ONLY
from megatron_fsdp.config.hf_config import build_from_config
from megatron_fsdp.ddp import DistributedDataParallel, DistributedOptimizer
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.tokens import Batch
from megatron_fsdp.train.models.build import build_decoder, check_fits, transformers_config
from megatron_fsdp.train.models.trained import (
    Place,
    Trained,
    build_optimizer,
    seed_dropout,
    token_losses,
    trained_by_microbatches,
    wrap,
)
from megatron_fsdp.train.options import TrainingOptions
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.wrap.meta_init import allocate

# ---- pipelines -------------------------------------------------------------------------------------------------------


class LossInOrder:
    """The loss function of the schedule, which calls it for the microbatches in their order."""

    def __init__(self) -> None:
        self.factors: list[Tensor] = []  # [samples, length] of each microbatch to come; empty: all count alike
        self.seen: list[Tensor] = []  # [samples, length] losses so far, without gradients

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over tokens of factor times loss."""
        losses = token_losses(logits, labels)
        self.seen.append(losses.detach())
        return (losses * self.factors.pop(0)).sum() if self.factors else losses.sum()


def pipeline_config(job: Job, loss: LossInOrder) -> PipelineConfig:
    """Choose 1F1B if there are enough microbatches to fill the stages, else GPipe."""
    fills = job.batch.microbatches >= job.sizes.pipeline
    return PipelineConfig("1f1b" if fills else "gpipe", pp_microbatch_size=job.batch.micro, loss_fn=loss)


class PipelineModel(Trained):
    """A pipeline with one stage per rank, each sharded by FSDP2 or a wrapped model of this package."""

    def __init__(
        self,
        job: Job,
        place: Place,
        pipeline: Pipeline,
        loss: LossInOrder,
        stage: DistributedDataParallel | None = None,
    ) -> None:
        """Wrap a pipeline made with `pipeline_config` and `loss`; `stage` is None if FSDP2 shards it."""
        part = pipeline.parts[0]  # under the names of the whole model
        optimizer = build_optimizer(part, job.options.optimizer, undecayed=pipeline.tied_copies)
        connected = connect_optimizer(pipeline, optimizer) if stage is None else DistributedOptimizer(optimizer, stage)
        super().__init__(job, place, part if stage is None else stage, connected)
        self._pipeline, self._loss, self._stage = pipeline, loss, stage
        self._own, self._measured = None, pipeline
        self._fewest = pipeline.pp_mesh.size() if pipeline.config.pp_schedule == "1f1b" else 1
        if stage is not None and self.defers:
            pipeline.finish_gradients = stage.finish_grad_sync

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """Run all microbatches through the pipeline (see `Trained`); strategies 0 and 1 reduce gradients once."""
        weight, place = self._loss_weight, self._place
        self._loss.factors = [place.take(factor) * weight for factor in factors]
        stage = self._pipeline.pp_mesh.get_local_rank()
        seed_dropout(batches[0], stage * place.context_size + place.context_index)
        with self._stage.no_sync() if self._stage is not None and self.defers else nullcontext():
            loss = self._run(self._pipeline.step, batches)
        self._loss.seen.clear()
        return place.add_up((loss / weight).reshape(1))

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """Return token losses (see `Trained`); copies of the microbatch fill the pipeline."""
        self._run(self._pipeline.eval_step, [batch] * self._fewest)
        length = batch.inputs.shape[1] // self._place.context_size
        found = torch.empty(batch.inputs.shape[0], length, device=self.device)
        if self._pipeline.has_last_stage:
            found = self._loss.seen[0].contiguous()
        self._loss.seen.clear()
        group = self._pipeline.pp_mesh.get_group()
        dist.broadcast(found, group=group, group_src=self._pipeline.num_stages - 1)
        return self._place.join(found)

    def _run(self, step: Callable[..., Tensor], batches: Sequence[Batch]) -> Tensor:
        place = self._place
        inputs = torch.cat([place.take(batch.inputs) for batch in batches])
        targets = torch.cat([place.take(batch.targets) for batch in batches])
        positions = place.position_ids(torch.cat([batch.inputs for batch in batches]))
        return step(inputs, shift_labels=targets, num_label_tokens=1, **positions)


# ---- this package's engine -------------------------------------------------------------------------------------------


def shard_transformers(job: Job, rank: Rank, vocab_size: int) -> Trained:
    """Build a model of transformers without memory, make it parallel, and fill its shards; collective."""
    sizes, options = job.sizes, job.options
    config = transformers_config(options.model, vocab_size)
    check_fits(config, vocab_size, job.seq_length)
    meshes = FSDP2Config(backend=backend_of(rank))
    axes = {"tp_size": sizes.tensor, "pp_size": sizes.pipeline, "cp_size": sizes.context, "ep_size": sizes.expert}
    context = build_mesh_context(meshes, **axes)
    meta_model = build_from_config(config, job.dtype)
    refuse_quantised(meta_model)
    if options.model.hf_model is not None:
        load_generation_config(meta_model, options.model.hf_model)
    torch.manual_seed(options.training.seed)
    place = place_in(context)
    if sizes.pipeline > 1:
        return _pipeline(job, place, meta_model, context)
    model = _parallelize(job, context, copy.deepcopy(meta_model))
    fill_weights((meta_model, model, [model]), options.model.hf_model, context.device)
    return trained_by_microbatches(job, place, model)


def _pipeline(job: Job, place: Place, meta_model: nn.Module, context: MeshContext) -> PipelineModel:
    if tied_embeddings(meta_model) is not None and context.sizes.dp_cp > 1:
        raise ConfigurationError(
            f"the embeddings and the head of {type(meta_model).__name__} are tied, and lie in two stages that this "
            f"package's engine cuts over {context.sizes.dp_cp} data- and context-parallel ranks at different places: "
            "give --untie-embeddings-and-output-weights (or a configuration that says so), --use-torch-fsdp2, or only "
            "pipeline-parallel ranks"
        )
    wrapped: list[DistributedDataParallel] = []

    def shard(stage: nn.Module) -> nn.Module:
        wrapped.append(_parallelize(job, context, stage))
        return stage

    loss = LossInOrder()
    pipeline = build_pipeline(
        copy.deepcopy(meta_model),
        context.axis("pp"),
        pipeline_config(job, loss),
        parallelize_stage=shard,
        device=context.device,
        activation_dtype=job.dtype,
    )
    (stage,) = wrapped
    fill_weights((meta_model, stage, [stage]), job.options.model.hf_model, context.device, pipeline.tied_copies)
    pipeline.equalize_tied()
    stage.install_optimized_model_weights()
    return PipelineModel(job, place, pipeline, loss, stage)


def _parallelize(job: Job, context: MeshContext, model: nn.Module) -> DistributedDataParallel:
    """Parallelize a model on the meta device, or a stage, in place and in the only order that works; wrap it."""
    sizes, mesh = job.sizes, context.device_mesh
    assert mesh is not None  # only DDPConfig has none
    dim = "dp_shard_cp" if sizes.context > 1 else "dp_shard"
    cuts: dict[str, Any] = {"tp_dim": "tp"}
    parallel = job.options.parallel
    splits_tokens = parallel.sequence_parallel and sizes.tensor > 1
    config = MegatronFSDPConfig(sequence_parallel=splits_tokens, ulysses_degree=parallel.ulysses_degree)
    divide(model, config, mesh, context.moe_mesh)
    if context.moe_mesh is not None:
        cuts["expt_device_mesh"] = engine_mesh(context.moe_mesh, dim)
    recompute_layers(model, job.options.training, is_stage=sizes.pipeline > 1)
    wrapped = wrap(job, model, mesh, dim, init_model_with_meta_device=ALLOCATE_ONLY, **cuts)
    allocate(wrapped, context.device)
    return wrapped


def place_in(context: MeshContext) -> Place:
    """Return the position of this rank, for a model of transformers."""
    sequence = context.axis("cp") if context.sizes.cp > 1 else None
    return Place(context.device, context.data_rank, context.sizes.dp, True, sequence)


def backend_of(rank: Rank) -> str:
    """Return the backend name for the configurations of automodel."""
    return "gloo" if rank.device.type == "cpu" else "nccl"


def recompute_layers(model: nn.Module, training: TrainingOptions, *, is_stage: bool = False) -> None:
    """Recompute the first `--recompute-num-layers` decoder layers of a model, or of a stage, in backward; in place.

    Or, with granularity selective, `--recompute-modules` of each layer; a whole model must have some of them.
    """
    if training.recompute_granularity is None:
        return
    layers, first, words = find_layers(model).named(), training.recompute_num_layers, training.recompute_modules
    parts = [layer for name, layer in layers if first is None or int(name.rpartition(".")[2]) < first]
    if training.recompute_granularity == "selective":
        parts = [part for layer in parts for part in _parts_of(layer, words)]
        if not (parts or is_stage):
            raise ConfigurationError(
                f"--recompute-modules {' '.join(words)}: the layers of {type(model).__name__} have no such parts; name "
                "others, or give --recompute-granularity full"
            )
    for part in parts:
        recompute_in_backward(part)


def _parts_of(layer: nn.Module, words: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the parts of a decoder layer that `--recompute-modules` names; none inside another."""
    for name, part in layer.named_children():
        children = dict(part.named_children())
        kind = "moe" if "experts" in children else "mlp" if name in MLP_NAMES else "layernorm" if "norm" in name else ""
        if kind in words:
            yield part
        elif kind == "moe" and "shared_experts" in words:
            yield from (child for name, child in children.items() if name.startswith("shared_expert"))


# ---- PyTorch's FSDP2 -------------------------------------------------------------------------------------------------


def policy_of(job: Job) -> MixedPrecisionPolicy:
    """Return the dtypes: weights and optimizer in float32, compute and gradient reduction by the job."""
    return MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=job.fsdp2_reduce_dtype, output_dtype=None)


def shard_decoder_by_fsdp2(job: Job, rank: Rank, vocab_size: int) -> Trained:
    """Shard the decoder of this package, data-parallel over all ranks."""
    decoder = build_decoder(job, vocab_size, rank.device)
    is_meta = job.options.parallel.init_model_with_meta_device
    meta_model = copy.deepcopy(decoder) if is_meta else None
    mesh = init_device_mesh(rank.device.type, (rank.count,), mesh_dim_names=("dp",))
    shard_by_layers(decoder, mesh, mp_policy=policy_of(job), offload_policy=None)
    if meta_model is not None:
        allocate(decoder, rank.device)
        torch.manual_seed(job.options.training.seed)
        draw_missing(meta_model, decoder, [decoder], set(), rank.device)
    _set_resharding(decoder, job)
    return trained_by_microbatches(job, Place(rank.device, rank.index, rank.count), decoder)


def shard_transformers_by_fsdp2(job: Job, rank: Rank, vocab_size: int) -> Trained:
    """Build a model of transformers without memory, make it parallel, and fill its shards; collective."""
    config = transformers_config(job.options.model, vocab_size)
    check_fits(config, vocab_size, job.seq_length)
    torch.manual_seed(job.options.training.seed)
    loss, sizes, folder = LossInOrder(), job.sizes, job.options.model.hf_model
    arguments: dict[str, Any] = {
        "distributed_config": FSDP2Config(
            sequence_parallel=job.options.parallel.sequence_parallel,
            ulysses_degree=job.options.parallel.ulysses_degree,
            mp_policy=policy_of(job),
            backend=backend_of(rank),
        ),
        "tp_size": sizes.tensor,
        "pp_size": sizes.pipeline,
        "cp_size": sizes.context,
        "ep_size": sizes.expert,
        "pipeline_config": pipeline_config(job, loss) if sizes.pipeline > 1 else None,
        "dtype": torch.float32,
    }
    make = AutoModelForCausalLM.from_config if folder is None else AutoModelForCausalLM.from_pretrained
    model = make(folder or config, **arguments)
    for part in model.parts if sizes.pipeline > 1 else [model]:
        recompute_layers(part, job.options.training, is_stage=sizes.pipeline > 1)
        _set_resharding(part, job)
    place = place_in(model.mesh_context)
    if sizes.pipeline > 1:
        return PipelineModel(job, place, model, loss)
    return trained_by_microbatches(job, place, model)


def _set_resharding(model: nn.Module, job: Job) -> None:
    if job.options.parallel.torch_fsdp2_no_reshard_after_forward:
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_forward(False)  # of every unit in it
