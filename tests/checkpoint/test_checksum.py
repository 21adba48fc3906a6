"""The checksum of a tensor: the same for every cut, another for every change."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megatron_fsdp.checkpoint import manifest
from megatron_fsdp.checkpoint.manifest import checksum_box, combine
from megatron_fsdp.sharding.shards import boxes_of_range

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def whole(values: torch.Tensor) -> int:
    return checksum_box(values, (0,) * values.dim(), tuple(values.shape))


def by_definition(values: torch.Tensor) -> int:
    """Word by word, in Python's integers, with weights from tables as the formula says."""
    words = (
        values.contiguous().reshape(-1).view({1: torch.int8, 2: torch.int16}.get(values.element_size(), torch.int32))
    )
    tables = [manifest._table(level, torch.device("cpu")).tolist() for level in (0, 1)]
    return sum(bits * tables[0][k & 0xFFFF] * tables[1][k >> 16] for k, bits in enumerate(words.tolist())) & (2**64 - 1)


@given(SHAPES, st.data())
def test_any_cut_gives_the_same_sum(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    numel = math.prod(shape)
    edges = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    parts = []
    for start, stop in itertools.pairwise(edges):
        parts += [checksum_box(values[box.indices], box.offsets, shape) for box in boxes_of_range(shape, start, stop)]
    assert combine(parts) == whole(values) == by_definition(values)


def test_indices_beyond_two_to_the_32_have_weights_of_their_own() -> None:
    values, huge = torch.tensor([1.5, 2.5]), 2**40
    sums = {checksum_box(values, (start,), (huge,)) for start in (0, 2**16, 2**17, 2**32, 2**33, 2**39)}
    assert len(sums) == 6
    rows = checksum_box(values.view(2, 1), (2**32, 5), (2**33, 7))  # through the look-up of short runs
    singly = [checksum_box(values[i : i + 1], ((2**32 + i) * 7 + 5,), (7 * 2**33,)) for i in range(2)]
    assert rows == combine(singly)


@given(st.integers(0, 10_000), st.integers(0, 31))
def test_a_flipped_bit_changes_the_sum(place: int, bit: int) -> None:
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(2))
    before = whole(values)
    values.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    assert whole(values) != before


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.int8, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.complex128],
)
def test_every_dtype_has_one(dtype: torch.dtype) -> None:
    values = (torch.arange(12) % 5).to(dtype).reshape(3, 4)
    parts = [checksum_box(values[i : i + 1], (i, 0), (3, 4)) for i in range(3)]
    other = values.clone()
    other[1, 2] = 0
    assert combine(parts) == whole(values) != whole(other)


def test_signs_of_zero_and_nan_payloads_count() -> None:
    assert whole(torch.tensor([0.0, 1.0])) != whole(torch.tensor([-0.0, 1.0]))
    assert whole(torch.empty(0, 3)) == 0


def test_the_sum_is_fixed_for_good() -> None:
    """Manifests outlive versions: these numbers may never change under this name."""
    assert manifest.CHECKSUM_NAME == "multilinear64-v1"
    assert whole(torch.arange(100_000, dtype=torch.float32)) == 6577949694269529600
