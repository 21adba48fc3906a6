"""Reductions of shards to one number, operation by operation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_fsdp.dtensor.reduction import (
    Combine,
    ReducedScalar,
    Reduction,
    norm_parts,
    norm_reduction,
    resolve,
    unite_gradients,
    wide,
)
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ShardOperationError

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def bound(func: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
    names, defaults = _signature(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@functools.cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return tuple(argument.name for argument in arguments), defaults


def is_total(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a reduction goes over all dimensions and gives one number."""
    named = bound(func, args, kwargs)
    dim = named.get("dim")
    dims = () if dim is None else tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    ndim = named["self"].ndim
    covered = not dims or {d % max(ndim, 1) for d in dims} == set(range(ndim))
    return covered and "out" not in kwargs and len(func._schema.returns) == 1


def _number(reduction: Reduction, tensor: torch.Tensor, keepdim: bool = False) -> ReducedScalar:
    """What a reduction of a tensor gives, with as many dimensions of length 1 as the tensor has if `keepdim`."""
    unite = None
    if isinstance(tensor, UnevenDTensor) and tensor.requires_grad and tensor.shard_frame.shard_groups:
        frame = tensor.shard_frame
        unite = functools.partial(unite_gradients, groups=frame.shard_groups, adds_up=frame.adds_up)
    return ReducedScalar.of(reduction, unite, tensor.ndim if keepdim else 0)


def _total(compute: Callable[[UnevenDTensor, torch.Tensor, dict[str, Any]], Reduction]) -> Callable[..., Any]:
    def rule(func: Any, args: Args, kwargs: Kwargs) -> Any:
        named = bound(func, args, kwargs)
        tensor = named["self"]
        if not is_total(func, args, kwargs):
            raise ShardOperationError(
                f"{func} over dim={named.get('dim')}, keepdim={named.get('keepdim')} cannot run on a tensor of shape "
                f"{tuple(tensor.shape)} that is sharded over ranks; reduce all dimensions, or use full_tensor()"
            )
        reduction = compute(tensor, tensor._local_tensor, named)
        resolve([reduction])
        return _number(reduction, tensor, bool(named.get("keepdim")))

    return rule


def _sum(tensor: UnevenDTensor, local: torch.Tensor, named: dict[str, Any]) -> Reduction:
    dtype = named.get("dtype") or (
        tensor.dtype if tensor.dtype.is_floating_point or tensor.dtype.is_complex else torch.int64
    )
    return Reduction(local.sum(dtype=wide(dtype)), Combine.SUM, tensor.shard_frame.groups, dtype)


def _nansum(tensor: UnevenDTensor, local: torch.Tensor, named: dict[str, Any]) -> Reduction:
    return _sum(tensor, local.masked_fill(local.isnan(), 0), named)


def _mean(tensor: UnevenDTensor, local: torch.Tensor, named: dict[str, Any]) -> Reduction:
    dtype = named.get("dtype") or tensor.dtype
    part = local.sum(dtype=wide(dtype))
    if not tensor.numel():
        part = part + math.nan
    return Reduction(part, Combine.SUM, tensor.shard_frame.groups, dtype, divisor=max(tensor.numel(), 1))


def _count(tensor: UnevenDTensor, local: torch.Tensor, _named: dict[str, Any]) -> Reduction:
    return Reduction(torch.count_nonzero(local), Combine.SUM, tensor.shard_frame.groups, torch.int64)


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else -(2**63 - 1)


def _max(tensor: UnevenDTensor, local: torch.Tensor, _named: dict[str, Any]) -> Reduction:
    _check_not_empty(tensor)
    values = local.to(wide(tensor.dtype))
    part = values.max() if local.numel() else values.new_full((), _lowest(values.dtype))
    return Reduction(part, Combine.MAX, tensor.shard_frame.groups, tensor.dtype)


def _min(tensor: UnevenDTensor, local: torch.Tensor, _named: dict[str, Any]) -> Reduction:
    _check_not_empty(tensor)
    values = local.to(wide(tensor.dtype))
    part = -values.min() if local.numel() else values.new_full((), _lowest(values.dtype))
    return Reduction(part, Combine.MAX, tensor.shard_frame.groups, tensor.dtype, negate=True)


def _check_not_empty(tensor: UnevenDTensor) -> None:
    if not tensor.numel():
        raise ShardOperationError(f"a tensor of shape {tuple(tensor.shape)} has no elements, so no largest or smallest")


def _any(tensor: UnevenDTensor, local: torch.Tensor, _named: dict[str, Any]) -> Reduction:
    return Reduction(local.any().to(torch.int64), Combine.MAX, tensor.shard_frame.groups, torch.bool)


def _all(tensor: UnevenDTensor, local: torch.Tensor, _named: dict[str, Any]) -> Reduction:
    return Reduction(-local.all().to(torch.int64), Combine.MAX, tensor.shard_frame.groups, torch.bool, negate=True)


def _norm(func: Any, args: Args, kwargs: Kwargs) -> ReducedScalar:
    """A norm, which waits until it is used, so that the norms of many tensors share a collective."""
    named = bound(func, args, kwargs)
    tensor = named["self"]
    if not is_total(func, args, kwargs):
        raise ShardOperationError(
            f"{func} over dim={named.get('dim')}, keepdim={named.get('keepdim')} cannot run on a tensor of shape "
            f"{tuple(tensor.shape)} that is sharded over ranks; take the norm of all of it, or use full_tensor()"
        )
    order = named.get("ord", named.get("p"))
    order = 2.0 if order is None else float(order)
    return _norms([tensor], order, named.get("dtype"), bool(named.get("keepdim")))[0]


def norms_of_list(func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """`_foreach_norm`: a list of norms, none of which is waited for."""
    named = bound(func, args, kwargs)
    return _norms(named["self"], float(named["ord"]), named.get("dtype"))


def _norms(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None, keepdim: bool = False
) -> list[Any]:
    if any(each.dtype.is_complex for each in tensors):
        raise ShardOperationError("norms of complex sharded tensors are not offered; take the norm of abs()")
    locals_ = [each._local_tensor if isinstance(each, UnevenDTensor) else each for each in tensors]
    parts = norm_parts(locals_, order, wide(dtype or tensors[0].dtype))
    return [
        _number(norm_reduction(part, order, _groups(each), dtype or each.dtype, _foreign_groups(each)), each, keepdim)
        for each, part in zip(tensors, parts, strict=True)
    ]


def _groups(tensor: torch.Tensor) -> Any:
    return tensor.shard_frame.groups if isinstance(tensor, UnevenDTensor) else ()


def _foreign_groups(tensor: torch.Tensor) -> Any:
    return tensor.shard_frame.foreign_groups if isinstance(tensor, UnevenDTensor) else ()


def equal(_func: Any, args: Args, _kwargs: Kwargs) -> bool:
    """`torch.equal`, over all ranks."""
    first, second = args
    if first.shape != second.shape:
        return False
    return bool((first == second).all().item())


RULES: dict[str, Callable[[Any, Args, Kwargs], Any]] = {
    "all": _total(_all),
    "amax": _total(_max),
    "amin": _total(_min),
    "any": _total(_any),
    "count_nonzero": _total(_count),
    "linalg_vector_norm": _norm,
    "max": _total(_max),
    "mean": _total(_mean),
    "min": _total(_min),
    "nansum": _total(_nansum),
    "norm": _norm,
    "sum": _total(_sum),
}
"""By the name of the operation."""
