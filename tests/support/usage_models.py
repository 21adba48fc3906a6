"""Small models that use their units in unusual ways: again, in turn, nested, recomputed, with odd outputs.

All take and return float32 vectors of `FEATURES`; `vector_case` makes a `ModelCase` of a builder.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MegatronFSDP
from tests.support.zoo import ModelCase, make_vector_batch, vector_loss

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

    def __init__(self, where: Where, reentrant: bool) -> None:
        super().__init__()
        self.width = {"units": 1, "inside": 0, "pairs": 2, "all": 4}[where]
        self.checkpoint = partial(checkpoint, use_reentrant=reentrant)
        if where == "inside":
            layer: Any
            for layer in self.layers:
                layer.inside = partial(self.checkpoint, layer.inside)

    def middle(self, x: Tensor) -> Tensor:
        if not self.width:
            return super().middle(x)
        for start in range(0, len(self.layers), self.width):
            x = self.checkpoint(self.piece, x, start, start + self.width)
        return x

    def piece(self, x: Tensor, start: int, stop: int) -> Tensor:
        for layer in self.layers[start:stop]:
            x = layer(x)
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


class Opaque(Layer):
    """A unit that hides its result in an object that nothing looks into."""

    def forward(self, x: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(value=super().forward(x))


class HidesResults(Ordered):
    """Opaque units, so many that their weights cannot all stay gathered."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__(unit=Opaque)
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

    def __init__(self) -> None:
        super().__init__(unit=SideLoss)

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


class Attention(Between):
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


ATTENTION: ModelCase = vector_case(Attention)
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
