"""Small models whose parameters are read by other modules than those that own them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import ModelCase
from tests.support.usage_models import FEATURES, Layer, vector_case

_LENGTH = 3


class Attention(nn.Module):
    """Self-attention, whose output projection is never called: its weight is read by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.layer = Layer()
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(1).expand(-1, _LENGTH, -1)
        scale = torch.arange(1.0, _LENGTH + 1).view(1, -1, 1)
        x = x * scale
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.layer(x.mean(dim=1)))


class Encoder(nn.Module):
    """torch's encoder layers: in evaluation they read the weights of their parts without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(FEATURES, 2, 11, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.last(x.squeeze(1))


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
