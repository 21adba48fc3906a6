"""The state of every optimizer that is accepted goes through plain dcp calls, from any ranks to any ranks."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.checkpoint.blank_optimizer import Slot, prepare_optimizer_state, slots_in, state_keys
from megatron_fsdp.errors import CheckpointError
from tests.conftest import RunRanks
from tests.support.dcp_contents import assert_same_contents, contents

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


class Lion(torch.optim.Optimizer):
    """As third parties write them: a moment, a python counter, and a tensor of another shape."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Follow the sign of the moment."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["moment"] = torch.zeros_like(param)
                    state["count"] = 0
                    state["last"] = torch.zeros(())
                state["count"] += 1
                state["last"] += group["lr"]
                state["moment"].lerp_(param.grad, 0.1)
                param.add_(state["moment"].sign(), alpha=-group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "third-party": Lion,
}


def wrap(name: str, strategy: int, seed: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return fully_shard(model, OPTIMIZERS[name](model.parameters()), zero_dp_strategy=strategy)


def step(model: MegatronFSDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed))
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_all(strategy: int, folder: str) -> None:
    for name in OPTIMIZERS:
        model, optimizer = wrap(name, strategy, 0)
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        optimizer.param_groups[0]["lr"] *= 0.5
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{name}")


def load_all(strategy: int, fresh: bool, source: str, target: str) -> list[list[str]]:
    """Into optimizers that have stepped, or into fresh ones; and go on from there."""
    without = []
    for name in OPTIMIZERS:
        model, optimizer = wrap(name, strategy, 7)
        if fresh:
            metadata = dcp.FileSystemReader(f"{source}/{name}").read_metadata()
            without.append(prepare_optimizer_state(model, optimizer, slots_in(metadata)))
        else:
            step(model, optimizer, 5)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=f"{source}/{name}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{target}/{name}")
        step(model, optimizer, 6)
    return without


@pytest.mark.parametrize(("ranks", "strategy", "fresh"), [(2, 2, False), (3, 3, True)], ids=["stepped", "fresh"])
def test_every_optimizer_is_saved_and_loaded(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, strategy: int, fresh: bool
) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    run_ranks(4, save_all, 3, source)
    for without in run_ranks(ranks, load_all, strategy, fresh, source, target):
        assert without == ([[]] * len(OPTIMIZERS) if fresh else [])
    for name in OPTIMIZERS:
        found = contents(f"{source}/{name}")
        assert len([key for key in found if key.startswith("optimizer.state.0.")]) >= 1
        assert {key.split(".")[2] for key in found if key.startswith("optimizer.state.")} == set("0123")
        assert_same_contents(contents(f"{target}/{name}"), found)


# ---- a rank without state --------------------------------------------------------------------------------------------


def one_rank_without_state(folder: str) -> dict[str, Any]:
    """A rank whose shard is empty may have no state for it, when it saves and when it loads."""
    model, optimizer = wrap("Adam", 3, 0)
    step(model, optimizer, 1)
    empty = [param for param in optimizer.state if param._local_tensor.numel() == 0]  # type: ignore[attr-defined]
    for param in empty:
        del optimizer.state[param]
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    other, loaded = wrap("Adam", 3, 7)
    step(other, loaded, 2)
    if dist.get_rank() % 2:
        for param in [param for param in loaded.state if param._local_tensor.numel() == 0]:  # type: ignore[attr-defined]
            del loaded.state[param]
    state = state_of(other, loaded)
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    loaded.load_state_dict(state["optimizer"])
    dcp.save(state_of(other, loaded), checkpoint_id=f"{folder}-again")
    step(other, loaded, 3)
    step(model, optimizer, 3)
    return {
        "empty": len(empty),
        "same": [torch.equal(a, b) for a, b in zip(_locals(other), _locals(model), strict=True)],
    }


def _locals(model: MegatronFSDP) -> list[Tensor]:
    return [param._local_tensor.detach() for param in model.parameters()]  # type: ignore[attr-defined]


def test_ranks_without_state_for_an_empty_shard_save_and_load(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(4, one_rank_without_state, str(tmp_path / "saved"))
    assert sum(each["empty"] > 0 for each in found) >= 2
    assert all(all(each["same"]) for each in found)
    assert_same_contents(contents(str(tmp_path / "saved-again")), contents(str(tmp_path / "saved")))


# ---- preparing -------------------------------------------------------------------------------------------------------


def prepare() -> dict[str, Any]:
    model, optimizer = wrap("Adam", 3, 0)
    keys = state_keys(model, optimizer)
    moment, counter = Slot((7, 3), torch.bfloat16), Slot((), torch.float32)
    with pytest.raises(CheckpointError, match="exp_avg of wide has shape"):
        prepare_optimizer_state(
            model, optimizer, {keys["rows"]: {"exp_avg": moment}, keys["wide"]: {"exp_avg": moment}}
        )
    assert not optimizer.state
    scalar = {"exp_avg": Slot((), torch.float32), "step": counter}
    without = prepare_optimizer_state(
        model, optimizer, {keys["rows"]: {"exp_avg": moment, "step": counter}, keys["scale"]: scalar}
    )
    by_name = dict(model.module.named_parameters())
    rows, scale = optimizer.state[by_name["rows"]], optimizer.state[by_name["scale"]]
    return {
        "without": without,
        "types": [type(state[kind]).__name__ for state in (rows, scale) for kind in ("exp_avg", "step")],
        "dtype": rows["exp_avg"].dtype,
        "local": rows["exp_avg"]._local_tensor.shape == by_name["rows"]._local_tensor.shape,  # type: ignore[attr-defined]
    }


def test_prepared_state_is_cut_as_its_parameter_and_numbers_are_plain(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, prepare):
        assert found["without"] == ["wide", "one"]
        assert found["types"] == ["UnevenDTensor", "Tensor", "UnevenDTensor", "Tensor"]
        assert found["dtype"] is torch.bfloat16
        assert found["local"]


# ---- torch's own functions -------------------------------------------------------------------------------------------


def by_torch(folder: str) -> tuple[list[str], bool]:
    model, optimizer = wrap("Adam", 3, 0)
    step(model, optimizer, 1)
    found, state = torch_state_dict.get_state_dict(model, optimizer)
    dcp.save({"model": found, "optimizer": state}, checkpoint_id=folder)
    other, fresh = wrap("Adam", 3, 7)
    before = _locals(other)
    blank_model, blank = torch_state_dict.get_state_dict(other, fresh)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, _locals(other), strict=True))
    dcp.load({"model": blank_model, "optimizer": blank}, checkpoint_id=folder)
    torch_state_dict.set_state_dict(other, fresh, model_state_dict=blank_model, optim_state_dict=blank)
    again, state_again = torch_state_dict.get_state_dict(other, fresh)
    dcp.save({"model": again, "optimizer": state_again}, checkpoint_id=f"{folder}-again")
    return sorted(state["state"]), unchanged


def test_the_functions_of_torch_key_the_state_by_name(run_ranks: RunRanks, tmp_path: Path) -> None:
    for names, unchanged in run_ranks(3, by_torch, str(tmp_path / "saved")):
        assert names == [f"module.{name}" for name in ("one", "rows", "scale", "wide")]
        assert unchanged  # torch makes state by a step with a learning rate of 0
    assert_same_contents(contents(str(tmp_path / "saved-again")), contents(str(tmp_path / "saved")))
