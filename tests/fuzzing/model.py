"""The model of a fuzz case."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzzing.case import BlockPlan, Case

VOCABULARY = 13
TOKENS = 5


class Core(nn.Module):
    """What a block computes, before its extras."""

    def __init__(self, kind: str, dim: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "attention":
            self.inner: nn.Module = nn.MultiheadAttention(dim, 1, batch_first=True)
        elif kind == "conv":
            self.inner = nn.Conv1d(dim, dim, 3, padding=1)
        else:
            width = 97 if kind == "wide" else hidden
            self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attention":
            return cast(Tensor, self.inner(x, x, x, need_weights=False)[0])
        if self.kind == "conv":
            return cast(Tensor, self.inner(x.transpose(1, 2))).transpose(1, 2)
        return cast(Tensor, self.down(torch.tanh(self.up(x))))


class Block(nn.Module):
    """A residual block with whatever extras its plan asks for."""

    def __init__(self, plan: BlockPlan, dim: int) -> None:
        super().__init__()
        self.plan = plan
        self.norm = nn.LayerNorm(dim)
        self.core = Core(plan.kind, dim, plan.hidden)
        self.scale = nn.Parameter(torch.tensor(0.7)) if plan.scalar else None
        self.frozen = nn.Linear(dim, dim).requires_grad_(False) if plan.frozen else None
        self.unused = nn.Linear(dim, 3) if plan.unused else None
        self.sometimes = nn.Linear(dim, dim) if plan.sometimes else None
        self.mixed = nn.Parameter(torch.linspace(-0.5, 0.5, dim)) if plan.mixed else None

    def forward(self, x: Tensor) -> Tensor:
        if self.plan.checkpoint == "none" or not torch.is_grad_enabled():
            return self._compute(x)
        reentrant = self.plan.checkpoint == "reentrant"
        return cast(Tensor, checkpoint(self._compute, x, use_reentrant=reentrant))

    def _compute(self, x: Tensor) -> Tensor:
        y = self.core(self.norm(x))
        if self.scale is not None:
            y = y * self.scale
        if self.frozen is not None:
            y = y + 0.3 * self.frozen(x)
        if self.sometimes is not None and bool(x.detach()[0, 0, 0] > 0):
            y = y + 0.2 * self.sometimes(x)
        if self.mixed is not None:
            y = y + self.mixed.to(x.dtype)
        return x + y


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, case.dim)
        self.blocks = nn.ModuleList(Block(plan, case.dim) for plan in case.blocks)
        self.head = nn.Linear(case.dim, VOCABULARY, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            for _ in range(cast(Block, block).plan.calls):
                x = block(x)
        return cast(Tensor, self.head(x))


def build(case: Case) -> Net:
    """The model with its initial weights, the same for every caller."""
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        model = Net(case).to(case.compute)
    for block, plan in zip(model.blocks, case.blocks, strict=True):
        mixed = cast(Block, block).mixed
        if mixed is not None:
            mixed.data = mixed.data.to(plan.mixed)
    return model


def batch(case: Case, step: int, microbatch: int, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (samples, tokens) each."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + step * 10 + microbatch)
    tokens = torch.randint(0, VOCABULARY, (2, samples, TOKENS), generator=generator)
    return tokens[0], tokens[1]
