"""A GPT-style decoder in plain PyTorch, without any parallelism.

Pre-norm blocks. By default RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), normalised queries and
keys (Henry et al. 2020) and a SwiGLU feed-forward layer (Shazeer 2020); groups of query heads may share keys and values
(Ainslie et al. 2023).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class ModelShape:
    """The sizes and switches that define a decoder."""

    vocab_size: int
    num_layers: int
    dim: int  # width of the residual stream
    num_heads: int
    hidden_dim: int  # width of the feed-forward layer
    num_query_groups: int | None = None  # heads of keys and values; None: as many as of queries
    kv_channels: int | None = None  # width of a head; None: `dim` by the heads
    learned_positions: int = 0  # positions that have a vector; 0: they are rotary
    rotary_base: float = 10_000.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    normalizes_query_key: bool = True
    is_gated: bool = True  # by SiLU, instead of GELU
    has_bias: bool = False  # linear layers but the last
    ties_embeddings: bool = False
    init_std: float = 0.02  # of initial matrices

    def __post_init__(self) -> None:
        if self.kv_channels is None and self.dim % self.num_heads != 0:
            raise ConfigurationError(
                f"--hidden-size {self.dim} with --num-attention-heads {self.num_heads} is not possible: give a hidden "
                "size that is a multiple of the heads, or --kv-channels"
            )
        if self.learned_positions == 0 and self.head_dim % 2:
            raise ConfigurationError(
                f"heads of width {self.head_dim} (--hidden-size {self.dim}, --num-attention-heads {self.num_heads}) "
                "have no rotary positions: give heads of even width, or --position-embedding-type learned_absolute"
            )
        if self.num_heads % self.groups:
            raise ConfigurationError(
                f"--num-query-groups {self.groups} does not divide --num-attention-heads {self.num_heads}: give a "
                "divisor"
            )

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.kv_channels or self.dim // self.num_heads

    @property
    def groups(self) -> int:
        """The heads of keys and values."""
        return self.num_query_groups or self.num_heads

    def norm(self, width: int) -> nn.Module:
        """Make a norm over the last dimension."""
        kind = nn.LayerNorm if self.normalization == "LayerNorm" else nn.RMSNorm
        return kind(width, eps=self.norm_epsilon)


class ResidualLinear(nn.Linear):
    """A linear layer that writes into the residual stream; its initial weights are smaller than others."""


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Apply rotary positions to `x` [batch, heads, length, head_dim]; position 0 is the first of the sequence."""
    length, half_dim = x.shape[-2], x.shape[-1] // 2
    frequency = base ** (-torch.arange(half_dim, device=x.device, dtype=torch.float32) / half_dim)
    angle = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over [batch, length, dim]. With `recomputes` its core is recomputed in backward.

    The projections of queries, keys and values are one matrix, in this order.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.groups = shape.head_dim, shape.num_heads, shape.groups
        self.rotary_base = None if shape.learned_positions else shape.rotary_base
        self.recomputes = False
        heads = shape.num_heads + 2 * shape.groups
        self.query_key_value = nn.Linear(shape.dim, heads * shape.head_dim, bias=shape.has_bias)
        self.output = ResidualLinear(shape.num_heads * shape.head_dim, shape.dim, bias=shape.has_bias)
        self.query_norm = shape.norm(shape.head_dim) if shape.normalizes_query_key else None
        self.key_norm = shape.norm(shape.head_dim) if shape.normalizes_query_key else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output, shaped as `x`."""
        projected = self.query_key_value(x)
        if self.recomputes and self.training and torch.is_grad_enabled():
            return self.output(checkpoint(self._core, projected, use_reentrant=False))
        return self.output(self._core(projected))

    def _core(self, projected: Tensor) -> Tensor:
        """Compute values [batch, length, heads] from projections [batch, length, heads and groups]."""
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split([self.num_heads, self.groups, self.groups], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary_base is not None:
            query, key = rotate(query, self.rotary_base), rotate(key, self.rotary_base)
        shares = self.groups != self.num_heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shares)
        return mixed.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """Feed-forward layer: SwiGLU, whose gate and value are one matrix, or GELU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.is_gated = shape.is_gated
        if self.is_gated:
            self.gate_and_value = nn.Linear(shape.dim, 2 * shape.hidden_dim, bias=shape.has_bias)
        else:
            self.input = nn.Linear(shape.dim, shape.hidden_dim, bias=shape.has_bias)
        self.output = ResidualLinear(shape.hidden_dim, shape.dim, bias=shape.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped as `x`."""
        if not self.is_gated:
            return self.output(functional.gelu(self.input(x)))
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.output(functional.silu(gate) * value)


class Block(nn.Module):
    """One transformer block. With `recomputes` it saves only its input, and is recomputed in backward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.recomputes = False
        self.attention_norm = shape.norm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward_norm = shape.norm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream [batch, length, dim] after this block."""
        if self.recomputes and self.training and torch.is_grad_enabled():
            return checkpoint(self._run, x, use_reentrant=False)  # inside of the hooks that gather
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Token ids [batch, length] in, logits [batch, length, vocab_size] out."""

    def __init__(self, shape: ModelShape) -> None:
        """Make the model for `shape` and initialise it from torch's global generator."""
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.positions = nn.Embedding(shape.learned_positions, shape.dim) if shape.learned_positions else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = shape.norm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        if shape.ties_embeddings:
            self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a matrix from a narrow normal; layers that write into the residual stream shrink with depth (GPT-2).

        The engine calls it for every module of a model that was built on the meta device (docs/sharded_models.md).
        Numbers are drawn in float32, so that they do not depend on the dtype of the model.
        """
        if not isinstance(module, nn.Linear | nn.Embedding):
            return
        std = self.shape.init_std
        if isinstance(module, ResidualLinear):
            std /= (2 * self.shape.num_layers) ** 0.5
        module.weight.copy_(torch.empty_like(module.weight, dtype=torch.float32).normal_(0.0, std))
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position, in the dtype of the model."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def recompute(decoder: Decoder, granularity: Literal["full", "selective"], num_layers: int | None) -> None:
    """Recompute the first `num_layers` blocks (None: all) in backward, or the core of attention in every block.

    The core is everything between the projections: norms, rotary positions, products and softmax.
    """
    for number, block in enumerate(decoder.blocks):
        assert isinstance(block, Block)
        if granularity == "selective":
            block.attention.recomputes = True
        else:
            block.recomputes = num_layers is None or number < num_layers


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, in float32, of logits [batch, length, vocab_size]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def split_for_decay(model: nn.Module, undecayed: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the names of the parameters with weight decay, and of those without.

    Norms and biases (fewer than two dimensions), embeddings and `undecayed` names are not decayed.
    """
    kept = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    kept |= {name for name, parameter in model.named_parameters() if parameter.ndim < 2 or name in undecayed}
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if name not in kept], [name for name in names if name in kept]
