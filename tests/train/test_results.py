import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_fsdp.train.models.decoder import Decoder, ModelShape
from megatron_fsdp.train.results import generate


def trained(logits: Any) -> Any:
    """As much of `Trained` as writing takes."""
    return SimpleNamespace(logits=logits)


def successor(tokens: Tensor) -> Tensor:
    """The whole weight on the token after the last one; ids above 6 stand for no text, and are likelier still."""
    return 50.0 * torch.nn.functional.one_hot((tokens + 1) % 7, 9) + torch.tensor([0.0] * 7 + [99.0] * 2)


def test_generation_continues_the_prompt() -> None:
    ids = generate(trained(successor), [4, 5], 4, context_length=3, seed=0, vocab_size=7)
    assert ids == [4, 5, 6, 0, 1, 2]


@torch.no_grad()
def test_sampling_repeats_with_the_seed_and_sees_only_the_context() -> None:
    torch.manual_seed(0)
    model = Decoder(ModelShape(vocab_size=11, num_layers=2, dim=16, num_heads=2, hidden_dim=24))
    runs = [
        generate(trained(model), prompt, 20, context_length=2, seed=seed, vocab_size=11)[len(prompt) :]
        for prompt, seed in [([1, 2], 0), ([1, 2], 0), ([9, 8, 1, 2], 0), ([1, 2], 1)]
    ]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] != runs[3]


def test_logits_that_are_not_finite_end_the_text_and_without_any_there_is_the_prompt() -> None:
    for value in (math.nan, math.inf):

        def overflowing(tokens: Tensor, value: float = value) -> Tensor:
            return successor(tokens) * (value if int(tokens[0, -1]) == 6 else 1.0)

        ids = generate(trained(overflowing), [4, 5], 4, context_length=3, seed=0, vocab_size=7)
        assert ids == [4, 5, 6]
    assert generate(trained(lambda _: None), [1, 2], 5, context_length=2, seed=0, vocab_size=7) == [1, 2]
