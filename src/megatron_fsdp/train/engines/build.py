"""Builds the sharded model of a job: chooses the engine and the kind of model."""

from __future__ import annotations

from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.engines.sharded import shard_decoder
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.checks import needs_transformers, uses_transformers
from megatron_fsdp.train.options.job import Job


def build(job: Job, vocab_size: int, rank: Rank) -> Trained:
    """Build the model of a run, sharded, with its optimizer.

    Args:
        job: The run.
        vocab_size: Token ids of the data.
        rank: This process.

    Raises:
        CheckpointError: Weights of `--hf-model` do not fit.
        ConfigurationError: The model cannot be built or sharded so, or transformers is missing (MissingPackageError).
    """
    is_ours = not uses_transformers(job.options.model)
    if is_ours and job.engine != "torch_fsdp2":
        return shard_decoder(job, rank, vocab_size)
    require("transformers", needs_transformers(job.options) or "this model")
    from megatron_fsdp.train.engines import fsdp2, transformers_sharded

    if job.engine != "torch_fsdp2":
        return transformers_sharded.shard_transformers(job, rank, vocab_size)
    if is_ours:
        return fsdp2.shard_decoder_by_fsdp2(job, rank, vocab_size)
    return fsdp2.shard_transformers_by_fsdp2(job, rank, vocab_size)
