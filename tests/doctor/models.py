"""Small models and batches that the doctor looks at."""

import os
import random
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fsdp.doctor import ParityReport, check_parity


class Block(nn.Module):
    """A residual block with a fused projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
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


build = Model


def tokens(seed: int) -> Tensor:
    return torch.randint(12, (12, 5), generator=torch.Generator().manual_seed(seed))


def build_frozen() -> nn.Module:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    model.embed.weight.requires_grad_(False)
    return model


def build_tied_frozen_and_unused() -> nn.Module:
    model = Model()
    model.head.weight = model.embed.weight
    model.blocks[0].up.weight.requires_grad_(False)
    model.spare = nn.Linear(6, 6)
    return model


def build_bfloat16() -> nn.Module:
    return Model().to(torch.bfloat16)


def vectors(seed: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(seed))


def build_linear(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def build_detached() -> nn.Module:
    """Nothing reaches the first layer."""
    model = build_linear()
    model[1].register_forward_hook(lambda _module, _inputs, out: out.detach())
    return model


def build_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def build_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.Linear(8, 3))


def square_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def summed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean(1).sum()


def odd_vectors(seed: int) -> Tensor:
    return vectors(seed)[:11]


def uneven_batch() -> dict[str, Tensor]:
    return {"x": torch.zeros(12, 6), "weight": torch.ones(3)}


def build_random() -> nn.Module:
    model = nn.Linear(6, 3)
    nn.init.constant_(model.weight, random.random())
    return model


class Counting(nn.Module):
    """Keeps a running mean that is no batch normalisation's, and scales by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("running_mean", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.running_mean += 1.0
        return self.linear(x) * 2


class KeyBias(nn.Module):
    """Attention, whose softmax takes the bias of keys off again: its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (-1, 2)).repeat(1, 3, 1) * torch.linspace(-1, 2, 6).view(1, 6, 1)
        return self.out(nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)))


def pairs(seed: int) -> Tensor:
    return torch.randn(6, 2, 6, generator=torch.Generator().manual_seed(seed))


def attention_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.flatten(0, 1)).square().mean()


def build_half() -> nn.Module:
    """Adam's eps is zero in float16, and the unused layer's gradient is too."""
    return nn.Sequential(nn.Linear(6, 3)).half()


def half_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Of the first output only, so that gradients of the others are zero."""
    return model(batch.half())[:, :1].float().square().mean()


class OverflowGradient(nn.Module):
    """A loss of zero whose gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sqrt().sum() + 0 * x.mean()


def moody_tokens(_seed: int) -> Tensor:
    """Heeds neither the seed nor torch's generator."""
    return torch.tensor([[random.randrange(12) for _ in range(5)] for _ in range(12)])


def drawn_tokens(_seed: int) -> Tensor:
    """Draws from torch's own generator."""
    return torch.randint(12, (12, 5))


def moody_batch() -> Tensor:
    """Another one in every process."""
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(os.getpid()))


SQUARES: dict[str, Any] = {"batch": vectors, "loss_fn": square_loss}
BARE: dict[str, Any] = {"steps": 1, "checkpoint": False}


def check(options: dict[str, Any]) -> ParityReport:
    """Look at the model and the batches that are given, or at the first of this file."""
    options = {"model_fn": build, "batch": tokens, **options}
    return check_parity(options.pop("model_fn"), options.pop("batch"), **options)
