"""Sums of rows: their order, their dtype, what they need memory for."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp.comm.reduction import add_up_into, put_scaled, sum_received

CACHED = 1 << 16


def test_sums_are_taken_in_float32_or_wider_and_repeat_bit_for_bit() -> None:
    # In bf16, 256 + 1 is 256 again; in float32 four small summands count.
    received = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total = sum_received(received.flatten(), 5)
    assert total.dtype == torch.float32
    assert total.tolist() == [260.0]
    total = sum_received(torch.tensor([1.0, 1e-12], dtype=torch.float64), 2)
    assert total.dtype == torch.float64
    assert total.tolist() == [1.0 + 1e-12]
    received = torch.randn(4 * 1000)
    first = sum_received(received.clone(), 4)
    assert torch.equal(first, sum_received(received.clone(), 4))
    assert torch.equal(first, ((received[:1000] + received[1000:2000]) + received[2000:3000]) + received[3000:])


def rows_of(num_rows: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return list(torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(numel)).to(dtype))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def test_a_scaled_value_is_rounded_once() -> None:
    for dtype, out_dtype in product(DTYPES, DTYPES):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
        out = torch.empty(1000, dtype=out_dtype)
        put_scaled(values, 1 / 3, out)
        wider = torch.promote_types(dtype, out_dtype)
        assert torch.equal(out, (values.to(wider) * (1 / 3)).to(out_dtype)), (dtype, out_dtype)


@given(
    num_rows=st.integers(2, 5),
    numel=st.sampled_from([0, 1, 7, CACHED - 1, CACHED, CACHED + 1, 2 * CACHED + 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    factor=st.sampled_from([1.0, 0.5, 1 / 3, 2.0**-20]),
)
def test_a_sum_put_elsewhere_is_the_product_of_the_whole_sum_bit_for_bit(
    num_rows: int, numel: int, dtype: torch.dtype, out_dtype: torch.dtype, factor: float
) -> None:
    rows = rows_of(num_rows, numel, dtype)
    before = [row.clone() for row in rows]
    out = torch.full((numel,), torch.nan, dtype=out_dtype)
    add_up_into(rows, out, factor)
    total = sum_received(torch.cat(rows), num_rows)
    scaled = torch.empty_like(out)
    put_scaled(total, factor, scaled)
    assert torch.equal(out, scaled)
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))


class NewMemory(TorchDispatchMode):
    """Counts elements of results that are no argument's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            known = [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, torch.Tensor)]
            if all(arg.untyped_storage().data_ptr() != result.untyped_storage().data_ptr() for arg in known):
                self.numel += result.numel()
        return result


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "new"),
    [
        (torch.float32, torch.float32, 0),
        (torch.bfloat16, torch.float32, 0),
        (torch.float32, torch.bfloat16, 2 * CACHED),
    ],
)
def test_a_sum_is_put_straight_where_it_fits(dtype: torch.dtype, out_dtype: torch.dtype, new: int) -> None:
    rows, out = rows_of(3, 2 * CACHED, dtype), torch.empty(2 * CACHED, dtype=out_dtype)
    with NewMemory() as memory:
        add_up_into(rows, out, 0.5)
    assert memory.numel == new
