"""Models that can be built on the meta device, each with something that their initialisation finds hard."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tests.support.models import MODEL_CASES, Block, TinyTransformer

TOKENS = 6


class Waves(nn.Module):
    """Fixed frequencies in a buffer that no checkpoint holds, and a counter in one that it does."""

    frequencies: Tensor
    calls: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(features), persistent=False)
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.frequencies = 100.0 ** -torch.linspace(0, 1, len(self.frequencies))
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.arange(x.shape[1]).unsqueeze(-1) * self.frequencies)


class SmallGPT(TinyTransformer):
    """A transformer with waves beside its learned positions."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.waves = Waves(self.FEATURES)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.waves(super().embed(tokens))


class RootResetGPT(SmallGPT):
    """A root with a parameter of its own, and a reset method that draws that and one of a module below it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(self.VOCABULARY))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.uniform_(self.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.bias


class AppliedGPT(SmallGPT):
    """A model that tells every module how to begin, once all are constructed; weights are tied before."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.gain = nn.Parameter(torch.empty(1))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            nn.init.normal_(module.mlp.get_parameter("down.weight"), std=0.01)
        if module is self:
            nn.init.ones_(self.gain)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.gain


class TiedBlocks(nn.Module):
    """Two units that share a matrix, which so belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.Linear(7, 7), nn.Linear(7, 7)) for _ in range(2)]
        pairs[1][0].weight = pairs[0][1].weight
        self.blocks = nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class SharedLayer(nn.Module):
    """Two units that hold the same layer, each with a method that writes only what is its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Shifted(layer) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Shifted(nn.Module):
    """A layer and a shift."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.shift = nn.Parameter(torch.empty(7))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


class AppliedSharedLayer(SharedLayer):
    """The same in a model that draws every matrix anew, that of the shared layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


class Recurrent(nn.Module):
    """A recurrent network, which keeps a second list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(5, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])


@dataclass(frozen=True)
class MetaCase:
    """A model, an input for it and its units."""

    build: Callable[[], nn.Module]
    make_input: Callable[[], Tensor]
    units: tuple[type[nn.Module], ...] | None


def tokens() -> Tensor:
    """int64 (4, 6)."""
    return torch.arange(4 * TOKENS).view(4, TOKENS) % TinyTransformer.VOCABULARY


def _vectors(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def build_partly_frozen() -> nn.Module:
    """Freeze the embedding and one matrix of one block."""
    model = SmallGPT()
    model.tokens.requires_grad_(requires_grad=False)
    block = model.blocks[1]
    assert isinstance(block, Block)
    block.mlp.get_submodule("up").requires_grad_(requires_grad=False)
    return model


def build_attention() -> nn.Module:
    """Layers of torch whose constructors draw the output projection before the input projection."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)))


def build_batch_norm() -> nn.Module:
    """Running statistics are buffers."""
    return nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))


META_CASES: dict[str, MetaCase] = {
    "odd_shapes": MetaCase(MODEL_CASES["odd_shapes"].build, lambda: _vectors(4, 7), None),
    "bf16_fp32_norm": MetaCase(MODEL_CASES["bf16_fp32_norm"].build, lambda: _vectors(4, 7), None),
    "fp32_fp64_norm": MetaCase(MODEL_CASES["fp32_fp64_norm"].build, lambda: _vectors(4, 7).double(), None),
    "gpt": MetaCase(SmallGPT, tokens, (Block,)),
    "tied": MetaCase(partial(SmallGPT, tied=True), tokens, (Block,)),
    "partly_frozen": MetaCase(build_partly_frozen, tokens, (Block,)),
    "root_reset": MetaCase(RootResetGPT, tokens, (Block,)),
    "applied": MetaCase(AppliedGPT, tokens, (Block,)),
    "tied_across_units": MetaCase(TiedBlocks, lambda: _vectors(4, 7), None),
    "shared_layer": MetaCase(SharedLayer, lambda: _vectors(4, 7), None),
    "applied_shared_layer": MetaCase(AppliedSharedLayer, lambda: _vectors(4, 7), None),
    "recurrent": MetaCase(Recurrent, lambda: _vectors(2, 3, 5), None),
    "attention": MetaCase(build_attention, lambda: _vectors(2, 3, 8), None),
    "batch_norm": MetaCase(build_batch_norm, lambda: _vectors(4, 5, 6), ()),
}
