"""Saving and loading a whole job: bit-equal on any ranks, refused in words where it does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.checkpoint.checkpointer import collect
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.checkpoint.save import write_state
from megatron_fsdp.errors import CheckpointError
from tests.conftest import RunRanks
from tests.support.on_ranks import assert_equal_tensors, fixed_seed
from tests.support.zoo import MODEL_CASES, ModelName

Whole = dict[str, Tensor]


def wrap(name: ModelName, strategy: int, seed: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    case = MODEL_CASES[name]
    with fixed_seed(seed):
        model = case.build()
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, amsgrad=True)
    return fully_shard(model, optimizer, fsdp_unit_modules=list(case.unit_classes), zero_dp_strategy=strategy)


def step(name: ModelName, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    case = MODEL_CASES[name]
    batch = case.make_batch(12, torch.Generator().manual_seed(seed)).part(dist.get_rank(), dist.get_world_size())
    loss = case.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def contents(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> tuple[Whole, Whole, list[dict[str, Any]]]:
    """Whole weights, whole optimizer state by name and slot, options of the groups."""
    names = {id(param): name for name, param in model.named_parameters()}
    state: Whole = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for slot, value in optimizer.state.get(param, {}).items():
                state[f"{names[id(param)]}/{slot}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return model.full_parameters(), {key: value.clone() for key, value in state.items()}, options


@pytest.mark.parametrize("slot", ["step", "exp_avg_sq", "max_exp_avg_sq"])
def test_state_without_what_a_step_needs_is_refused_before_anything_changes(tmp_path: Path, slot: str) -> None:
    """As in a checkpoint that was converted from one without step counts."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    first, second = (torch.optim.AdamW(model.parameters(), amsgrad=True) for model in models)
    models[0](torch.ones(1, 3)).sum().backward()
    first.step()
    state = collect(models[0], first, 2)
    for slots in state["optimizer"]["state"].values():
        del slots[slot]
    (tmp_path / "lacking").mkdir()
    write_state(state, tmp_path / "lacking")
    before = [param.clone() for param in models[1].parameters()]
    with pytest.raises(CheckpointError, match=rf"optimizer\.state\.module\.weight\.{slot}"):
        load_checkpoint(models[1], second, tmp_path / "lacking")
    assert all(map(torch.equal, before, models[1].parameters()))
    assert not second.state
    report = load_checkpoint(models[1], second, tmp_path / "lacking", strict=False)
    assert sorted(report.missing) == [f"optimizer.state.module.{name}.{slot}" for name in ("bias", "weight")]
    models[1](torch.ones(1, 3)).sum().backward()
    second.step()


def test_complex_weights_do_not_become_real_ones(tmp_path: Path) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    state = collect(source, None, 2)
    state["model"]["module.weight"] = source.weight.detach().to(torch.complex64)
    (tmp_path / "odd").mkdir()
    write_state(state, tmp_path / "odd")
    before = [param.clone() for param in target.parameters()]
    with pytest.raises(CheckpointError, match=r"module\.weight"):
        load_checkpoint(target, None, tmp_path / "odd")
    assert all(map(torch.equal, before, target.parameters()))


def save(name: ModelName, strategy: int, folder: str) -> tuple[Whole, Whole, list[dict[str, Any]]]:
    model, optimizer = wrap(name, strategy, 0)
    for seed in (1, 2):
        step(name, model, optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.5  # as a schedule would leave it
    write_state(collect(model, optimizer, 2), Path(folder))
    return contents(model, optimizer)


def load(name: ModelName, strategy: int, folder: str) -> list[tuple[Any, str, int | None]]:
    """Into a fresh model and optimizer, and once more after a step."""
    model, optimizer = wrap(name, strategy, 7)
    found = []
    for _ in range(2):
        report = load_checkpoint(model, optimizer, folder)
        found.append((contents(model, optimizer), str(report), report.iteration))
        step(name, model, optimizer, 9)
    return found


@pytest.mark.full(short=["saved3-loaded3-odd_shapes", "saved0-loaded0-scalars"])
@pytest.mark.parametrize("name", ["transformer", "odd_shapes", "scalars", "tied"])
@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (3, 3)), ((3, 2), (2, 0)), ((4, 3), (1, 1)), ((1, 0), (4, 3))])
def test_weights_and_optimizer_come_back_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path, name: ModelName, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    before, *_ = run_ranks(saved[0], save, name, saved[1], str(tmp_path))
    for loads in run_ranks(loaded[0], load, name, loaded[1], str(tmp_path)):
        for found, report, iteration in loads:
            assert_equal_tensors(found[0], before[0])
            assert_equal_tensors(found[1], before[1])
            assert found[2] == before[2]
            assert iteration == 2
            assert " 0 missing, 0 unexpected, 0 of another shape" in report
