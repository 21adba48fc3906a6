"""Let the model write (all ranks together: a sharded model needs every rank in every forward)."""

from collections.abc import Sequence

import torch
from torch import nn


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    context_length: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Return the prompt and `num_tokens` tokens that continue it.

    Call this without gradients and with the same arguments on every rank.

    Args:
        model: Maps token ids [1, length] to logits [1, length, vocab_size].
        prompt: At least one token id.
        num_tokens: How many tokens to add.
        context_length: How many of the last tokens the model sees.
        temperature: 0 takes the likeliest token each time; 1 samples from the model's distribution.
        seed: Fixes the sampling, on every kind of device alike.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(num_tokens):
        context = torch.tensor([ids[-context_length:]], device=device)
        logits = model(context)[0, -1].float().cpu()
        if temperature == 0.0:
            ids.append(int(logits.argmax()))
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return ids
