"""What one operator costs: floating point operations, and bytes read and written.

Operations of products, convolutions and fused attention are counted by torch's formulas (`torch.utils.flop_counter`): a
multiply-add is two, and causal attention is counted as if every position saw every other. Formulas that torch lacks are
here: attention of CPUs, and grouped products of experts. Everything else counts as bandwidth only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron_fsdp.plan.live_storages import tensors_of

_ATEN = torch.ops.aten


def operator_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Floating point operations of one call.

    Args:
        func: An operator of torch with its overload, as a dispatch mode gets it.
        args: Of the call.
        kwargs: Of the call.
        result: Of the call.
    """
    packet = func.overloadpacket
    own = _OWN.get(packet)
    if own is not None:
        return own(args, result)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def operator_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes of one call's operands and results; none for views and for memory that is only asked for.

    Rows that are looked up in a table count, not the table.
    """
    packet = func.overloadpacket
    results = list(tensors_of((result,)))
    if packet in _WRITES_NOTHING or _is_view(func):
        return 0
    if packet in _LOOKS_UP:
        return 2 * sum(map(_size, results))
    return sum(map(_size, (*tensors_of(args), *tensors_of(tuple(kwargs.values())), *results)))


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether results share memory with operands without being written."""
    infos = [returned.alias_info for returned in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _size(tensor: Tensor) -> int:
    """Bytes that it covers; what is expanded is read once."""
    lengths = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or length == 0]
    return math.prod(lengths) * tensor.element_size()


def _cpu_attention(args: Sequence[Any], _: Any) -> int:
    return int(sdpa_flop_count(*_per_head(args[:3])))


def _cpu_attention_backward(args: Sequence[Any], _: Any) -> int:
    return int(sdpa_backward_flop_count(args[0].shape, *_per_head(args[1:4])))


def _per_head(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """Shapes of query, key and value where each query head has a key head of its own."""
    query, key, value = tensors
    heads = query.shape[1]
    return [torch.Size((shape[0], heads, *shape[2:])) for shape in (query.shape, key.shape, value.shape)]


def _grouped_product(args: Sequence[Any], _: Any) -> int:
    """Each row by one matrix of a stack, or each stretch of columns by its stretch of rows: all columns count once."""
    left, right = args[0], args[1]
    stacked = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * stacked * left.shape[-2] * left.shape[-1] * right.shape[-1])


_OWN: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    _ATEN._grouped_mm: _grouped_product,
}

_WRITES_NOTHING = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}

_LOOKS_UP = {_ATEN.embedding, _ATEN.index_select, _ATEN.index, _ATEN.gather}
