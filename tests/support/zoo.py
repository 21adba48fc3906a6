"""The models of the tests, each the smallest that shows something which sharding finds hard.

Transformers, odd shapes and dtypes come first (`MODEL_CASES`), then units that are used again, in turn, nested or
recomputed (`vector_case`), then the tower, whose memory can be worked out by hand. A `ModelCase` is plain data of
module-level functions, so it can be sent to worker processes. The caller seeds (`with fixed_seed(0): model =
case.build()`), so that every rank builds the same weights.
"""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MegatronFSDP

_gather = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)  # torch 2.11
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


class Holder(nn.Module):
    """Tensors, which become parameters, and modules by name, with buffers; it computes nothing."""

    def __init__(self, buffers: Mapping[str, Tensor] | None = None, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)


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
            key, value = (_gather(part.contiguous(), 2, self.context) for part in (key, value))
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
    return F.mse_loss(model(batch.inputs).to(batch.targets.dtype), batch.targets)  # torch 2.11 mixes no dtypes


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

# ---- units used in unusual ways: vectors of `FEATURES` in and out ----------------------------------------------------

FEATURES = 6
Where = Literal["units", "inside", "pairs", "all"]


class Layer(nn.Module):
    """A unit: two linear layers, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 9)
        self.down = nn.Linear(9, FEATURES)

    def inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inside(x))


class Between(nn.Module):
    """Modules between an input and an output layer, all children in this order."""

    layers: nn.ModuleList

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        for name, module in modules.items():
            self.add_module(name, module)
        self.last = nn.Linear(FEATURES, FEATURES)

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Ordered(Between):
    """Units that are called in the order that `order` says (again, or not at all)."""

    def __init__(
        self, order: tuple[int, ...] = (0, 1, 2, 3), layers: int = 4, unit: Callable[[], nn.Module] = Layer
    ) -> None:
        super().__init__(layers=nn.ModuleList(unit() for _ in range(layers)))
        self.order = order

    def middle(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Recomputed(Ordered):
    """`Ordered` whose activations are recomputed in backward.

    `where`: each unit by itself, the inside of each unit, two units at a time, or all layers in one piece.
    """

    def __init__(self, where: Where, reentrant: bool, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.width = {"units": 1, "inside": 0, "pairs": 2, "all": 4}[where]
        self.checkpoint = partial(checkpoint, use_reentrant=reentrant)
        if where == "inside":
            layer: Any
            for layer in self.layers:
                layer.inside = partial(self.checkpoint, layer.inside)

    def middle(self, x: Tensor) -> Tensor:
        if not self.width:
            return super().middle(x)
        for start in range(0, len(self.order), self.width):
            x = self.checkpoint(self.piece, x, self.order[start : start + self.width])
        return x

    def piece(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


class Caller(Layer):
    """A unit whose forward calls another unit, which is registered elsewhere."""

    def __init__(self, helper: nn.Module) -> None:
        super().__init__()
        self.helper = (helper,)  # in a tuple, so that it is no submodule

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(x)
        return x + self.down(hidden) - 0.5 * self.helper[0](x) + self.down(hidden * 0.5)


class RecomputedCaller(Layer):
    """A unit that recomputes its own inside, and behind it another unit, which is registered elsewhere."""

    follower: tuple[nn.Module, ...] = ()  # a tuple, so that it is no submodule

    def forward(self, x: Tensor) -> Tensor:
        if not self.follower:
            return super().forward(x)
        hidden = checkpoint(super().forward, x, use_reentrant=False)
        return checkpoint(self.follower[0], hidden, use_reentrant=False)


class NeighbourCallers(Ordered):
    """`Ordered` of four units, of which the first of each two calls the second."""

    def __init__(self) -> None:
        super().__init__((0, 2), unit=RecomputedCaller)
        first, second, third, fourth = self.layers
        first.follower, third.follower = (second,), (fourth,)  # type: ignore[assignment]


class Nested(nn.Module):
    """Callers around one helper that the root calls too, before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Layer()
        self.callers = nn.ModuleList(Caller(self.helper) for _ in range(3))
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.helper(x)
        for caller in self.callers:
            x = caller(x)
        return self.last(self.helper(x))


Parts = make_dataclass("Parts", ["left", "right"])
Pair = namedtuple("Pair", ["value", "extra"])


class Packed(Layer):
    """A unit of keyword-only arguments that returns its result in a container: `pack(result, hidden, input)`."""

    def __init__(self, pack: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, *, x: Tensor, scale: float) -> Any:  # type: ignore[override]
        hidden = self.inside(x)
        return self.pack(super().forward(x) * scale, hidden, x)


class Unpacking(nn.Module):
    """Units of all forms in turn; `last` uses both results of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                Packed(lambda result, hidden, _: {"value": result, "hidden": hidden}),
                Packed(lambda result, hidden, x: Parts(result, (hidden, {"name": x}))),
                Packed(lambda result, hidden, _: Pair(result, hidden)),
                Packed(lambda result, hidden, _: (1, {"value": result}, [hidden])),
            ]
        )
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        packed = first(x=x, scale=1.5)
        parts = second(x=packed["value"], scale=0.5)
        pair = third(x=parts.left + parts.right[1]["name"], scale=1.0)
        _, named, (hidden,) = fourth(x=pair.value, scale=2.0)
        extra = packed["hidden"] + parts.right[0] * pair.extra * hidden
        return self.last(named["value"]) + extra.mean(dim=-1, keepdim=True)


class InObject(Layer):
    """A unit that returns its result in an attribute of an object."""

    def forward(self, x: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(value=super().forward(x))


class Hidden:
    """Holds a result where nothing looks for it."""

    def __init__(self, value: Tensor) -> None:
        self.read = lambda: value

    @property
    def value(self) -> Tensor:
        return self.read()  # type: ignore[no-untyped-call]


class Slotted:
    """Holds a result in a slot."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class InSlot(Layer):
    """A unit that returns its result in a slot of an object."""

    def forward(self, x: Tensor) -> Slotted:  # type: ignore[override]
        return Slotted(super().forward(x))


class Opaque(Layer):
    """A unit that hides its result in an object that nothing looks into."""

    def forward(self, x: Tensor) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(x))


class HidesResults(Ordered):
    """Units that return objects, so many that their weights cannot all stay gathered."""

    def __init__(self, frozen: bool = False, unit: type[Layer] = Opaque) -> None:
        super().__init__(unit=unit)
        self.layers.requires_grad_(requires_grad=not frozen)

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).value
        return x


class InPlace(Ordered):
    """Writes into the outputs of its units, and into views of them."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 0.5
            x[:, :2].mul_(0.5)
        return x.relu_()


class SideLoss(Layer):
    """A unit that leaves a loss per sample as an attribute, computed with its weights after its result."""

    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.penalty = 0.1 * self.up(result).square().mean(dim=-1, keepdim=True)
        return result


class Penalised(Ordered):
    """Units whose side losses are added up at the end."""

    def __init__(
        self, order: tuple[int, ...] = (0, 1, 2, 3), layers: int = 4, unit: Callable[[], nn.Module] = SideLoss
    ) -> None:
        super().__init__(order, layers, unit)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(layer.penalty for layer in self.layers)  # type: ignore[misc]


class Branching(Layer):
    """A unit that uses one of two layers; `branch` says which, None neither."""

    branch: Literal["even", "odd"] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        if self.branch is not None:
            x = x + torch.tanh(getattr(self, self.branch)(x))
        return super().forward(x)


Branches = partial(Ordered, (0, 1, 2), 3, Branching)
make_batch = partial(make_vector_batch, features=(FEATURES, FEATURES))


def vector_case(build: Callable[[], nn.Module]) -> ModelCase:
    """A case whose units are the `Layer`s (and what derives from them)."""
    return ModelCase(build, make_batch, vector_loss, (Layer,))


class SelfAttention(Between):
    """Self-attention, whose output projection is never called: its weight is read by the module around it."""

    attention: nn.MultiheadAttention
    layer: Layer

    def __init__(self) -> None:
        super().__init__(attention=nn.MultiheadAttention(FEATURES, 2, batch_first=True), layer=Layer())

    def middle(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.arange(1.0, 4.0).view(1, -1, 1)  # three tokens of a sample
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.layer(x.mean(dim=1))


class Encoder(Between):
    """torch's encoder layers: in evaluation they read the weights of their parts without calling them."""

    def __init__(self) -> None:
        make = partial(nn.TransformerEncoderLayer, FEATURES, 2, 11, dropout=0.0, batch_first=True)
        super().__init__(layers=nn.ModuleList(make() for _ in range(2)))

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x.unsqueeze(1)).squeeze(1)


class Reading(nn.Module):
    """A model that reads weights of modules it never calls, lists of parameters, and weights of its own, late."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.linspace(-1.0, 1.0, FEATURES))
        self.first = nn.Linear(FEATURES, FEATURES)
        self.table = nn.ParameterList([torch.full((FEATURES,), 0.5), torch.linspace(0.0, 1.0, FEATURES)])
        self.silent = nn.Linear(FEATURES, FEATURES)
        self.inner = Layer()
        self.mirror = nn.Linear(FEATURES, FEATURES, bias=False)
        self.mirror.weight = self.first.weight  # tied, and far away from each other

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.table[0]
        x = self.inner(x) + F.linear(x, self.silent.weight.t(), self.silent.bias)
        return self.mirror(x) * self.late + self.table[1]


class Recurrent(Between):
    """Recurrent layers, which keep a list of their weights beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()  # first, as its layers draw in the order in which they are registered
        self.layers = nn.ModuleList(nn.LSTM(FEATURES, FEATURES, batch_first=True) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        for layer in self.layers:
            x, _ = layer(x)
        return x[:, -1]


ATTENTION: ModelCase = vector_case(SelfAttention)
ENCODER: ModelCase = vector_case(Encoder)
READING: ModelCase = vector_case(Reading)

EXPERTS = 4


class Experts(Between):
    """Two layers of experts; a sample goes to the expert that its first feature says."""

    floors: nn.ModuleList
    take_part: Callable[[nn.Module, Tensor], Tensor] | None = None
    """What a rank does for an expert that got none of its samples; None: it skips the expert."""

    def __init__(self) -> None:
        super().__init__(floors=nn.ModuleList(nn.ModuleList(Layer() for _ in range(EXPERTS)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] * 7).long().abs() % EXPERTS
        hidden = self.first(x)
        for floor in self.floors:
            mixed = torch.zeros_like(hidden)
            for index, expert in enumerate(floor.children()):
                mine = (chosen == index).nonzero().flatten()
                if len(mine):
                    mixed = mixed.index_add(0, mine, expert(hidden[mine]))
                elif self.take_part is not None:
                    hidden = self.take_part(expert, hidden)
            hidden = hidden + mixed
            chosen = (chosen + 1) % EXPERTS
        return self.last(hidden)


def let_take_part(model: nn.Module) -> None:
    """Make the experts of a sharded model take part where they have no samples; nothing on one process."""
    if isinstance(model, MegatronFSDP):
        assert isinstance(model.module, Experts)
        model.module.take_part = model.take_part


class PlannedError(Exception):
    """The failure that was asked for."""


class Failing(Layer):
    """A unit that raises at the point that `fails_at` names."""

    fails_at: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda *_: self.fail("forward pre-hook"))
        self.register_forward_hook(lambda *_: self.fail("forward hook"))
        self.up.weight.register_hook(lambda _grad: self.fail("backward of a parameter"))

    def fail(self, point: str) -> None:
        if self.fails_at == point:
            raise PlannedError(point)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)
        self._watch(x, "backward of the input")
        hidden = self.inside(x)
        self.fail("forward")
        self._watch(hidden, "backward")
        output: Tensor = x + self.down(hidden)
        self._watch(output, "backward of the output")
        return output

    def _watch(self, tensor: Tensor, point: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _grad: self.fail(point))


FailingModel = partial(Ordered, (0, 1, 2), 3, Failing)
"""Failing units between layers of the root."""


@contextmanager
def failing_at(model: Any, position: int, point: str) -> Iterator[None]:
    """Let one layer of a (sharded or plain) model fail inside a block."""
    layer = model.layers[position]
    layer.fails_at = point
    with ExitStack() as stack:
        stack.callback(setattr, layer, "fails_at", None)
        if point == "earlier forward pre-hook":  # registered now, and before all that are there
            stack.enter_context(layer.register_forward_pre_hook(lambda *_: layer.fail(point), prepend=True))
        yield


# ---- a model whose memory can be worked out by hand: no bias, rows that divide over 4 ranks --------------------------

TOWER_FEATURES = 16
HIDDEN = 32
FLOORS = 8
ROOT_NUMEL = 2 * TOWER_FEATURES * TOWER_FEATURES
FLOOR_NUMEL = 2 * TOWER_FEATURES * HIDDEN


class Floor(nn.Module):
    """Two linear layers and a residual connection; (samples, features) in and out."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(TOWER_FEATURES, hidden, bias=False)
        self.down = nn.Linear(hidden, TOWER_FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    """A layer, eight floors, a layer; the two layers belong to the root. Parameters: 512 and 8 times 1024.

    Other floors are asked for by their widths; a floor of width h has 32 h parameters.
    """

    floor: type[Floor] = Floor

    def __init__(self, hidden: tuple[int, ...] = (HIDDEN,) * FLOORS) -> None:
        super().__init__()
        self.first = nn.Linear(TOWER_FEATURES, TOWER_FEATURES, bias=False)
        self.floors = nn.Sequential(*(self.floor(width) for width in hidden))
        self.last = nn.Linear(TOWER_FEATURES, TOWER_FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.floors(self.first(x)))


def tower_loss(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.float().square().mean()


def _build_tower(tower: type[Tower], hidden: tuple[int, ...], dtype: torch.dtype) -> Tower:
    return tower(hidden).to(dtype)


def tower_case(
    hidden: tuple[int, ...] = (HIDDEN,) * FLOORS, dtype: torch.dtype = torch.float32, tower: type[Tower] = Tower
) -> ModelCase:
    """Floors of these widths between vectors, in this dtype."""
    make_batch = partial(make_vector_batch, dtype=dtype, features=(TOWER_FEATURES, TOWER_FEATURES))
    return ModelCase(partial(_build_tower, tower, hidden, dtype), make_batch, vector_loss, (Floor,))


def tower_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, microbatches: int = 1) -> Tensor:
    """Backwards of some microbatches, and a step whose gradients are cleared; returns the last loss."""
    for _ in range(microbatches):
        loss = tower_loss(model, x)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
