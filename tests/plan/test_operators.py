"""Single operators: what they cost by hand, where bytes are counted, and what a model is told of values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.activations import Answers, LiveStorages, operator_bytes, operator_flops, tensors_of

SIZES = st.integers(1, 40)


class Costs(TorchDispatchMode):
    """Adds up what the operators inside the block cost."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += operator_flops(func, args, kwargs or {}, result)
        self.moved_bytes += operator_bytes(func, tensors_of(args), tensors_of((result,)))
        return result


def cost(function: Callable[..., Tensor], *shapes: tuple[int, ...], backward: bool = False) -> Costs:
    tensors = [torch.empty(shape, requires_grad=backward) for shape in shapes]
    costs = Costs()
    if not backward:
        with costs:
            function(*tensors)
        return costs
    result = function(*tensors)
    with costs:
        result.backward(torch.ones_like(result))
    return costs


@given(rows=SIZES, inner=SIZES, columns=SIZES)
def test_a_product_is_two_per_multiply_and_add(rows: int, inner: int, columns: int) -> None:
    shapes = (rows, inner), (columns, inner)
    assert cost(F.linear, *shapes).flops == 2 * rows * inner * columns
    assert cost(F.linear, *shapes).moved_bytes == 4 * (rows * inner + inner * columns + rows * columns)
    assert cost(F.linear, *shapes, backward=True).flops == 4 * rows * inner * columns


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_fused_attention_is_two_products_and_five_in_backward(key_heads: int) -> None:
    shapes = (2, 4, 8, 16), (2, key_heads, 8, 16), (2, key_heads, 8, 16)
    product = 2 * (2 * 4) * 8 * 8 * 16
    assert cost(attention, *shapes).flops == 2 * product
    assert cost(attention, *shapes, backward=True).flops == 5 * product


def grouped(rows: Tensor, stack: Tensor) -> Tensor:
    offsets = torch.tensor([2, 5, 12], dtype=torch.int32)
    return F.grouped_mm(rows, stack, offs=offsets)


def test_grouped_products_count_each_row_once() -> None:
    assert cost(grouped, (12, 16), (3, 16, 24)).flops == 2 * 12 * 16 * 24
    assert cost(grouped, (12, 16), (3, 16, 24), backward=True).flops == 2 * 2 * 12 * 16 * 24


def test_views_unwritten_memory_and_tables_that_are_looked_up_move_nothing() -> None:
    assert cost(lambda x: x.view(4, 6).t()[1:], (24,)).moved_bytes == 0
    assert cost(torch.empty_like, (24,)).moved_bytes == 0
    assert cost(lambda x: x.add_(1), (24,)).moved_bytes == 2 * 24 * 4
    assert cost(lambda x: x.expand(10, 24) + 1, (24,)).moved_bytes == 24 * 4 + 10 * 24 * 4
    assert cost(lambda table: table[torch.zeros(5, dtype=torch.int64)], (1000, 8)).moved_bytes < 1000
    assert cost(lambda table: F.embedding(torch.zeros(5, dtype=torch.int64), table), (1000, 8)).moved_bytes < 1000


def note(live: LiveStorages, operands: list[Tensor], result: Tensor) -> Tensor:
    live.note(operands, tensors_of((result,)))
    return result


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_count_once_and_until_they_die(device: str) -> None:
    live, before = LiveStorages(), torch.empty(100, device=device)
    assert [id(t) for t in tensors_of((before, 3, [before, None], "x"))] == [id(before)] * 2  # also in lists
    first = note(live, [], torch.empty(10, device=device))
    view = note(live, [first], first[2:])
    note(live, [before], before[5:])
    assert live.now_bytes == 40
    del first
    assert live.now_bytes == 40
    second = note(live, [view], torch.empty(3, dtype=torch.float64, device=device))
    assert live.now_bytes == 64
    del view
    assert live.now_bytes == 24
    note(live, [second], second.resize_(5))
    assert live.now_bytes == 40


class Asked(TorchDispatchMode):
    """Runs all operators by way of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = Answers()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        return self.answers.run(func, args, kwargs or {})


def test_conditions_get_the_answer_of_a_full_batch() -> None:
    mask = torch.empty(2, 3, dtype=torch.bool, device="meta")
    with Asked():
        assert mask.all()
        assert not mask.any()
        assert mask[0, 0]
        assert mask.all()
        assert (mask.sum() == mask.numel()).item() is True
        assert torch.tensor(3.5).item() == 3.5  # values that are there are told
        assert not torch.tensor(False)


def test_numbers_and_shapes_of_values_are_refused() -> None:
    numbers = torch.empty(3, device="meta")
    with Asked():
        with pytest.raises(ConfigurationError, match=r"asks for the value of a tensor \(torch.float32\)"):
            numbers.sum().item()
        with pytest.raises(ConfigurationError, match=r"aten.nonzero.default has no shape without values"):
            numbers.nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_shapes_of_real_ones(dtype: torch.dtype) -> None:
    def shapes(device: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = torch.ones(12, 16, dtype=dtype, device=device)
        stack = torch.ones(3, 16, 24, dtype=dtype, device=device)
        offsets = torch.tensor([2, 5, 12], dtype=torch.int32).to(device)
        right = torch.ones(12, 24, dtype=dtype, device=device)
        many = torch.ones(3, 12, 16, dtype=dtype, device=device)
        products = [
            torch._grouped_mm(rows, stack, offs=offsets),
            torch._grouped_mm(rows.t(), right, offs=offsets),
            torch._grouped_mm(many, stack),
        ]
        return [(tuple(product.shape), product.dtype) for product in products]

    with Asked():
        assert shapes("meta") == shapes("cpu")
