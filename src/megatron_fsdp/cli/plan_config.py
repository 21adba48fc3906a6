"""What `mfsdp train --config FILE` would run, as something to plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fsdp.config.engine_options import resolve_memory_options
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.resolve import resolve

if TYPE_CHECKING:
    from torch import nn

    from megatron_fsdp.plan.setup import OptimizerKind, Setup
    from megatron_fsdp.plan.workload import Workload

_RECOMPUTE = {None: "none", "full": "full", "selective": "attention"}


@dataclass(frozen=True)
class PlannedRun:
    """A run of the trainer, for the planner.

    Attributes:
        setup: Ranks, strategy, dtypes, batch and optimizer.
        workload: What one rank computes.
        build: Makes the whole model on the default device, to check a plan by.
        notices: What the trainer would tell.
    """

    setup: Setup
    workload: Workload
    build: Callable[[], nn.Module]
    notices: tuple[str, ...]


def planned_run(path: Path, num_ranks: int) -> PlannedRun:
    """Read a configuration as the trainer does, for so many accelerators that multiply bfloat16.

    Raises:
        ConfigurationError: The trainer would refuse it, or the planner does not know its engine.
    """
    job = resolve(parse_options(["--config", str(path)]), World(num_ranks, "cuda", multiplies_bf16=True))
    if job.engine != "megatron_fsdp":
        raise ConfigurationError(
            f"--config {path} trains with {'FSDP2' if job.engine == 'torch_fsdp2' else 'buckets'}, which cannot be "
            "planned: set use_megatron_fsdp in it, or plan by MODEL and flags"
        )
    setup = _setup(job)
    from megatron_fsdp.plan.models import build_meta_model

    model = job.options.model.hf_config or job.options.model.hf_model
    if model is None:
        return _of_decoder(job, setup, path)
    return PlannedRun(
        setup,
        _of_transformers(job, setup, model),
        lambda: build_meta_model(model, job.dtype),
        job.notices,
    )


def _setup(job: Job) -> Setup:
    from megatron_fsdp.plan.setup import Accumulation, ParallelRanks, Setup

    sizes, training = job.sizes, job.options.training
    resolved = resolve_ddp(job.ddp, sizes.data * sizes.context, 1)
    if job.ddp.delay_wgrad_compute:
        raise ConfigurationError(
            "--delay-wgrad-compute cannot be planned, since it keeps what is planned to be freed: leave it out of the "
            "configuration"
        )
    if training.recompute_granularity == "full" and training.recompute_num_layers is not None:
        raise ConfigurationError(
            "--recompute-num-layers cannot be planned, only all blocks or none: leave it out of the configuration"
        )
    if sizes.data % resolved.num_instances:
        raise ConfigurationError(
            f"{resolved.num_instances} instances of the optimizer do not divide the {sizes.data} data-parallel ranks "
            "that are left: give a divisor"
        )
    defers = resolved.strategy <= ShardingStrategy.optim  # as the trainer's engine accumulates
    return Setup(
        ParallelRanks(
            sizes.data // resolved.num_instances,
            resolved.num_instances,
            sizes.tensor,
            sizes.context,
            sizes.pipeline,
            sizes.expert,
        ),
        resolved.strategy,
        resolved.outer_strategy,
        resolved.policy,
        resolve_memory_options(_unsaid(), resolved.engine_config),
        overlap_grad_reduce=resolved.config.overlap_grad_reduce,
        microbatches=job.batch.microbatches,
        accumulation=Accumulation.LAST if defers else Accumulation.EVERY,
        optimizer=_optimizer(job),
        recompute=_RECOMPUTE[training.recompute_granularity],  # type: ignore[arg-type]
    )


def _unsaid() -> dict[str, Any]:
    """Arguments of the engine that the trainer leaves at their defaults; its configuration says the rest."""
    return {name: each.default for name, each in inspect.signature(MegatronFSDP.__init__).parameters.items()}


def _optimizer(job: Job) -> OptimizerKind:
    from megatron_fsdp.plan.front import find_optimizer

    chosen = job.options.optimizer
    if chosen.optimizer == "adam":
        return find_optimizer("adamw-fused")
    return find_optimizer("momentum" if chosen.sgd_momentum else "sgd")


def _of_transformers(job: Job, setup: Setup, model: Path) -> Workload:
    from megatron_fsdp.plan.front import make_workload

    return make_workload(
        model,
        setup.ranks,
        sequence_length=job.seq_length,
        micro_batch=job.batch.micro,
        dtype=job.dtype,
        name=str(model),
    )


def _of_decoder(job: Job, setup: Setup, path: Path) -> PlannedRun:
    """The package's own decoder; its vocabulary is that of the tokens, as far as options tell."""
    from megatron_fsdp.cli.plan_trainer import BYTES, build_decoder_model, decoder_workload

    options = job.options
    if options.model.transformer_impl != "local":
        raise ConfigurationError(
            f"--config {path} gives the shape of a model of transformers, which is planned by its configuration: set "
            "hf_config in it"
        )
    vocab_size = BYTES if options.data.tokenizer_type == "byte" else options.data.vocab_size
    if vocab_size is None:
        raise ConfigurationError(
            f"--config {path} does not say how many tokens there are: set vocab_size, or tokenizer_type: byte"
        )

    def build() -> Any:
        return build_decoder_model(options.model, vocab_size, job.dtype)

    workload = decoder_workload(build, setup.ranks, (job.batch.micro, job.seq_length), str(path))
    return PlannedRun(setup, workload, build, job.notices)
