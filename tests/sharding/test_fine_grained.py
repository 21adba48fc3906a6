"""Fine-grained gathers: the modules inside units become units; results are the same and less is gathered at a time."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_fsdp.sharding.units import find_units, refine_units
from tests.conftest import RunRanks
from tests.support.case import Run, Scenario, Setting, check_strategies, shard
from tests.support.on_ranks import on_ranks
from tests.support.zoo import (
    FLOOR_NUMEL,
    ROOT_NUMEL,
    TOWER_FEATURES,
    Floor,
    Layer,
    Ordered,
    Tower,
    tower_loss,
    vector_case,
)


class Gate(nn.Module):
    """Owns a parameter itself and a module with parameters, which it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.inner(x) * self.scale)


class Block(nn.Module):
    """Every kind of inner module: a list of parameters, attention, a gate, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.ParameterList([nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))])
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.gate = Gate()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.gate(self.one(x + self.offsets[0]))) * self.offsets[1]
        rows = x.unsqueeze(1)
        return x + self.attention(rows, rows, rows, need_weights=False)[0].squeeze(1)


Blocks = partial(Ordered, (0, 1), 2, Block)
"""Two blocks between layers of the root."""


def refined(*whole: type[nn.Module]) -> dict[str, tuple[str, ...]]:
    model = Blocks()
    plan = refine_units(model, find_units(model, [Block]), whole)
    assert plan.source.endswith("fine-grained")
    return {unit.name: unit.parameters for unit in plan.units if not unit.name.startswith("layers.1")}


def test_modules_that_own_parameters_become_units() -> None:
    units = refined()
    inside = ("attention", "gate", "gate.inner", "one", "two")
    assert list(units) == ["", "layers.0", *(f"layers.0.{name}" for name in inside)]
    # A list of parameters cannot be called, so the block has them; its own children are units by themselves.
    assert units["layers.0"] == ("layers.0.offsets.0", "layers.0.offsets.1")
    assert units["layers.0.gate"] == ("layers.0.gate.scale",)
    assert units["layers.0.gate.inner"] == ("layers.0.gate.inner.weight", "layers.0.gate.inner.bias")
    assert "layers.0.attention.out_proj.weight" in units["layers.0.attention"]
    assert units["layers.0.one"] == ("layers.0.one.bias",)
    assert units["layers.0.two"] == ("layers.0.two.bias",)
    assert "layers.0.one.weight" in units[""]
    model = Blocks()
    plan = refine_units(model, find_units(model, [Block]))
    owned = [name for unit in plan.units for name in unit.parameters]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())


def test_given_types_are_taken_whole() -> None:
    units = refined(Gate)
    assert units["layers.0.gate"] == tuple(f"layers.0.gate.{name}" for name in ("scale", "inner.weight", "inner.bias"))
    assert "layers.0.gate.inner" not in units
    assert refined(Block)["layers.0"] == find_units(Blocks(), [Block]).units[1].parameters


def test_a_unit_that_hangs_at_two_paths_is_split_once() -> None:
    model = Ordered()
    model.layers[2] = model.layers[0]
    plan = refine_units(model, find_units(model, [Layer]))
    names = [unit.name for unit in plan.units]
    assert "layers.0.up" in names
    assert not any(name.startswith("layers.2") for name in names)


# ---- real ranks ----------------------------------------------------------------------------------------------------


def train_and_evaluate(run: Run) -> None:
    run.train(0)
    with torch.no_grad():
        run.loss(10)
    run.loss(1).backward()
    with run.no_sync():
        run.loss(2).backward()
    run.train(3)
    run.train(4)


FINE = ("enable_fine_grained_param_gather", True)
SETTINGS = [
    Setting(3, options=(FINE,)),
    Setting(3, options=(FINE, ("weight_allocator", "resize"))),
    Setting(1, options=(FINE,)),
]


def test_fine_grained_gathers_equal_one_process(run_ranks: RunRanks) -> None:
    case = replace(vector_case(Blocks), unit_classes=(Block,))
    check_strategies(run_ranks, 2, Scenario(train_and_evaluate, case), SETTINGS)


@on_ranks(2)
def test_two_modules_are_gathered_in_place_of_two_units() -> None:
    gathered = []
    for is_fine in (False, True):
        options = {"fsdp_unit_modules": [Floor], "enable_fine_grained_param_gather": is_fine}
        wrapped, _ = shard(Tower((32,) * 4), **options)
        tower_loss(wrapped, torch.ones(2, TOWER_FEATURES)).backward()
        gathered.append(wrapped.memory().gathered_bytes)
    # A floor has two modules of equal size.
    assert gathered == [4 * (ROOT_NUMEL + 2 * FLOOR_NUMEL), 4 * (ROOT_NUMEL + FLOOR_NUMEL)]
