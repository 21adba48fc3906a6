"""Let the model write (all ranks together: a sharded model needs every rank in every forward)."""

from collections.abc import Sequence

import torch

from megatron_fsdp.train.engines.trained import Trained


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
    """Return the prompt and `num_tokens` tokens that continue it.

    Call this without gradients and with the same arguments on every rank.

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
