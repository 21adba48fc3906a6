"""A small decoder-only transformer whose ranks can divide heads (tensor), tokens (context) and experts among them.

Built whole, it is the model of one process. `divide_context` and `divide_experts` turn a whole model into what one rank
computes with; tensor parallelism is torch's own `parallelize_module` (tests/support/tensor_meshes.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.mixture import Experts, ExpertsKind, MixtureOfExperts
from tests.support.models import Batch

IGNORED = -100
"""Target of a position without a token."""


class Attention(nn.Module):
    """Causal attention; (samples, tokens, features) in and out."""

    HEAD_FEATURES: ClassVar[int] = 8

    def __init__(self, features: int) -> None:
        super().__init__()
        self.q = nn.Linear(features, features)
        self.k = nn.Linear(features, features)
        self.v = nn.Linear(features, features)
        self.out = nn.Linear(features, features)
        self.context: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        first = 0
        if self.context is not None:
            first = dist.get_rank(self.context) * x.shape[1]
            key, value = (gather_tokens(part, self.context) for part in (key, value))
        positions = torch.arange(first, first + query.shape[2])
        may_see = positions[:, None] >= torch.arange(key.shape[2])[None]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=may_see)
        return self.out(attended.transpose(1, 2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.HEAD_FEATURES)).transpose(1, 2)


class _GatherTokens(torch.autograd.Function):
    """All ranks' keys or values, in rank order along the tokens; backward sums what the ranks' queries say of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), dim=2)[dist.get_rank(ctx.group)].contiguous(), None


def gather_tokens(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(samples, heads, tokens of a rank, features) -> (samples, heads, all tokens, features)."""
    gathered: Tensor = _GatherTokens.apply(part, group)  # type: ignore[no-untyped-call]
    return gathered


class Mlp(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, 2 * features)
        self.down = nn.Linear(2 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ParallelBlock(nn.Module):
    """Pre-norm attention and MLP, or mixture of experts; (samples, tokens, features) in and out."""

    def __init__(self, features: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(features)
        self.attention = Attention(features)
        self.mlp_norm = nn.LayerNorm(features)
        self.mlp = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ParallelTransformer(nn.Module):
    """Embeddings, blocks, final norm, head; int64 tokens (samples, tokens) -> logits.

    Args:
        layers: Blocks.
        feed_forward: Makes the second half of a block.
    """

    VOCABULARY: ClassVar[int] = 31  # 2 ranks cannot divide it evenly
    FEATURES: ClassVar[int] = 16
    MAX_TOKENS: ClassVar[int] = 8

    def __init__(self, *, layers: int = 2, feed_forward: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.FEATURES)
        self.positions = nn.Embedding(self.MAX_TOKENS, self.FEATURES)
        self.blocks = nn.ModuleList(
            ParallelBlock(self.FEATURES, feed_forward() if feed_forward is not None else Mlp(self.FEATURES))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(self.FEATURES)
        self.head = nn.Linear(self.FEATURES, self.VOCABULARY, bias=False)
        self.first_position = 0

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.first_position * tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(first, first + tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divide_context(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group compute consecutive parts of every sequence."""
    assert isinstance(model, ParallelTransformer)
    model.first_position = dist.get_rank(group)
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = group


def divide_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Keep this rank's experts of every block, and send tokens to those of others."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.divide(group)


def build_dense() -> nn.Module:
    return ParallelTransformer()


def build_top1_experts() -> nn.Module:
    return build_with_experts()


def build_top2_experts() -> nn.Module:
    return build_with_experts(top_k=2)


def build_with_experts(top_k: int = 1, name: str = "experts", kind: ExpertsKind = Experts) -> nn.Module:
    """Four experts per block."""
    return ParallelTransformer(
        feed_forward=partial(MixtureOfExperts, ParallelTransformer.FEATURES, 4, top_k, name, kind)
    )


def make_tokens(samples: int, generator: torch.Generator) -> Batch:
    """int64 tokens (samples, 8) and their successors."""
    tokens = torch.randint(ParallelTransformer.VOCABULARY, (samples, 9), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def make_tokens_with_gaps(samples: int, generator: torch.Generator) -> Batch:
    """The same with about a third of the targets left out, so that parts hold unequal numbers of them."""
    batch = make_tokens(samples, generator)
    left_out = torch.rand(batch.targets.shape, generator=generator) < 0.33
    return Batch(batch.inputs, batch.targets.masked_fill(left_out, IGNORED))


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of this process' tokens."""
    return F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the cross-entropy of this process' tokens."""
    logits = model(batch.inputs).flatten(0, 1)
    return F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")
