"""Small models and batches that the doctor looks at."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with a fused projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Patient(nn.Module):
    """An embedding, two blocks and a head; returns the mean loss of next tokens."""

    _no_split_modules = ("Block",)

    def __init__(self, vocabulary: int = 12, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build() -> nn.Module:
    return Patient()


def tokens(seed: int) -> Tensor:
    return torch.randint(12, (12, 5), generator=torch.Generator().manual_seed(seed))
