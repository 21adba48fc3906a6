"""Evaluation: the loss on held-out text, the same for any number of ranks, and generated text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.train.data.batches import held_out_batches
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.options.job import Job


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation without gradients inside the block, then restore its mode."""
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
        times: Factor for the number of samples.
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


def generate(
    trained: Trained,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    context_length: int,
    temperature: float,
    seed: int,
    vocab_size: int,
) -> list[int]:
    """Generate `num_tokens` tokens that continue the prompt.

    Call this without gradients and with the same arguments on every rank: a sharded model needs every rank in every
    forward.

    Args:
        trained: The model, in evaluation.
        prompt: At least one token id.
        num_tokens: How many tokens to add.
        context_length: How many of the last tokens the model sees.
        temperature: 0 takes the likeliest token each time; 1 samples from the model's distribution.
        seed: Fixes the sampling, on every kind of device alike.
        vocab_size: Token ids that stand for text; the model may know more.

    Returns:
        Token ids; only the prompt with an engine that gives no logits, and no more from where logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(num_tokens):
        found = trained.logits(torch.tensor([ids[-context_length:]]))
        if found is None:
            return ids
        logits = found[0, -1, :vocab_size].float().cpu()
        if not bool(torch.isfinite(logits).all()):  # weights that have run away; nothing can be drawn
            return ids
        if temperature == 0.0:
            ids.append(int(logits.argmax()))
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return ids
