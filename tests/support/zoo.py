"""A zoo of tiny models, each with something that sharding finds hard.

A `ModelCase` is plain data of module-level functions, so it can be sent to worker processes. The caller seeds
(`with fixed_seed(0): model = case.build()`), so that every rank builds the same weights.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd

_ODD_FEATURES = 7
_ODD_OUTPUTS = 5
IGNORED = -100
"""Target of a position without a token."""


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of the same first dimension, the number of samples."""

    inputs: Tensor
    targets: Tensor

    def part(self, index: int, count: int) -> "Batch":
        """Return slice `index` of `count` equal slices, for a rank or a microbatch."""
        samples = len(self.inputs)
        assert samples % count == 0, f"{samples} samples do not divide into {count} equal parts"
        return Batch(self.inputs.tensor_split(count)[index], self.targets.tensor_split(count)[index])


@dataclass(frozen=True)
class ModelCase:
    """A model, its data and its loss (a mean over the samples, so that a mean over equal slices is the same)."""

    build: Callable[[], nn.Module]  # from torch's current random state
    make_batch: Callable[[int, torch.Generator], Batch]  # so many samples
    loss: Callable[[nn.Module, Batch], Tensor]
    unit_classes: tuple[type[nn.Module], ...]  # `fsdp_unit_modules`


class Attention(nn.Module):
    """Causal attention; (samples, tokens, features) in and out."""

    HEAD_FEATURES: ClassVar[int] = 8

    def __init__(self, features: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(features, features) for _ in range(4))
        self.context: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        first = 0
        if self.context is not None:
            first = dist.get_rank(self.context) * x.shape[1]
            key, value = (all_gather_single_autograd(part.contiguous(), 2, self.context) for part in (key, value))
        positions = torch.arange(first, first + query.shape[2], device=x.device)
        may_see = positions[:, None] >= torch.arange(key.shape[2], device=x.device)[None]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=may_see)
        return self.out(attended.transpose(1, 2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.HEAD_FEATURES)).transpose(1, 2)


def mlp(features: int) -> nn.Module:
    widen, narrow = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)
    return nn.Sequential(OrderedDict(up=widen, act=nn.GELU(), down=narrow))


class Block(nn.Module):
    """Pre-norm attention and MLP, or mixture of experts; (samples, tokens, features) in and out."""

    def __init__(self, features: int, feed_forward: Callable[[int], nn.Module] = mlp) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(features)
        self.attention = Attention(features)
        self.mlp_norm = nn.LayerNorm(features)
        self.mlp = feed_forward(features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TinyTransformer(nn.Module):
    """Embeddings, blocks, final norm, head; int64 tokens (samples, tokens) -> logits.

    Ranks can divide heads (tests/support/arrangements.py), tokens (`divide_context`) and experts (`feed_forward` of
    tests/support/experts.py) among them.
    """

    VOCABULARY: ClassVar[int] = 31  # 2 ranks cannot divide it evenly
    FEATURES: ClassVar[int] = 16
    MAX_TOKENS: ClassVar[int] = 8

    def __init__(self, *, layers: int = 3, tied: bool = False, feed_forward: Callable[[int], nn.Module] = mlp) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.FEATURES)
        self.positions = nn.Embedding(self.MAX_TOKENS, self.FEATURES)
        self.blocks = nn.ModuleList(Block(self.FEATURES, feed_forward) for _ in range(layers))
        self.norm = nn.LayerNorm(self.FEATURES)
        self.head = nn.Linear(self.FEATURES, self.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.first_position = 0

    def embed(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) + self.first_position * tokens.shape[1]
        return self.tokens(tokens) + self.positions(positions[None])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def divide_context(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group compute consecutive parts of every sequence."""
    assert isinstance(model, TinyTransformer)
    model.first_position = dist.get_rank(group)
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = group


class ScalarBlock(nn.Module):
    """A linear layer scaled by a 0-d parameter and shifted by one of shape (1,)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_ODD_FEATURES, _ODD_FEATURES)
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

    def __init__(self, linear_dtype: torch.dtype = torch.float32, norm_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_ODD_FEATURES, dtype=norm_dtype)
        self.linear = nn.Linear(_ODD_FEATURES, _ODD_FEATURES, dtype=linear_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).to(self.linear.weight.dtype)).to(x.dtype)


class UnusedBlock(nn.Module):
    """A block one of whose layers takes no part in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(_ODD_FEATURES, _ODD_FEATURES)
        self.unused = nn.Linear(_ODD_FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(x))


class ScalarHead(nn.Module):
    """Blocks with scalar parameters; the root has one of each kind too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ScalarBlock(), ScalarBlock())
        self.head = nn.Linear(_ODD_FEATURES, _ODD_OUTPUTS)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) / self.temperature + self.offset


def build_partly_frozen_transformer() -> nn.Module:
    """Freeze the token embedding, all of block 0, and of block 1 a norm and one matrix."""
    model = TinyTransformer()
    for name in ("tokens", "blocks.0", "blocks.1.attention_norm", "blocks.1.attention.out"):
        model.get_submodule(name).requires_grad_(requires_grad=False)
    return model


def build_odd(block: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two blocks and a head, in this dtype."""
    return nn.Sequential(block(), block(), nn.Linear(_ODD_FEATURES, _ODD_OUTPUTS, dtype=dtype))


def odd_case(block: type[nn.Module], dtype: torch.dtype = torch.float32, **options: Any) -> ModelCase:
    """A case of two such blocks, made with these options."""
    build = partial(build_odd, partial(block, **options), dtype)
    return ModelCase(build, partial(make_vector_batch, dtype=dtype), vector_loss, (block,))


def make_token_batch(samples: int, generator: torch.Generator) -> Batch:
    """Return int64 tokens (samples, 8) and their successors."""
    tokens = torch.randint(TinyTransformer.VOCABULARY, (samples, 9), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def make_gappy_token_batch(samples: int, generator: torch.Generator) -> Batch:
    """Return the same with about a third of the targets left out, so that parts hold unequal numbers of them."""
    batch = make_token_batch(samples, generator)
    left_out = torch.rand(batch.targets.shape, generator=generator) < 0.33
    return Batch(batch.inputs, batch.targets.masked_fill(left_out, IGNORED))


def make_vector_batch(
    samples: int, generator: torch.Generator, dtype: torch.dtype = torch.float32, features: tuple[int, int] = (7, 5)
) -> Batch:
    """Return inputs (samples, 7) and targets (samples, 5), or of other numbers of features."""
    inputs, targets = (torch.randn(samples, count, generator=generator) for count in features)
    return Batch(inputs.to(dtype), targets.to(dtype))


def token_loss(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """Mean cross-entropy in nats per token of this process, or the sum."""
    logits = model(batch.inputs).flatten(0, 1).float()
    return F.cross_entropy(logits, batch.targets.flatten(), reduction=reduction)


def vector_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.inputs), batch.targets)


def token_case(build: Callable[[], nn.Module]) -> ModelCase:
    return ModelCase(build, make_token_batch, token_loss, (Block,))


def gappy_case(build: Callable[[], nn.Module]) -> ModelCase:
    """The same with gaps among the targets, and the sum over this process' tokens as the loss."""
    return ModelCase(build, make_gappy_token_batch, partial(token_loss, reduction="sum"), (Block,))


build_dense = partial(TinyTransformer, layers=2)
DENSE = token_case(build_dense)

MODEL_CASES: dict[str, ModelCase] = {
    "transformer": token_case(TinyTransformer),
    "tied": token_case(partial(TinyTransformer, tied=True)),
    "partly_frozen": token_case(build_partly_frozen_transformer),
    "scalars": ModelCase(ScalarHead, make_vector_batch, vector_loss, (ScalarBlock,)),
    "odd_shapes": odd_case(OddBlock),
    "bf16_fp32_norm": odd_case(MixedDtypeBlock, linear_dtype=torch.bfloat16),
    "fp32_fp64_norm": odd_case(MixedDtypeBlock, torch.float64, norm_dtype=torch.float64),
    "unused": odd_case(UnusedBlock),
}
ModelName = str
