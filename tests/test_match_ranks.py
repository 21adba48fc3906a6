"""The number by which ranks compare tensors changes with every bit, and with the order of the elements."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.runtime.match_ranks import _hash, match_ranks
from tests.conftest import RunRanks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_hash_alike_whatever_their_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).to(dtype)
    assert _hash(tensor) == _hash(tensor.t().contiguous().t())
    assert _hash(tensor).dtype == torch.int64
    assert _hash(tensor).shape == ()


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_constants_of_different_value_differ(count: int) -> None:
    """An even number of equal elements is where an exclusive or sees nothing."""
    hashes = [int(_hash(torch.full((count,), value))) for value in (0.0, 1.0, 2.0, -1.0, 0.5)]
    assert len(set(hashes)) == len(hashes)


def test_order_single_bits_and_what_lies_behind_the_first_part_count() -> None:
    tensor = torch.randn(2**20 + 3, generator=torch.Generator().manual_seed(0))
    seen = {int(_hash(tensor)), int(_hash(tensor.flip(0)))}
    for index in (0, 1, 2**19, 2**20, 2**20 + 2):
        changed = tensor.clone()
        changed.view(torch.int32)[index] ^= 1
        seen.add(int(_hash(changed)))
    swapped = tensor.clone()
    swapped[[5, 2**20 + 1]] = swapped[[2**20 + 1, 5]]
    seen.add(int(_hash(swapped)))
    assert len(seen) == 8


def constants_per_rank() -> tuple[tuple[str, ...], list[float]]:
    norm = nn.LayerNorm(4)
    nn.init.constant_(norm.weight, float(dist.get_rank() + 1))
    return match_ranks(norm, dist.group.WORLD, torch.device("cpu")), norm.weight.tolist()


def test_a_norm_that_each_rank_filled_otherwise_is_found(run_ranks: RunRanks) -> None:
    assert run_ranks(2, constants_per_rank) == [(("weight",), [1.0] * 4)] * 2
