"""AdamW in eight bits: the same bits on any ranks as in one process, close to AdamW, and a third of its state."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from megatron_fsdp import AdamW8bit, fsdp2, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim import adamw8bit
from megatron_fsdp.optim.adamw8bit import dynamic_map, scales_in_blocks, scales_shape
from megatron_fsdp.sharding.shards import ListedCut, MeshUse, ShardDescription, TensorParallelCut
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.optimizer_reference import drawn, flat

SHAPES = ((40, 33), (7, 512), (1000,), (3, 20, 17), (5,))


def blocks() -> nn.Module:
    """Parameters of several blocks each, most of which no cut by rows or elements respects."""
    with fixed_seed(5):
        several = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        return nn.ModuleDict({"several": several, "unit": nn.Linear(130, 9)})


def eight_bits(params: Sequence[Any]) -> AdamW8bit:
    return AdamW8bit([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "weight_decay": 0.3}], lr=0.02)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_code_has_256_values_of_which_each_is_nearest_to_itself() -> None:
    for is_signed in (True, False):
        values = dynamic_map(is_signed)
        assert len(set(values)) == 256
        assert (values[0], values[-1]) == (-0.99296875 if is_signed else 0.0, 1.0)
        code = adamw8bit._Code.on(is_signed, torch.device("cpu"))
        assert torch.equal(code.encoded(code.values), torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_close_to_those_of_adamw(dtype: torch.dtype) -> None:
    ours, theirs = nn.Parameter(drawn(torch.Size((64, 100)), 0, 0).to(dtype)), nn.Parameter(torch.zeros(0))
    theirs.data = ours.detach().clone()
    before = ours.detach().clone()
    pairs = [(AdamW8bit([ours], lr=1e-2), ours), (torch.optim.AdamW([theirs], lr=1e-2), theirs)]
    for step in range(30):
        for optimizer, param in pairs:
            param.grad = (drawn(param.shape, step, 1) + 0.5).to(dtype)
            optimizer.step()
    moved = (theirs - before).float().norm()
    assert (ours - theirs).float().norm() < (0.02 if dtype is torch.float32 else 0.05) * moved


def test_buckets_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for numel in (adamw8bit.CHUNK_NUMEL, 512):
        monkeypatch.setattr(adamw8bit, "CHUNK_NUMEL", numel)
        param = nn.Parameter(drawn(torch.Size((30, 70)), 0, 0))
        optimizer = AdamW8bit([param], lr=0.1)
        for step in range(3):
            param.grad = drawn(param.shape, step, 1)
            optimizer.step()
        found.append([param.detach(), *optimizer.state[param].values()])
    assert all(torch.equal(whole, cut) for whole, cut in zip(*found, strict=True))


def test_state_is_2_bytes_and_a_32nd_for_each_element() -> None:
    param = nn.Parameter(torch.ones(100, 512))
    param.grad = torch.ones_like(param)
    optimizer = AdamW8bit([param])
    optimizer.step()
    held = sum(value.nbytes for key, value in optimizer.state[param].items() if key != "step")
    assert held == param.numel() * (2 + 8 / 256)


def test_a_bf16_parameter_keeps_codes_and_scales_when_state_is_loaded() -> None:
    params = [nn.Parameter(drawn(torch.Size((20, 30)), 0, 0).bfloat16()) for _ in range(2)]
    first, second = (AdamW8bit([param]) for param in params)
    params[0].grad = torch.randn_like(params[0])
    first.step()
    second.load_state_dict(first.state_dict())
    for key, value in first.state[params[0]].items():
        assert second.state[params[1]][key].dtype == value.dtype
        assert torch.equal(second.state[params[1]][key], value)


# ---- layouts (pure) --------------------------------------------------------------------------------------------------


def test_scales_follow_the_shape_where_the_last_dimension_divides() -> None:
    assert [scales_shape(shape) for shape in ((4, 512), (2, 3, 256), (4, 100), (1000,), (512,), ())] == [
        (4, 2),
        (2, 3, 1),
        (2,),
        (4,),
        (2,),
        (1,),
    ]


def parts(shape: tuple[int, ...], dim: int, cut: int) -> ShardDescription | None:
    tensor_cut = TensorParallelCut.by_chunk(shape[dim], 2, dim)
    first = tensor_cut.edges[1]
    numel = math.prod(shape) // shape[dim] * first
    use = MeshUse((2, 2), (0,), 1)
    return scales_in_blocks(ShardDescription(shape, use, (1, 0), ListedCut((0, cut, numel)), tensor_cut))


def test_tensor_parallel_parts_have_scales_of_their_own_where_they_end_with_a_block() -> None:
    rows, columns, flattened = parts((4, 512), 0, 600), parts((4, 512), 1, 600), parts((64, 8), 0, 100)
    assert rows is not None
    assert (rows.part_shape(), rows.local_range) == ((2, 2), (3, 4))
    assert columns is not None
    assert (columns.part_shape(), columns.local_range) == ((4, 1), (3, 4))
    assert flattened is not None
    assert (flattened.part_shape(), flattened.local_range) == ((1,), (1, 1))
    assert parts((4, 500), 1, 600) is None
    assert parts((4, 256), 1, 100) is None
    assert parts((10, 100), 0, 100) is None


@on_ranks(2)
def test_pytorchs_door_takes_it_before_the_first_forward() -> None:
    found = []
    for shards in (False, True):
        with fixed_seed(5):
            model: Any = nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 7))
        model = fsdp2.fully_shard(model) if shards else model
        optimizer = AdamW8bit(model.parameters(), lr=0.1)
        for step in range(3):
            model(drawn(torch.Size((4, 40)), step, 0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([param.full_tensor() if shards else param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *found))


# ---- refusals --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    stock = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,))))
    stock.grad = stock.detach().clone()
    told = refusal(AdamW8bit([stock]).step)
    assert told.startswith("AdamW8bit was given a DTensor of shape (4, 4) that fully_shard has not made")
    model = fully_shard_model(blocks(), **flat(3), use_decoupled_grad=True)
    told = refusal(fully_shard_optimizer, AdamW8bit(model.parameters()))
    assert told.startswith("with use_decoupled_grad=True gradients are in param.decoupled_grad")


@pytest.mark.parametrize("options", [{"eps": math.nan}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"AdamW8bit was given {next(iter(options))}="):
        AdamW8bit([nn.Parameter(torch.ones(3))], **options)
