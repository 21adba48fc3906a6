"""Fingerprints tell tensors apart that differ in any bit or in order."""

import pytest
import torch

from megatron_fsdp.runtime.fingerprint import fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 2, 496, 1 << 14, (1 << 16) + 3])
def test_constants_differ(dtype: torch.dtype, numel: int) -> None:
    ones, zeros = torch.ones(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    assert fingerprint(ones).item() != fingerprint(zeros).item()
    assert fingerprint(ones).item() == fingerprint(ones.clone()).item()


def test_constant_floats_whose_bits_differ_in_one_high_bit_differ() -> None:
    for numel in (1 << power for power in range(18)):
        values = {fingerprint(torch.full((numel,), value, dtype=torch.float64)).item() for value in (1.0, 2.0, 4.0, -1)}
        assert len(values) == 4


def test_order_matters_inside_and_across_chunks() -> None:
    tensor = torch.arange((1 << 17) + 5, dtype=torch.float32)
    first = fingerprint(tensor).item()
    for left, right in ((0, 1), (5, 1 << 16), (7, 7 + (1 << 16)), (1, tensor.numel() - 1)):
        swapped = tensor.clone()
        swapped[left], swapped[right] = tensor[right], tensor[left]
        assert fingerprint(swapped).item() != first
    assert fingerprint(tensor.roll(1 << 16)).item() != first


def test_every_random_state_of_many_seeds_differs() -> None:
    generator = torch.Generator()
    found = {fingerprint(generator.manual_seed(seed).get_state()).item() for seed in range(300)}
    assert len(found) == 300


def test_shape_and_strides_do_not_matter_and_an_empty_tensor_has_one() -> None:
    tensor = torch.randn(6, 4)
    assert fingerprint(tensor.t()).item() == fingerprint(tensor.t().contiguous()).item()
    assert fingerprint(torch.empty(0)).item() == 0


@pytest.mark.parametrize("numel", [8, 9, (1 << 16) + 8])
def test_where_a_tensor_lies_in_memory_does_not_matter(numel: int) -> None:
    memory = torch.randn(numel + 1)
    assert fingerprint(memory[1:]).item() == fingerprint(memory[1:].clone()).item()
