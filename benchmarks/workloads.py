"""Models and data of the comparisons: a plain decoder, and Hugging Face's Llama and Mixtral."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EXPERTS, _CHOSEN = 4, 2

Microbatch = tuple[Tensor, Tensor]
"""Input tokens and their successors, both int64 (samples, tokens)."""


@dataclass(frozen=True)
class Workload:
    """A model's shape, and the size of one rank's microbatch."""

    layers: int
    features: int
    heads: int  # attention heads; half as many for keys and values in Hugging Face's models
    vocabulary: int
    samples: int  # sequences per microbatch and rank
    tokens: int
    kind: Literal["decoder", "llama", "mixtral"] = "decoder"  # whose model it is
    # features inside of a feed-forward layer (in each expert, for mixtral); None: four times `features`
    wide: int | None = None

    @property
    def feed_forward(self) -> int:
        """Features inside a feed-forward layer."""
        return 4 * self.features if self.wide is None else self.wide


WORKLOADS: dict[str, Workload] = {
    "tiny": Workload(layers=3, features=32, heads=2, vocabulary=64, samples=2, tokens=8),
    "many-small": Workload(layers=48, features=128, heads=4, vocabulary=1024, samples=2, tokens=32),
    "large": Workload(layers=8, features=512, heads=8, vocabulary=8192, samples=2, tokens=128),
    "llama": Workload(6, 384, 6, vocabulary=8192, samples=2, tokens=64, kind="llama", wide=1024),
    "moe": Workload(6, 256, 4, vocabulary=2048, samples=2, tokens=64, kind="mixtral", wide=384),
    "tiny-llama": Workload(2, 32, 2, vocabulary=64, samples=2, tokens=8, kind="llama", wide=48),
    "tiny-moe": Workload(2, 32, 2, vocabulary=64, samples=2, tokens=8, kind="mixtral", wide=48),
    "gigabyte": Workload(layers=18, features=1024, heads=8, vocabulary=16384, samples=1, tokens=8),
    "narrow": Workload(layers=48, features=16, heads=2, vocabulary=64, samples=1, tokens=8),
}


class Block(nn.Module):
    """Pre-norm causal attention with normalised queries and keys, and a feed-forward layer; 20 parameters."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(features)
        self.query = nn.Linear(features, features)
        self.key = nn.Linear(features, features)
        self.value = nn.Linear(features, features)
        self.query_norm = nn.LayerNorm(features // heads)
        self.key_norm = nn.LayerNorm(features // heads)
        self.output = nn.Linear(features, features)
        self.feed_forward_norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream (samples, tokens, features) after this block."""
        normed = self.attention_norm(x)
        query, key, value = (
            linear(normed).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.query_norm(query), self.key_norm(key), value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class Decoder(nn.Module):
    """Tokens (samples, tokens) in, logits (samples, tokens, vocabulary) out."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(workload.vocabulary, workload.features)
        self.positions = nn.Parameter(torch.randn(workload.tokens, workload.features))
        self.blocks = nn.ModuleList(Block(workload.features, workload.heads) for _ in range(workload.layers))
        self.norm = nn.LayerNorm(workload.features)
        self.head = nn.Linear(workload.features, workload.vocabulary, bias=False)
        with torch.no_grad():  # small logits: the loss starts near log(vocabulary)
            for weight in (self.tokens.weight, self.positions, self.head.weight):
                weight.mul_(0.02 / weight.std())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class HuggingFaceDecoder(nn.Module):
    """One of transformers' causal models: tokens (samples, tokens) in, logits (samples, tokens, vocabulary) out."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.causal = causal

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers."""
        layers = self.causal.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        return self.causal(input_ids=tokens, use_cache=False).logits


def _hugging_face(workload: Workload) -> nn.Module:
    """Build a model of transformers without files, with torch's `scaled_dot_product_attention`."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": workload.vocabulary,
        "hidden_size": workload.features,
        "intermediate_size": workload.feed_forward,
        "num_hidden_layers": workload.layers,
        "num_attention_heads": workload.heads,
        "num_key_value_heads": max(1, workload.heads // 2),
        "max_position_embeddings": workload.tokens,
    }
    if workload.kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=_EXPERTS, num_experts_per_tok=_CHOSEN))


def build_model(workload: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build a model from tokens to logits, of the same weights in every call on every rank; `blocks` are units."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(0)
        if workload.kind == "decoder":
            return Decoder(workload).to(device=device, dtype=dtype)
        return HuggingFaceDecoder(_hugging_face(workload)).to(device=device, dtype=dtype)


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules to shard as units, all of one class, in order of use."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)


def make_batch(workload: Workload, device: torch.device, seed: int) -> Microbatch:
    """Make random tokens; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    shape = (workload.samples, workload.tokens + 1)
    tokens = torch.randint(workload.vocabulary, shape, generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: Microbatch) -> Tensor:
    """Return the mean cross-entropy in nats per token, computed in float32; a scalar."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
