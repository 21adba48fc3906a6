"""States that are easily mistaken for others: numbers as names, names of wrappers, other shapes, nested slots."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import CheckpointError, MegatronFSDPError
from tests.support.case import shard
from tests.support.dcp_contents import Stateful
from tests.support.on_ranks import assert_equal_tensors, on_ranks, same_on_ranks


def sequential(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


class Wrapping(nn.Module):
    """Names `weight` and `module.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.module = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x @ self.weight)


def wrapping(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Wrapping()


class OddSGD(torch.optim.SGD):
    """Keeps momentum under a name with a dot, and nested."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["ex.avg"] = torch.zeros_like(param)
                    state["inner"] = {"sum": torch.zeros_like(param), "count": 0, "none": None}
                state["ex.avg"].mul_(0.9).add_(param.grad)
                state["inner"]["sum"].add_(param.grad)
                state["inner"]["count"] += 1
                param.sub_(group["lr"] * (state["ex.avg"] + 0.1 * state["inner"]["sum"]))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


MODELS = {"sequential": sequential, "wrapping": wrapping}
OPTIMIZERS = {"adamw": adamw, "odd": lambda model: OddSGD(model.parameters(), lr=0.1)}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.linspace(-1, 1, 12).reshape(3, 4) * (step + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resumed(kind: str, optimizer_kind: str, is_sharded: bool, is_stepped: bool, folder: str) -> tuple[Any, Any]:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = MODELS[kind](seed), OPTIMIZERS[optimizer_kind]
        return shard(model, optimizer, fsdp_unit_modules=[nn.Linear]) if is_sharded else (model, optimizer(model))

    model, optimizer = make(0)
    train(model, optimizer, range(3))
    save_checkpoint(model, optimizer, folder, iteration=3)
    other, other_optimizer = make(9)
    if is_stepped:
        train(other, other_optimizer, range(5, 6))
    report = load_checkpoint(other, other_optimizer, folder, verify=True)
    assert report.is_complete
    return train(model, optimizer, range(3, 6)), train(other, other_optimizer, range(3, 6))


@pytest.mark.parametrize(
    ("is_stepped", "optimizer_kind", "kind"),
    [
        (False, "adamw", "sequential"),
        (True, "adamw", "wrapping"),
        (False, "odd", "wrapping"),
        (True, "odd", "sequential"),
    ],
)
def test_a_plain_model_goes_on_as_it_would_have(
    tmp_path: Path, kind: str, optimizer_kind: str, is_stepped: bool
) -> None:
    whole, again = resumed(kind, optimizer_kind, False, is_stepped, str(tmp_path))
    assert whole == again


@pytest.mark.full(short=["wrapping-odd"])
@pytest.mark.parametrize(("kind", "optimizer_kind"), [("sequential", "adamw"), ("wrapping", "odd")])
@on_ranks(2)
def test_a_sharded_model_goes_on_as_it_would_have(tmp_path: Path, kind: str, optimizer_kind: str) -> None:
    for is_stepped in (False, True):
        whole, again = resumed(kind, optimizer_kind, True, is_stepped, str(tmp_path / str(is_stepped)))
        assert whole == again


@on_ranks(2)
def test_what_does_not_fit_stays_as_it_was(tmp_path: Path) -> None:
    def make(width: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        return shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, width)), adamw, fsdp_unit_modules=[nn.Linear])

    model, optimizer = make(4)
    train(model, optimizer, range(2))
    save_checkpoint(model, optimizer, tmp_path / "all", iteration=2)
    save_checkpoint(model, None, tmp_path / "weights", iteration=2)
    other, other_optimizer = make(5)
    train(other, other_optimizer, range(1))
    fitting, odd = (other.module[index].weight for index in (0, 1))

    def moments() -> dict[str, torch.Tensor]:
        return {key: value.full_tensor() for key, value in other_optimizer.state[odd].items() if key != "step"}

    before = moments()
    report = load_checkpoint(other, other_optimizer, tmp_path / "all", strict=False)
    slots = [f"optimizer.state.module.1.{name}.{slot}" for name in ("bias", "weight") for slot in before]
    assert sorted(report.reshaped) == ["model.module.1.bias", "model.module.1.weight", *slots]
    assert_equal_tensors(moments(), before)
    assert [float(other_optimizer.state[weight]["step"]) for weight in (fitting, odd)] == [2, 1]
    train(other, other_optimizer, range(2))
    kept = {param: set(found) for param, found in other_optimizer.state.items()}
    load_checkpoint(other, other_optimizer, tmp_path / "weights", strict=False)
    assert {param: set(found) for param, found in other_optimizer.state.items()} == kept


@on_ranks(2)
def test_a_second_model_and_its_optimizer_are_extras(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def make(seed: int) -> list[Any]:
        pairs = []
        for offset in (0, 1):
            model = sequential(seed + offset)
            pairs += shard(model, adamw, fsdp_unit_modules=[nn.Linear])
        return pairs

    def go_on(pairs: list[Any], steps: range) -> list[float]:
        return train(pairs[0], pairs[1], steps) + train(pairs[2], pairs[3], steps)

    first = make(0)
    go_on(first, range(2))
    save_checkpoint(first[0], first[1], folder, iteration=2, extra={"critic": first[2], "critic_optimizer": first[3]})
    second = make(5)
    load_checkpoint(second[0], second[1], folder, extra={"critic": second[2], "critic_optimizer": second[3]})
    whole, again = go_on(first, range(2, 5)), go_on(second, range(2, 5))
    assert whole == again


def test_dicts_keep_their_order_and_odd_ones_are_refused(tmp_path: Path) -> None:
    model, box = nn.Linear(2, 2), Stateful()
    kept = {"z": 1, "a": {"y": 2, "b": torch.ones(2)}, "m\u00a0n": [3]}
    save_checkpoint(model, None, tmp_path, iteration=1, extra={"box": Stateful(kept)})
    load_checkpoint(model, None, tmp_path, extra={"box": box})
    assert list(box.state) == ["z", "a", "m\u00a0n"]
    assert list(box.state["a"]) == ["y", "b"]
    for odd in ({"a": collections.defaultdict(list)}, {"a\nb": 1}, {"\ud800": 1}):
        with pytest.raises(MegatronFSDPError, match="box"):
            save_checkpoint(model, None, tmp_path, iteration=2, extra={"box": Stateful(odd)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


class WithExtraState(nn.Linear):
    def __init__(self, value: Any) -> None:
        super().__init__(3, 3)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(("saved", "fresh"), [({"n": 5, "t": torch.ones(2)}, {"n": 0, "t": torch.zeros(2)}), ([1], [])])
def test_extra_state_of_modules(tmp_path: Path, saved: Any, fresh: Any) -> None:
    save_checkpoint(nn.Sequential(WithExtraState(saved)), None, tmp_path, iteration=1)
    model = nn.Sequential(WithExtraState(fresh))
    assert load_checkpoint(model, None, tmp_path).is_complete
    assert str(model[0].value) == str(saved)


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, tmp_path, iteration=1)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match="state of AdamW, and the optimizer is SGD"):
        load_checkpoint(model, other, tmp_path)
    assert not other.state


def test_what_an_old_run_has_not_is_left_alone_and_empty_ones_are_filled(tmp_path: Path) -> None:
    model, new = nn.Linear(2, 2), Stateful({"count": 3})
    save_checkpoint(model, None, tmp_path, iteration=1, extra={"seen": Stateful({"files": {"a.txt": 5}})})
    report = load_checkpoint(model, None, tmp_path, extra={"new": new}, strict=False)
    assert report.missing == ("new",)
    assert new.state == {"count": 3}
    fresh = Stateful({"files": {}})
    assert load_checkpoint(model, None, tmp_path, extra={"seen": fresh}).is_complete
    assert fresh.state == {"files": {"a.txt": 5}}


@on_ranks(2)
def test_loading_where_full_parameters_are_shown_is_refused(tmp_path: Path) -> None:
    wrapped, _ = shard(sequential(0), fsdp_unit_modules=[nn.Linear])
    save_checkpoint(wrapped, None, tmp_path, iteration=1)
    with wrapped.full_parameters_context(), pytest.raises(MegatronFSDPError) as caught:
        load_checkpoint(wrapped, None, tmp_path)
    assert "load outside of full_parameters_context()" in same_on_ranks(str(caught.value))
