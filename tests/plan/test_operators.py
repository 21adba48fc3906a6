"""Single operators: what they cost by hand, where bytes are counted, and what a model is told of values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp.plan.activations import operator_bytes, operator_flops, tensors_of


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


def test_operands_and_results_move_but_no_views_unwritten_memory_and_tables_that_are_looked_up() -> None:
    assert cost(F.linear, (5, 3), (2, 3)).moved_bytes == 4 * (5 * 3 + 2 * 3 + 5 * 2)
    assert cost(lambda x: x.view(4, 6).t()[1:], (24,)).moved_bytes == 0
    assert cost(torch.empty_like, (24,)).moved_bytes == 0
    assert cost(lambda x: x.add_(1), (24,)).moved_bytes == 2 * 24 * 4
    assert cost(lambda x: x.expand(10, 24) + 1, (24,)).moved_bytes == 24 * 4 + 10 * 24 * 4
    assert cost(lambda table: table[torch.zeros(5, dtype=torch.int64)], (1000, 8)).moved_bytes < 1000
    assert cost(lambda table: F.embedding(torch.zeros(5, dtype=torch.int64), table), (1000, 8)).moved_bytes < 1000
