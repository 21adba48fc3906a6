"""The loss on held-out text, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.train.data.held_out import held_out_batches
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.options.job import Job


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation without gradients, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def evaluate(job: Job, trained: Trained, data: TokenData, times: int = 1) -> float:
    """Return the mean loss over the first held-out samples, in nats per token; collective.

    Args:
        job: Says how many samples: `--eval-iters` global batches.
        trained: The model.
        data: The tokens.
        times: So many times as many samples.
    """
    samples = times * job.options.training.eval_iters * job.batch.total
    batches = held_out_batches(data, job.seq_length, samples, job.batch, trained.data_index)
    sums = torch.zeros(2, dtype=torch.float64, device=trained.device)
    with evaluating(trained.model):
        for batch in batches:
            weights = batch.weights.to(trained.device)
            sums += torch.stack([(trained.token_losses(batch) * weights).sum().double(), weights.sum().double()])
    dist.all_reduce(sums)  # ranks that share a batch count it alike, above and below the line
    total, count = sums.tolist()
    return total / count
