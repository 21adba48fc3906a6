"""Checkpoints that one way of sharding has written, read by the other, and by one process without sharding."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron_fsdp import experimental, fully_shard
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from tests.conftest import RunRanks
from tests.experimental.test_fully_shard import layers_and_root, mesh_for, net, shard
from tests.support.dcp_contents import whole_state
from tests.support.doors import weights_of
from tests.support.on_ranks import fixed_seed
from tests.support.zoo import Layer

Trained = tuple[nn.Module, torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def in_place(model: nn.Module, strategy: str = "zero-3") -> Trained:
    shard(layers_and_root(model), strategy)
    optimizer = adamw(model)
    experimental.fully_shard_optimizer(optimizer)
    return model, optimizer


def wrapped(model: nn.Module) -> Trained:
    return fully_shard(model, adamw(model), mesh_for(), dp_shard_dim="inner", fsdp_unit_modules=[Layer])


def plain(model: nn.Module) -> Trained:
    return model, adamw(model)


DOORS: dict[str, Callable[[nn.Module], Trained]] = {
    "in place": in_place,
    "in place, with whole weights": partial(in_place, strategy="zero-1"),
    "wrapped": wrapped,
    "plain": plain,
}


def trained(door: str, seed: int, steps: int = 1) -> Trained:
    with fixed_seed(seed):
        model, optimizer = DOORS[door](net(seed=seed))
        for _ in range(steps):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments, whole, by the names of the plain model; the output shows that compute weights are new."""
    both = weights_of(model) | whole_state(model, optimizer)
    found = {name.removeprefix("module."): value for name, value in both.items()}
    with torch.no_grad():
        found["output"] = model(torch.ones(2, 6))
    return found


def stripped(value: Any) -> Any:
    """Return a state dict without the wrapper's prefix of names."""
    if isinstance(value, dict):
        return {stripped(key): stripped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [stripped(each) for each in value]
    return value.removeprefix("module.") if isinstance(value, str) else value


def save_dcp(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a program that knows torch alone."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": stripped(of_model), "optimizer": stripped(of_optimizer)}, checkpoint_id=folder)


def load_dcp(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)  # the tensors themselves, which are read in place
    state_dict_loader.load({"model": stripped(of_model), "optimizer": stripped(of_optimizer)}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


Act = Callable[[str, nn.Module, torch.optim.Optimizer], object]

WRITERS: dict[str, Act] = {
    "checkpoint": lambda folder, model, optimizer: save_checkpoint(model, optimizer, folder, iteration=1),
    "experimental": lambda folder, model, optimizer: experimental.save_checkpoint(model, optimizer, folder),
    "dcp": save_dcp,
}
READERS: dict[str, Act] = {
    "checkpoint": lambda folder, model, optimizer: load_checkpoint(model, optimizer, folder, with_rng=False),
    "experimental": lambda folder, model, optimizer: experimental.load_checkpoint(model, optimizer, folder),
    "dcp": load_dcp,
}


def saved(door: str, folder: str) -> dict[str, Tensor]:
    both = trained(door, 0, steps=2)
    for writer, save in WRITERS.items():
        save(f"{folder}/{writer}", *both)
    return state_of(*both)


PAIRS = (("checkpoint", "experimental"), ("experimental", "checkpoint"), ("dcp", "dcp"), ("dcp", "checkpoint"))
"""Writers and readers; torch alone knows neither our sections nor prefixes."""


def loaded(door: str, folder: str, wanted: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return the tensors that differ from those that were saved, by writer and reader."""
    found = {}
    for writer, reader in PAIRS:
        both = trained(door, 1)
        READERS[reader](f"{folder}/{writer}", *both)
        state = state_of(*both)
        assert state.keys() == wanted.keys()
        found[f"{writer} to {reader}"] = [name for name, value in state.items() if not torch.equal(value, wanted[name])]
    return found


@pytest.mark.full(short=["in place"])
@pytest.mark.parametrize("source", ["in place", "wrapped", "plain"])
def test_checkpoints_of_all_doors_load_into_each_other(run_ranks: RunRanks, source: str, tmp_path: Path) -> None:
    wanted = run_ranks(2, saved, source, str(tmp_path))[0]
    assert len(wanted) == 1 + 4 * len(list(net().parameters()))
    for ranks, door in ((3, "in place, with whole weights"), (3, "wrapped"), (1, "plain")):
        if door == source:
            continue  # each door's own tests load what it has saved
        for found in run_ranks(ranks, loaded, door, str(tmp_path), wanted):
            assert found == {key: [] for key in found}, door


def through_files(act: Callable[[nn.Module, str], object], seed: int, door: str, folder: str) -> dict[str, Tensor]:
    both = trained(door, seed)
    act(both[0], folder)
    return state_of(*both)


@pytest.mark.parametrize(("source", "target"), [("in place", "wrapped"), ("wrapped", "in place")])
def test_files_of_hugging_face_go_in_and_out(run_ranks: RunRanks, source: str, target: str, tmp_path: Path) -> None:
    wanted = run_ranks(2, through_files, save_hf, 0, source, str(tmp_path))[0]
    for found in run_ranks(3, through_files, load_hf, 1, target, str(tmp_path)):
        names = [name for name, _ in net().named_parameters()]
        assert all(torch.equal(found[name], wanted[name]) for name in (*names, "output"))
