"""A mixture of experts in which every expert is a unit and the data choose the expert, so that ranks skip some."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP
from tests.support.usage_models import FEATURES, Layer

EXPERTS = 4

TakePart = Callable[[nn.Module, Tensor], Tensor]


class Experts(nn.Module):
    """Two layers of experts; a sample goes to the expert that its first feature says.

    Attributes:
        take_part: What a rank does for an expert that got none of its samples; None: it skips the expert.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.floors = nn.ModuleList(nn.ModuleList(Layer() for _ in range(EXPERTS)) for _ in range(2))
        self.last = nn.Linear(FEATURES, FEATURES)
        self.take_part: TakePart | None = None

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] * 7).long().abs() % EXPERTS
        hidden = self.first(x)
        for floor in self.floors:
            mixed = torch.zeros_like(hidden)
            assert isinstance(floor, nn.ModuleList)
            for index, expert in enumerate(floor):
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
