"""Plain torch.distributed.checkpoint calls on sharded state: saved by one layout, loaded by another, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.conftest import RunRanks
from tests.support.models import MODEL_CASES, ModelName
from tests.support.parity import assert_equal_tensors, fixed_seed


def _wrap(name: ModelName, strategy: int, seed: int) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    case = MODEL_CASES[name]
    with fixed_seed(seed):
        model = case.build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return fully_shard(model, optimizer, fsdp_unit_modules=list(case.unit_classes), zero_dp_strategy=strategy)


def _step(name: ModelName, model: MegatronFSDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    case = MODEL_CASES[name]
    batch = case.make_batch(12, torch.Generator().manual_seed(seed)).part(dist.get_rank(), dist.get_world_size())
    case.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _moments(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """First moments, whole, by letting them pose as gradients."""
    for group in model.parameter_groups():
        for param in group.sharded:
            param.grad = optimizer.state[param]["exp_avg"] if param in optimizer.state else None
    found = {name: grad for name, grad in model.full_gradients().items() if grad is not None}
    model.zero_grad_buffer()
    return found


def save(name: ModelName, strategy: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = _wrap(name, strategy, seed=0)
    for seed in (1, 2):
        _step(name, model, optimizer, seed)
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    return model.full_parameters(), _moments(model, optimizer)


def load(name: ModelName, strategy: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = _wrap(name, strategy, seed=7)
    _step(name, model, optimizer, 1)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model.full_parameters(), _moments(model, optimizer)


@pytest.mark.full(cover=2)
@pytest.mark.parametrize("name", ["transformer", "odd_shapes", "scalars"])
@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (3, 3)), ((3, 2), (2, 0)), ((4, 3), (1, 1)), ((1, 0), (4, 3))])
def test_saved_by_one_layout_and_loaded_by_another_is_bit_equal(
    run_ranks: RunRanks, tmp_path: Path, name: ModelName, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    before = run_ranks(saved[0], save, name, saved[1], str(tmp_path / "ckpt"))
    after = run_ranks(loaded[0], load, name, loaded[1], str(tmp_path / "ckpt"))
    for parameters, moments in after:
        assert_equal_tensors(parameters, before[0][0])
        assert_equal_tensors(moments, before[0][1])


def chunk_keys(describes: bool) -> list[bool]:
    case = MODEL_CASES["odd_shapes"]
    with fixed_seed(0):
        model = case.build()
    wrapped, _ = fully_shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), preproc_state_dict_for_dcp_ckpt=describes
    )
    return [hasattr(value._local_tensor, "__create_chunk_list__") for value in wrapped.state_dict().values()]


@pytest.mark.parametrize("describes", [True, False])
def test_the_switch_for_checkpoint_preparation_is_real(run_ranks: RunRanks, describes: bool) -> None:
    for found in run_ranks(2, chunk_keys, describes):
        assert found == [describes] * len(found)
        assert found
