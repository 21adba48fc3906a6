"""Small decoders with untied ends, which become units where units are found automatically."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Batch, ModelCase

FEATURES, VOCABULARY, TOKENS = 8, 12, 5
BLOCKS = 3

Read = Callable[["EndsDecoder", Tensor, Tensor], Tensor]
"""(model, tokens, hidden states) -> logits."""


class Block(nn.Module):
    """A residual linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


@dataclass(frozen=True)
class Shape:
    """What a decoder does with its ends.

    Attributes:
        twice: Whether both are called twice in a forward.
        recomputes: Whether embedding, blocks and head are recomputed in backward.
        frozen: Whether the head takes no gradient.
        read: How logits come about where the head is not called.
    """

    twice: bool = False
    recomputes: bool = False
    frozen: bool = False
    read: Read | None = None


class EndsDecoder(nn.Module):
    """Tokens (samples, tokens) in, logits (samples, tokens, vocabulary) out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)
        self.head.requires_grad_(not shape.frozen)
        self.shape = shape

    def forward(self, tokens: Tensor) -> Tensor:
        x = self._call(self.tokens, tokens)
        if self.shape.twice:
            x = x + self.tokens(tokens.roll(1, dims=1))
        for block in self.blocks:
            x = self._call(block, x)
        x = self.norm(x)
        if self.shape.read is not None:
            return self.shape.read(self, tokens, x)
        logits = self._call(self.head, x)
        return logits + 0.5 * self.head(torch.sin(x)) if self.shape.twice else logits

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        if not self.shape.recomputes:
            return module(x)
        return checkpoint(module, x, use_reentrant=False)


def ends_case(shape: Shape) -> ModelCase:
    """A decoder, its data and its loss; its units are to be found."""
    return ModelCase(partial(EndsDecoder, shape), _make_batch, _loss, ())


def calling(model: EndsDecoder) -> None:
    """Let a decoder call its head from now on."""
    model.shape = replace(model.shape, read=None)


def _make_batch(samples: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
