"""From a job to a model over ranks: which engine, which kind of model."""

from __future__ import annotations

from megatron_fsdp.errors import NotSupportedYetError
from megatron_fsdp.train.engines.sharded import ShardedModel
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.models.build import build_decoder
from megatron_fsdp.train.models.decoder import Block
from megatron_fsdp.train.options.job import Job


def build(job: Job, vocab_size: int, rank: Rank) -> Trained:
    """Return the model of a run, sharded, with its optimizer.

    Args:
        job: The run.
        vocab_size: Token ids of the data.
        rank: This process.

    Raises:
        ConfigurationError: The model cannot be built or sharded so.
    """
    if job.options.model.transformer_impl != "local" or job.engine == "torch_fsdp2":
        raise NotSupportedYetError("models of transformers")
    decoder = build_decoder(job, vocab_size, rank.device)
    return ShardedModel(job, rank, decoder, [Block], decoder.shape.vocab_size)
