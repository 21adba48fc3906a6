"""A decoder-only transformer of about 12 thousand parameters."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm causal attention and MLP. Shape (samples, tokens, features) in and out."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features)
        self.project = nn.Linear(features, features)
        self.mlp_norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self._qkv(x))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.attention_norm(x)).chunk(3, dim=-1)


class TinyTransformer(nn.Module):
    """Token and position embedding, blocks, final norm, head. int64 tokens (samples, tokens) -> float logits."""

    VOCABULARY: ClassVar[int] = 31
    FEATURES: ClassVar[int] = 16
    MAX_TOKENS: ClassVar[int] = 8

    def __init__(self, *, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.FEATURES)
        self.positions = nn.Parameter(0.1 * torch.randn(self.MAX_TOKENS, self.FEATURES))
        self.blocks = nn.ModuleList(Block(self.FEATURES, heads=2) for _ in range(layers))
        self.norm = nn.LayerNorm(self.FEATURES)
        self.head = nn.Linear(self.FEATURES, self.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
