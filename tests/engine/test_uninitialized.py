"""Tensors that wait for a value show whether they got one; tensor-parallel parameters are drawn whole and cut."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from megatron_fsdp.engine.meta_init import own_part, uninitialized_parameter, uninitialized_tensor
from tests.conftest import RunRanks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64, torch.float8_e4m3fn]
WHOLE_NUMBERS = [torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_are_set_when_every_element_is(dtype: torch.dtype) -> None:
    made = uninitialized_tensor(torch.empty(3, 2, dtype=dtype, device="meta"), CPU)
    assert (made.tensor.dtype, made.tensor.shape) == (dtype, (3, 2))
    assert made.is_unset
    made.tensor[1:] = 0
    assert made.is_unset
    made.tensor.data[:1] = 0
    assert not made.is_unset


@pytest.mark.parametrize("dtype", WHOLE_NUMBERS, ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_whole_numbers_are_set_when_they_were_written(dtype: torch.dtype, value: int) -> None:
    made = uninitialized_tensor(torch.empty(3, dtype=dtype, device="meta"), CPU)
    assert made.is_unset
    made.tensor.fill_(value)
    assert not made.is_unset


def test_a_parameter_keeps_shape_dtype_attributes_and_requires_grad() -> None:
    like = nn.Parameter(torch.empty(2, dtype=torch.float64, device="meta"), requires_grad=False)
    like.mark = "kept"  # type: ignore[attr-defined]
    made = uninitialized_parameter(like, CPU)
    param = made.tensor
    assert isinstance(param, nn.Parameter)
    assert (param.shape, param.dtype, param.requires_grad, param.device) == ((2,), torch.float64, False, CPU)
    assert param.mark == "kept"  # type: ignore[attr-defined]
    assert made.is_unset


def test_an_empty_tensor_needs_no_value() -> None:
    assert not uninitialized_tensor(torch.empty(0, 3, device="meta"), CPU).is_unset


def parts(placements: list[Placement], shape: tuple[int, ...]) -> tuple[bool, Tensor, Tensor]:
    """What a rank keeps of a full tensor, and what torch's own distribution of the same tensor leaves it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    original = nn.Parameter(distribute_tensor(torch.empty(shape, device="meta"), mesh, placements))
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    made = uninitialized_parameter(original, CPU)
    expected = distribute_tensor(full, mesh, placements)
    return (
        original.is_meta and isinstance(original, DTensor) and made.tensor.shape == shape,
        own_part(full, original),
        expected.to_local(),
    )


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
def test_a_tensor_parallel_parameter_is_drawn_whole_and_cut_to_this_rank(
    placements: list[Placement], run_ranks: RunRanks
) -> None:
    for is_whole, got, expected in run_ranks(2, parts, placements, (5, 4)):
        assert is_whole
        assert type(got) is Tensor
        assert torch.equal(got, expected)
