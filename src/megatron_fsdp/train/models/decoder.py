"""A GPT-style decoder in plain PyTorch; it knows nothing of parallelism.

Pre-norm blocks with RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), normalised queries and keys
(Henry et al. 2020) and a SwiGLU feed-forward layer (Shazeer 2020).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_fsdp.errors import ConfigurationError

ROTARY_BASE = 10_000.0
INIT_STD = 0.02


@dataclass(frozen=True)
class ModelShape:
    """The numbers that fix a decoder.

    Attributes:
        vocab_size: Number of tokens.
        num_layers: Blocks.
        dim: Width of the residual stream.
        num_heads: Attention heads; `dim` is `num_heads` times an even number.
        hidden_dim: Width of the feed-forward layer.

    Raises:
        ConfigurationError: `dim` cannot be cut into heads of even width.
    """

    vocab_size: int
    num_layers: int
    dim: int
    num_heads: int
    hidden_dim: int

    def __post_init__(self) -> None:
        if self.dim % (2 * self.num_heads) != 0:
            raise ConfigurationError(
                f"dim {self.dim} with {self.num_heads} heads is not possible: give a dim that is a multiple of "
                f"{2 * self.num_heads}, since rotary positions need heads of even width"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def parameter_numel(self) -> int:
        """Parameters of the model: embedding and head, and per block four projections, three matrices, four norms."""
        block = 4 * self.dim**2 + 3 * self.dim * self.hidden_dim + 2 * self.dim + 2 * self.head_dim
        return 2 * self.vocab_size * self.dim + self.num_layers * block + self.dim


def rotate(x: Tensor) -> Tensor:
    """Apply rotary positions to `x` [batch, heads, length, head_dim]; position 0 is the first of the sequence."""
    length, half_dim = x.shape[-2], x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half_dim, device=x.device, dtype=torch.float32) / half_dim)
    angle = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over [batch, length, dim]."""

    def __init__(self, shape: ModelShape) -> None:
        """Make the projections for `shape`."""
        super().__init__()
        self.head_dim = shape.head_dim
        self.query_key_value = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)
        self.query_norm = nn.RMSNorm(shape.head_dim)
        self.key_norm = nn.RMSNorm(shape.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output, shaped as `x`."""
        heads = self.query_key_value(x).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(self.query_norm(query)), rotate(self.key_norm(key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        """Make the matrices for `shape`; gate and value are one matrix."""
        super().__init__()
        self.gate_and_value = nn.Linear(shape.dim, 2 * shape.hidden_dim, bias=False)
        self.output = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped as `x`."""
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.output(functional.silu(gate) * value)


class Block(nn.Module):
    """One transformer block: the unit that is gathered and released together."""

    def __init__(self, shape: ModelShape) -> None:
        """Make the two sublayers for `shape`."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream [batch, length, dim] after this block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Token ids [batch, length] in, logits [batch, length, vocab_size] out."""

    def __init__(self, shape: ModelShape) -> None:
        """Make the model for `shape` and initialise it from torch's global generator."""
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw matrices with a small normal; what writes into the residual stream shrinks with depth (GPT-2)."""
        residual_std = INIT_STD / (2 * self.shape.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, residual_std if name.endswith("output.weight") else INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position, in the dtype of the model."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, computed in float32.

    Args:
        logits: [batch, length, vocab_size], any floating dtype.
        targets: [batch, length] token ids.
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def split_for_decay(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the parameters that weight decay applies to, and of those it leaves alone.

    Norms and biases (fewer than two dimensions) and embeddings are not decayed.
    """
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    decay: list[str] = []
    keep: list[str] = []
    for name, parameter in model.named_parameters():
        (keep if parameter.ndim < 2 or name in embeddings else decay).append(name)
    return decay, keep
