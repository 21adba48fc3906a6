"""Plans what the trainer would run: its model presets, and `mfsdp train --config FILE`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_fsdp.config.engine_options import resolve_memory_options
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.plan.planning import Workload, WorkloadOptions, make_workload
from megatron_fsdp.plan.setup import Accumulation, ParallelRanks, Setup, find_optimizer
from megatron_fsdp.train.models.build import model_shape
from megatron_fsdp.train.models.decoder import Block, Decoder, next_token_loss
from megatron_fsdp.train.options.command_line import Layer, assemble, find_preset, parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.options import ModelOptions
from megatron_fsdp.train.options.resolve import resolve

_BYTES = 256
"""The vocabulary of the trainer's default tokens."""

# ---- presets --------------------------------------------------------------------------------------------------------


def trainer_workload(
    name: str, ranks: ParallelRanks, sequence_length: int | None, micro_batch: int | None, dtype: torch.dtype
) -> Workload:
    """Build the workload of one rank of the trainer with a preset, which has a batch of its own.

    Raises:
        ConfigurationError: The ranks are those of another parallelism.
    """
    options, own_micro_batch = _preset(name)
    shape = (
        own_micro_batch if micro_batch is None else micro_batch,
        (options.seq_length or 1) if sequence_length is None else sequence_length,
    )
    return _workload(options, _BYTES, dtype, ranks, shape, name)


def _preset(name: str) -> tuple[ModelOptions, int]:
    """Return a preset's model options and its microbatch."""
    options = assemble((Layer(f"preset {name}", find_preset(name)),))
    return options.model, options.training.micro_batch_size or 1


def _workload(
    options: ModelOptions, vocab_size: int, dtype: torch.dtype, ranks: ParallelRanks, shape: tuple[int, int], name: str
) -> Workload:
    """Build the workload of one rank with the trainer's own decoder, on (sequences, tokens)."""
    with torch.device("meta"):
        model = Decoder(model_shape(options, vocab_size)).to(dtype)
    tokens = torch.empty(shape, dtype=torch.long, device="meta")
    asked = WorkloadOptions(
        inputs=tokens,
        loss_fn=lambda logits: next_token_loss(logits, tokens),
        fsdp_unit_modules=[Block],
        name=name,
        tokens=tokens.numel(),
    )
    return make_workload(model, ranks, asked)


# ---- configurations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """A run of the trainer, for the planner; the trainer would print the notices."""

    setup: Setup
    workload: Workload
    notices: tuple[str, ...]


def planned_run(path: Path, num_ranks: int) -> PlannedRun:
    """Read a configuration as the trainer does, for `num_ranks` accelerators with bfloat16 matrix products.

    Raises:
        ConfigurationError: The trainer would refuse it, or the planner does not know its engine.
    """
    job = resolve(parse_options(["--config", str(path)]), World(num_ranks, "cuda"))
    _check(job, path)
    setup, options = _setup(job), job.options
    model = options.model.hf_config or options.model.hf_model
    if model is not None:
        asked = WorkloadOptions(job.seq_length, job.batch.micro, job.dtype, name=str(model))
        workload = make_workload(model, setup.ranks, asked)
        return PlannedRun(setup, workload, job.notices)
    vocab_size = _BYTES if options.data.tokenizer_type == "byte" else options.data.vocab_size
    if vocab_size is None:
        raise ConfigurationError(
            f"--config {path} does not say how many tokens there are: set vocab_size, or tokenizer_type: byte"
        )

    shape = job.batch.micro, job.seq_length
    workload = _workload(options.model, vocab_size, job.dtype, setup.ranks, shape, str(path))
    return PlannedRun(setup, workload, job.notices)


def _check(job: Job, path: Path) -> None:
    """Refuse runs that the planner does not cover."""
    training, model = job.options.training, job.options.model
    if job.engine != "megatron_fsdp":
        raise ConfigurationError(
            f"--config {path} trains with {'FSDP2' if job.engine == 'torch_fsdp2' else 'buckets'}, which cannot be "
            "planned: set use_megatron_fsdp in it, or plan by MODEL and flags"
        )
    if job.ddp.delay_wgrad_compute:
        raise ConfigurationError(
            "--delay-wgrad-compute cannot be planned, since it keeps what is planned to be freed: leave it out of the "
            "configuration"
        )
    if training.recompute_granularity == "full" and training.recompute_num_layers is not None:
        raise ConfigurationError(
            "--recompute-num-layers cannot be planned, only all blocks or none: leave it out of the configuration"
        )
    if not (model.hf_config or model.hf_model) and model.transformer_impl != "local":
        raise ConfigurationError(
            f"--config {path} gives the shape of a model of transformers, which is planned by its configuration: set "
            "hf_config in it"
        )


def _setup(job: Job) -> Setup:
    sizes, chosen = job.sizes, job.options.optimizer
    resolved = resolve_ddp(job.ddp, sizes.data * sizes.context, 1)
    if sizes.data % resolved.num_instances:
        raise ConfigurationError(
            f"{resolved.num_instances} instances of the optimizer do not divide the {sizes.data} data-parallel ranks "
            "that are left: give a divisor"
        )
    instances, defers = resolved.num_instances, resolved.strategy <= ShardingStrategy.optim  # as the trainer's engine
    momentum = "momentum" if chosen.sgd_momentum else "sgd"
    arguments = inspect.signature(MegatronFSDP.__init__).parameters  # whose defaults the trainer leaves alone
    unsaid = {name: each.default for name, each in arguments.items()}
    return Setup(
        ParallelRanks(sizes.data // instances, instances, sizes.tensor, sizes.context, sizes.pipeline, sizes.expert),
        resolved.strategy,
        resolved.outer_strategy,
        resolved.policy,
        resolve_memory_options(unsaid, resolved.engine_config),
        overlap_grad_reduce=resolved.config.overlap_grad_reduce,
        microbatches=job.batch.microbatches,
        accumulation=Accumulation.LAST if defers else Accumulation.EVERY,
        optimizer=find_optimizer("adamw-fused" if chosen.optimizer == "adam" else momentum),
        recompute=job.options.training.recompute_granularity or "none",
        sequence_parallel=job.options.parallel.sequence_parallel,
    )
