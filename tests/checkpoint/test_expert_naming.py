"""The ways in which experts are named, with unequal numbers of them on the ranks, and buffers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.conftest import RunRanks
from tests.support.dcp_contents import assert_same_contents, contents
from tests.support.experts import arguments

EXPERTS = 3


class Expert(nn.Module):
    """A matrix, and a buffer that differs between experts."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.w = nn.Parameter(1.0 + index + torch.linspace(0.0, 0.5, 6).view(2, 3))
        self.register_buffer("seen", torch.tensor([float(index)]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.t()


class Grouped(nn.Module):
    """Parameters that carry the number of their expert at the end, as grouped linear layers have them."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        for here, index in enumerate(experts):
            self.register_parameter(f"weight{here}", nn.Parameter(torch.full((2, 3), 1.0 + index)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ w.t() for w in self.parameters()]).sum(0)


class Stacked(nn.Module):
    """One tensor."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.stack([torch.full((2, 3), 1.0 + index) for index in experts]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w.transpose(1, 2)).sum(0)


def make_experts(naming: str, experts: range) -> nn.Module:
    if naming == "grouped":
        return nn.ModuleDict({"fc": Grouped(experts)})
    if naming == "stacked":
        return Stacked(experts)
    if naming == "local":
        return nn.ModuleList(Expert(index) for index in experts)
    return nn.ModuleDict({str(index): Expert(index) for index in experts})


class Net(nn.Module):
    """Dense layers around the sum of a rank's experts, of which others have others."""

    def __init__(self, naming: str, experts: range) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.experts = make_experts(naming, experts)
        self.after = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        held = self.experts if isinstance(self.experts, Stacked) else nn.ModuleList(self.experts.children())
        mixed = held(x) if isinstance(held, Stacked) else torch.stack([expert(x) for expert in held]).sum(0)
        return self.after(mixed)


def wrap(naming: str, ep: int, seed: int, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    rank = dist.get_rank() if ep > 1 else 0
    model = Net(naming, range(EXPERTS) if ep == 1 else (range(2), range(2, EXPERTS))[rank])
    given = arguments((("ep", ep), ("dp_shard", 1))) if ep > 1 else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    return fully_shard(model, optimizer, **given, **options)


def step(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(naming: str, ep: int, folder: str) -> None:
    model, optimizer = wrap(naming, ep, 0)
    step(model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def load(naming: str, ep: int, source: str, target: str) -> None:
    model, optimizer = wrap(naming, ep, 1)
    step(model, optimizer)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(-1.0)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=source)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    dcp.save(state_of(model, optimizer), checkpoint_id=target)


NAMES = {
    "local": [f"experts.{index}.{part}" for index in range(EXPERTS) for part in ("w", "seen")],
    "global": [f"experts.{index}.{part}" for index in range(EXPERTS) for part in ("w", "seen")],
    "grouped": [f"experts.fc.weight{index}" for index in range(EXPERTS)],
    "stacked": ["experts.w"],
}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("naming", NAMES)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_two_and_one_experts_load_into_three_and_back(
    run_ranks: RunRanks, tmp_path: Path, naming: str, saved: int, loaded: int
) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    run_ranks(saved, save, naming, saved, source)
    found = contents(source)
    assert {key for key in found if ".experts." in key} == {f"model.module.{name}" for name in NAMES[naming]}
    for index in range(EXPERTS):
        if naming in ("local", "global"):
            assert found[f"model.module.experts.{index}.seen"].item() == index
        name = {"grouped": f"experts.fc.weight{index}", "stacked": "experts.w"}.get(naming, f"experts.{index}.w")
        value = found[f"model.module.{name}"]
        assert ((value[index] if naming == "stacked" else value).mean() - 1.0 - index).abs() < 1.0
    run_ranks(loaded, load, naming, loaded, source, target)
    assert_same_contents(contents(target), found)


def left_alone(naming: str) -> tuple[list[str], list[int]]:
    """Without preparation for checkpoints a state dict is this rank's own, and it loads."""
    model, optimizer = wrap(naming, 2, 0, preproc_state_dict_for_dcp_ckpt=False)
    step(model, optimizer)
    before, state = model.full_parameters(), {key: value.clone() for key, value in model.state_dict().items()}
    moments = optimizer.state_dict()
    step(model, optimizer)
    model.load_state_dict(state)
    optimizer.load_state_dict(moments)
    assert all(torch.equal(value, before[name]) for name, value in model.full_parameters().items())
    return [key for key in state if ".experts." in key], moments["param_groups"][0]["params"]


@pytest.mark.parametrize("naming", ["local", "stacked"])
def test_without_preparation_state_dicts_are_those_of_the_rank(run_ranks: RunRanks, naming: str) -> None:
    (first, numbers), (second, fewer) = run_ranks(2, left_alone, naming)
    experts = 2 if naming == "local" else 1
    assert second[:1] == first[:1]
    assert numbers == list(range(4 + experts))
    assert fewer == list(range(5))
