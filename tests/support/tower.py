"""A model whose memory can be worked out by hand: layers without bias whose rows divide over 4 ranks."""

import torch
from torch import Tensor, nn

FEATURES = 16
HIDDEN = 32
FLOORS = 8
ROOT_NUMEL = 2 * FEATURES * FEATURES
FLOOR_NUMEL = 2 * FEATURES * HIDDEN


class Floor(nn.Module):
    """Two linear layers and a residual connection; (samples, features) in and out."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, hidden, bias=False)
        self.down = nn.Linear(hidden, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    """A layer, eight floors, a layer; the two layers belong to the root. Parameters: 512 and 8 times 1024.

    Other floors are asked for by their widths; a floor of width h has 32 h parameters.
    """

    floor: type[Floor] = Floor

    def __init__(self, hidden: tuple[int, ...] = (HIDDEN,) * FLOORS) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.floors = nn.Sequential(*(self.floor(width) for width in hidden))
        self.last = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.floors(self.first(x)))


def tower_loss(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.float().square().mean()
