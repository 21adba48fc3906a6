"""The state of every optimizer that is accepted goes through plain dcp calls, from any ranks to any ranks."""

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from megatron_fsdp import ChainedOptimizer, MegatronFSDP, fully_shard_optimizer, steps_whole_tensors
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.case import momentum, shard
from tests.support.dcp_contents import assert_same_contents, contents, load_state, state_of
from tests.support.on_ranks import of_ranks, on_ranks
from tests.support.optimizer_reference import Lion

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """Sub-row and row shards, a tensor of one element (empty on all ranks but one) and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(7, 3))
        self.wide = nn.Parameter(torch.randn(1, 7))
        self.one = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 3) -> (samples, 1)."""
        return (x @ self.rows.t()) @ self.wide.t() * self.scale + self.one


class LateNet(Net):
    """With a parameter that gets no gradient until it is told to take part."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 3) -> (samples, 1)."""
        return super().forward(x) + (self.late.sum() if self.is_late else 0.0)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.5),
    "Adam": lambda p: torch.optim.Adam(p, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "third-party": Lion,
}


def wrap(name: str, strategy: int, seed: int, kind: type[Net] = Net) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    return shard(kind(), lambda model: OPTIMIZERS[name](model.parameters()), zero_dp_strategy=strategy)


def step(model: MegatronFSDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed))
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_all(strategy: int, folder: str) -> None:
    for name in OPTIMIZERS:
        model, optimizer = wrap(name, strategy, 0)
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        optimizer.param_groups[0]["lr"] *= 0.5
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{name}")


def load_all(strategy: int, fresh: bool, source: str, target: str) -> None:
    """Into optimizers that have stepped, or into fresh ones; and go on from there."""
    for name in OPTIMIZERS:
        model, optimizer = wrap(name, strategy, 7)
        if not fresh:
            step(model, optimizer, 5)
        elif name == "third-party":  # nobody knows its state before its first step
            load_checkpoint(model, optimizer, f"{source}/{name}", with_rng=False, strict=False)
        load_state(model, optimizer, f"{source}/{name}")
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{target}/{name}")
        step(model, optimizer, 6)


@pytest.fixture(scope="module")
def source(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("source"))
    run_ranks(3, save_all, 3, folder)
    return folder


@pytest.mark.full(short=["fresh"])
@pytest.mark.parametrize(("ranks", "strategy", "fresh"), [(3, 3, False), (2, 2, True)], ids=["stepped", "fresh"])
def test_every_optimizer_is_saved_and_loaded(
    run_ranks: RunRanks, source: str, tmp_path: Path, ranks: int, strategy: int, fresh: bool
) -> None:
    target = str(tmp_path)
    run_ranks(ranks, load_all, strategy, fresh, source, target)
    for name in OPTIMIZERS:
        found = contents(f"{source}/{name}")
        assert len([key for key in found if key.startswith("optimizer.state.0.")]) >= 1
        assert {key.split(".")[2] for key in found if key.startswith("optimizer.state.")} == set("0123")
        assert_same_contents(contents(f"{target}/{name}"), found)


# ---- state before the first step -------------------------------------------------------------------------------------


@on_ranks(2)
def test_blank_state_that_is_loaded_trains_as_none(tmp_path: Path) -> None:
    """Saved and loaded before the first step, and once more before the first of one parameter."""
    for name in [name for name in OPTIMIZERS if name != "third-party"]:
        (model, optimizer), (other, loaded) = wrap(name, 2, 0, LateNet), wrap(name, 2, 0, LateNet)
        before = copy.deepcopy(dict(loaded.state))
        dcp.save({"optimizer": loaded.state_dict()}, checkpoint_id=tmp_path / name)
        assert str(dict(loaded.state)) == str(before), name
        for late in (False, True):
            blank = {"optimizer": loaded.state_dict()}
            if not late:
                dcp.load(blank, checkpoint_id=tmp_path / name)
            loaded.load_state_dict(copy.deepcopy(blank["optimizer"]))
            for net, steps in ((model, optimizer), (other, loaded)):
                net.module.is_late = late
                step(net, steps, 1)
                step(net, steps, 2)
        for ours, theirs in zip(_locals(model), _locals(other), strict=True):
            assert torch.equal(ours, theirs), name
            assert ours.isfinite().all(), name
        is_made_at_once = name == "Adagrad"
        assert len(before) == (6 if is_made_at_once else 0), name
        assert [*blank["optimizer"]["state"]] == [0, 1, 2, 3, 4, *([5] if is_made_at_once else [])], name  # 5 is frozen


@on_ranks(2)
def test_blank_momentum_is_told_from_one_of_zeros() -> None:
    """Without momentum there is no state, and blank momentum is no gradient of zero that was seen."""
    _model, optimizer = wrap("SGD dampening", 3, 0)
    blank = optimizer.state_dict()["state"][0]["momentum_buffer"]
    _plain, without = shard(Net(), zero_dp_strategy=3)
    assert (list(without.state_dict()["state"]), bool(torch.signbit(blank.to_local()).all())) == ([], True)


# ---- a rank without state --------------------------------------------------------------------------------------------


@on_ranks(4)
def test_ranks_without_state_for_an_empty_shard_save_and_load(tmp_path: Path) -> None:
    """They may have none when they save and when they load."""
    model, optimizer = wrap("Adam", 3, 0)
    step(model, optimizer, 1)
    dropped = of_ranks(drop_empty_state(optimizer))
    assert sum(count > 0 for count in dropped) >= 2
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "saved")
    other, loaded = wrap("Adam", 3, 7)
    step(other, loaded, 2)
    if dist.get_rank() % 2:
        drop_empty_state(loaded)
    load_state(other, loaded, tmp_path / "saved")
    dcp.save(state_of(other, loaded), checkpoint_id=tmp_path / "again")
    assert_same_contents(contents(str(tmp_path / "again")), contents(str(tmp_path / "saved")))
    step(other, loaded, 3)
    step(model, optimizer, 3)
    assert all(map(torch.equal, _locals(other), _locals(model)))


def drop_empty_state(optimizer: torch.optim.Optimizer) -> int:
    empty = [param for param in optimizer.state if param.to_local().numel() == 0]  # type: ignore[attr-defined]
    for param in empty:
        del optimizer.state[param]
    return len(empty)


def _locals(model: MegatronFSDP) -> list[Tensor]:
    return [param.detach().to_local() for param in model.parameters()]  # type: ignore[attr-defined]


# ---- torch's own functions -------------------------------------------------------------------------------------------


@on_ranks(3)
def test_the_functions_of_torch_key_the_state_by_name(tmp_path: Path) -> None:
    model, optimizer = wrap("Adam", 3, 0)
    step(model, optimizer, 1)
    found, state = torch_state_dict.get_state_dict(model, optimizer)
    assert sorted(state["state"]) == [f"module.{name}" for name in ("one", "rows", "scale", "wide")]
    dcp.save({"model": found, "optimizer": state}, checkpoint_id=tmp_path / "saved")
    other, fresh = wrap("Adam", 3, 7)
    before = _locals(other)
    blank_model, blank = torch_state_dict.get_state_dict(other, fresh)
    assert all(map(torch.equal, before, _locals(other)))  # torch makes state by a step with a learning rate of 0
    dcp.load({"model": blank_model, "optimizer": blank}, checkpoint_id=tmp_path / "saved")
    torch_state_dict.set_state_dict(other, fresh, model_state_dict=blank_model, optim_state_dict=blank)
    again, state_again = torch_state_dict.get_state_dict(other, fresh)
    dcp.save({"model": again, "optimizer": state_again}, checkpoint_id=tmp_path / "again")
    assert_same_contents(contents(str(tmp_path / "again")), contents(str(tmp_path / "saved")))


# ---- state of no parameter -------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Counts steps in state that belongs to no parameter, as SPAM of pytorch_optimizer does."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["count"] = 7  # type: ignore[index]
        self.state["seen"] = {"total": torch.zeros(2)}  # type: ignore[index]

    def step(self, closure: Any = None) -> Any:
        """Count, and step."""
        self.state["count"] += 1  # type: ignore[index,operator]
        self.state["seen"]["total"] += 2.0  # type: ignore[index]
        return super().step(closure)


@steps_whole_tensors
class CountingWhole(Counting):
    """The same, where each parameter is stepped whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        """Count, and step."""
        self.state["count"] += 1  # type: ignore[index,operator]
        self.state["seen"]["total"] += 2.0  # type: ignore[index]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1)


def shared_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    state: Any = optimizer.state
    return [state.get("count"), state.get("seen", {}).get("total", torch.zeros(2)).tolist()]


@pytest.mark.full(short=["whole"])
@pytest.mark.parametrize("how", ["whole", "chain"])
@on_ranks(2)
def test_state_that_belongs_to_no_parameter_is_kept_saved_and_loaded(how: str, tmp_path: Path) -> None:
    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if how == "chain":
            first, *others = params
            return ChainedOptimizer(torch.optim.SGD([first], lr=0.1), Counting(others))
        return CountingWhole(params)

    def fresh() -> tuple[MegatronFSDP, torch.optim.Optimizer]:
        model, optimizer = shard(Net(), lambda model: make(model.parameters()), zero_dp_strategy=3)
        assert shared_state(optimizer) == [7, [0.0, 0.0]]
        return model, optimizer

    model, optimizer = fresh()
    step(model, optimizer, 1)
    assert shared_state(optimizer) == [8, [2.0, 2.0]]
    save_checkpoint(model, optimizer, tmp_path / "ours", iteration=1)
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "plain")
    save_checkpoint(model, None, tmp_path / "extra", iteration=1, extra={"optimizer 2": optimizer})
    for folder in ("ours", "plain", "extra", "by position"):
        other, loaded = fresh()
        if folder == "ours":
            load_checkpoint(other, loaded, tmp_path / folder)
        elif folder == "by position":
            load_checkpoint(other, loaded, tmp_path / "plain", with_rng=False)
        elif folder == "extra":
            load_checkpoint(other, None, tmp_path / folder, extra={"optimizer 2": loaded})
        else:
            load_state(other, loaded, tmp_path / folder)
        assert shared_state(loaded) == [8, [2.0, 2.0]], folder
        step(other, loaded, 2)
        assert shared_state(loaded) == [9, [4.0, 4.0]], folder


@pytest.mark.parametrize("value", [{"a": [1, torch.ones(2)]}, torch.ones(3), {}], ids=["nested", "tensor", "empty"])
@on_ranks(2)
def test_state_of_no_parameter_is_loaded_where_a_new_optimizer_has_none(value: Any, tmp_path: Path) -> None:
    model, optimizer = shard(Net(), momentum, zero_dp_strategy=3)
    step(model, optimizer, 1)
    optimizer.state["mine"] = value  # type: ignore[index]
    save_checkpoint(model, optimizer, tmp_path, iteration=1)
    other, loaded = shard(Net(), momentum, zero_dp_strategy=3)
    load_checkpoint(other, loaded, tmp_path)
    assert repr(loaded.state["mine"]) == repr(value)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(
            *(each["momentum_buffer"].full_tensor() for each in (optimizer.state[ours], loaded.state[theirs]))
        )
    for name in ("0", "module.mine"):
        optimizer.state[name] = 1
        with pytest.raises(ConfigurationError, match=f"SGD keeps state of no parameter under '{name}'.* rename it"):
            save_checkpoint(model, optimizer, tmp_path, iteration=2)
        del optimizer.state[name]


def test_state_without_a_name_is_refused() -> None:
    optimizer = Counting([nn.Parameter(torch.ones(2))])
    optimizer.state[3] = 1  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="Counting keeps state under 3, a int, which belongs to no parameter"):
        fully_shard_optimizer(optimizer)


# ---- parameters that are frozen while state is loaded ----------------------------------------------------------------


def restarted(kind: Make, frozen: str | None, folder: Path, with_ours: bool = False) -> tuple[list[Tensor], list[str]]:
    """Weights after a step, a restart with `rows` frozen, and thawed steps; and what was warned of."""

    def fresh(module: nn.Module) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
        return shard(module, lambda model: kind(model.parameters()), zero_dp_strategy=3)

    torch.manual_seed(0)
    model, optimizer = fresh(Net())
    step(model, optimizer, 1)
    if frozen is not None:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder / frozen)
        module = Net()
        if frozen == "before":
            module.rows.requires_grad_(requires_grad=False)
        model, optimizer = fresh(module)
        if frozen == "stepped":
            step(model, optimizer, 5)
            optimizer.state.pop(module.rows)
        module.rows.requires_grad_(requires_grad=False)
        if with_ours:
            load_checkpoint(model, optimizer, folder / frozen, with_rng=False)
        else:
            load_state(model, optimizer, folder / frozen)
        module.rows.requires_grad_(requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (2, 3):
            step(model, optimizer, number)
    told = [str(each.message) for each in caught if "start from zero" in str(each.message)]
    return [value.clone() for value in model.full_parameters().values()], told


@on_ranks(2)
def test_moments_of_frozen_parameters_are_loaded_or_missed_with_a_warning(tmp_path: Path) -> None:
    wanted, _ = restarted(torch.optim.AdamW, None, tmp_path)
    found, told = restarted(torch.optim.AdamW, "after", tmp_path / "adamw")
    assert all(map(torch.equal, found, wanted))
    assert told == []
    found, told = restarted(torch.optim.AdamW, "before", tmp_path / "ours", with_ours=True)
    assert all(map(torch.equal, found, wanted))
    assert told == []
    for kind, frozen in ((torch.optim.AdamW, "before"), (torch.optim.Adafactor, "stepped"), (Lion, "stepped")):
        _, told = restarted(kind, frozen, tmp_path / kind.__name__)
        assert [each.partition(" had")[0] for each in told] == ["rows"][dist.get_rank() :], (kind, frozen)
