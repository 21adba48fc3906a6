"""A zoo of tiny models, each with something that sharding finds hard.

A `ModelCase` is plain data of module-level functions, so it can be sent to worker processes. The caller seeds
(`with fixed_seed(0): model = case.build()`), so that every rank builds the same weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ODD_FEATURES = 7
_ODD_OUTPUTS = 5


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of the same first dimension, the number of samples."""

    inputs: Tensor
    targets: Tensor

    def part(self, index: int, count: int) -> "Batch":
        """Return slice `index` of `count` equal slices, for a rank or a microbatch."""
        samples = self.inputs.shape[0]
        if samples % count:
            raise ValueError(f"{samples} samples do not divide into {count} equal parts; choose a multiple of {count}.")
        rows = slice(index * samples // count, (index + 1) * samples // count)
        return Batch(self.inputs[rows], self.targets[rows])


@dataclass(frozen=True)
class ModelCase:
    """A model, its data and its loss (a mean over the samples, so that a mean over equal slices is the same).

    Attributes:
        build: () -> module, from torch's current random state.
        make_batch: (samples, generator) -> batch.
        loss: (module, batch) -> scalar.
        unit_classes: what to pass as `fsdp_unit_modules`.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    unit_classes: tuple[type[nn.Module], ...]


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


class ScalarBlock(nn.Module):
    """A linear layer scaled by a 0-d parameter and shifted by one of shape (1,)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale + self.shift


class OddBlock(nn.Module):
    """Two linear layers of prime sizes; the middle one has 2 rows, fewer than most rank counts."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 13)
        self.narrow = nn.Linear(13, 2)
        self.back = nn.Linear(2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.narrow(torch.tanh(self.wide(x)))))


class MixedDtypeBlock(nn.Module):
    """A linear layer in one dtype behind a norm in another; input and output have the norm's dtype."""

    def __init__(self, features: int, linear_dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, dtype=norm_dtype)
        self.linear = nn.Linear(features, features, dtype=linear_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).to(self.linear.weight.dtype)).to(x.dtype)


class UnusedBlock(nn.Module):
    """A block one of whose layers takes no part in the forward pass."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.used = nn.Linear(features, features)
        self.unused = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(x))


class ScalarHead(nn.Module):
    """Blocks with scalar parameters; the root has one of each kind too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ScalarBlock(_ODD_FEATURES), ScalarBlock(_ODD_FEATURES))
        self.head = nn.Linear(_ODD_FEATURES, _ODD_OUTPUTS)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) / self.temperature + self.offset


def build_transformer() -> nn.Module:
    return TinyTransformer()


def build_tied_transformer() -> nn.Module:
    return TinyTransformer(tied=True)


def build_partly_frozen_transformer() -> nn.Module:
    """Freeze the token embedding, all of block 0, and of block 1 a norm and one matrix."""
    model = TinyTransformer()
    trainable_block = model.blocks[1]
    assert isinstance(trainable_block, Block)
    frozen = (model.tokens, model.blocks[0], trainable_block.attention_norm, trainable_block.project)
    for module in frozen:
        module.requires_grad_(requires_grad=False)
    return model


def build_scalars() -> nn.Module:
    return ScalarHead()


def build_odd_shapes() -> nn.Module:
    return nn.Sequential(OddBlock(), OddBlock(), nn.Linear(_ODD_FEATURES, _ODD_OUTPUTS))


def build_bf16_with_fp32_norm() -> nn.Module:
    return _mixed(torch.bfloat16, torch.float32)


def build_fp32_with_fp64_norm() -> nn.Module:
    return _mixed(torch.float32, torch.float64)


def build_unused() -> nn.Module:
    blocks = nn.Sequential(UnusedBlock(_ODD_FEATURES), UnusedBlock(_ODD_FEATURES))
    blocks.append(nn.Linear(_ODD_FEATURES, _ODD_OUTPUTS))
    return blocks


def make_token_batch(samples: int, generator: torch.Generator) -> Batch:
    """Return int64 tokens (samples, 6) and their successors."""
    tokens = torch.randint(TinyTransformer.VOCABULARY, (samples, 7), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def make_vector_batch(samples: int, generator: torch.Generator) -> Batch:
    """Return float32 inputs (samples, 7) and targets (samples, 5)."""
    return Batch(
        torch.randn(samples, _ODD_FEATURES, generator=generator),
        torch.randn(samples, _ODD_OUTPUTS, generator=generator),
    )


def make_float64_vector_batch(samples: int, generator: torch.Generator) -> Batch:
    """Return `make_vector_batch` in float64."""
    batch = make_vector_batch(samples, generator)
    return Batch(batch.inputs.double(), batch.targets.double())


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats per token."""
    logits = model(batch.inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


def vector_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch.inputs), batch.targets)


def _mixed(linear_dtype: torch.dtype, norm_dtype: torch.dtype) -> nn.Module:
    blocks = [MixedDtypeBlock(_ODD_FEATURES, linear_dtype, norm_dtype) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(_ODD_FEATURES, _ODD_OUTPUTS, dtype=norm_dtype))


ModelName = Literal[
    "transformer", "tied", "partly_frozen", "scalars", "odd_shapes", "bf16_fp32_norm", "fp32_fp64_norm", "unused"
]

MODEL_CASES: dict[ModelName, ModelCase] = {
    "transformer": ModelCase(build_transformer, make_token_batch, token_loss, (Block,)),
    "tied": ModelCase(build_tied_transformer, make_token_batch, token_loss, (Block,)),
    "partly_frozen": ModelCase(build_partly_frozen_transformer, make_token_batch, token_loss, (Block,)),
    "scalars": ModelCase(build_scalars, make_vector_batch, vector_loss, (ScalarBlock,)),
    "odd_shapes": ModelCase(build_odd_shapes, make_vector_batch, vector_loss, (OddBlock,)),
    "bf16_fp32_norm": ModelCase(build_bf16_with_fp32_norm, make_vector_batch, vector_loss, (MixedDtypeBlock,)),
    "fp32_fp64_norm": ModelCase(build_fp32_with_fp64_norm, make_float64_vector_batch, vector_loss, (MixedDtypeBlock,)),
    "unused": ModelCase(build_unused, make_vector_batch, vector_loss, (UnusedBlock,)),
}
