"""How torch's operations run on shards: rules by kind of operation, chosen once per operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp.dtensor import reduce_rules
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.list_rules import elementwise_on_lists, unscale
from megatron_fsdp.dtensor.operands import local_operand
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ShardOperationError

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]


def dispatch(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation of which an argument is an `UnevenDTensor`.

    Raises:
        ShardOperationError: It needs elements of other ranks, or mixes tensors that are cut differently.
    """
    return _rule(func)(func, args, kwargs)


@functools.cache
def _rule(func: Any) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    if name in reduce_rules.RULES:
        return _unless_whole(reduce_rules.RULES[name], reduces=True)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(("_foreach_", "_fused_")):
        return elementwise_on_lists
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _unless_whole(_random if name in _FILLS or name in _DRAWS else _refuse)
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return _elementwise
    return _unless_whole(_refuse)


def _unless_whole(rule: Rule, reduces: bool = False) -> Rule:
    """The rule where elements are spread over ranks; where every rank has all of them, the operation itself."""

    def either(func: Any, args: Args, kwargs: Kwargs) -> Any:
        if reduces and reduce_rules.is_total(func, args, kwargs):
            return rule(func, args, kwargs)
        frames = _frames(args, kwargs)
        if all(frame.is_whole for frame in frames):
            return _on_whole(func, args, kwargs, frames[0], elementwise=False)
        return rule(func, args, kwargs)

    return either


def _frames(args: Args, kwargs: Kwargs) -> list[ShardFrame]:
    return [leaf.shard_frame for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, UnevenDTensor)]


# ---- elementwise ----------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    target = _written(func, args, kwargs)
    if target is not None:
        if not isinstance(target, UnevenDTensor):
            return _into_other(func, args, kwargs)
        frame = target.shard_frame
    else:
        frame = _frame_of_result(args, kwargs)
    if frame.is_whole:
        return _on_whole(func, args, kwargs, frame)
    inner = [local_operand(frame, arg, func) for arg in args]
    named = {key: local_operand(frame, arg, func) for key, arg in kwargs.items() if key != "memory_format"}
    result = func(*inner, **named)
    return target if target is not None else _wrapped(func, result, frame)


def _written(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The tensor that an operation writes to; None if it makes a new one."""
    if "out" in kwargs:
        return kwargs["out"]
    name = func._schema.name
    return args[0] if name.endswith("_") and not name.endswith("__") else None


def _frame_of_result(args: Args, kwargs: Kwargs) -> ShardFrame:
    found = None
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, UnevenDTensor):
            if not arg.shard_frame.is_whole:
                return arg.shard_frame
            if found is None or arg.ndim > len(found.shape):
                found = arg.shard_frame
    if found is None:
        found = _frames(args, kwargs)[0]
    return found


def _wrapped(func: Any, result: Any, frame: ShardFrame) -> Any:
    if isinstance(result, torch.Tensor):
        if result.shape != frame.description.local_shape:
            raise ShardOperationError(
                f"{func} would broadcast shards of a tensor of shape {tuple(frame.shape)} to another shape, which "
                "only whole tensors can: use full_tensor(), or redistribute to Replicate"
            )
        return UnevenDTensor.wrap(result, frame)
    if isinstance(result, tuple | list):
        return type(result)(_wrapped(func, each, frame) for each in result)
    return result


def _into_other(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An operation that writes into a tensor that is not ours, such as a plain one."""
    frames = _frames(args, kwargs)
    if not all(frame.is_whole for frame in frames):
        return _refuse(func, args, kwargs)
    func(*tree_map(_local, args), **tree_map(_local, kwargs))
    return _written(func, args, kwargs)


# ---- whole on every rank --------------------------------------------------------------------------------------------


def _on_whole(func: Any, args: Args, kwargs: Kwargs, frame: ShardFrame, elementwise: bool = True) -> Any:
    """Any operation, on tensors that every rank has whole."""
    target = _written(func, args, kwargs)
    operand = functools.partial(_whole_operand, frame, func, elementwise)
    result = func(*tree_map(operand, args), **tree_map(operand, kwargs))
    if target is not None:
        return target

    def rewrapped(value: Any) -> Any:
        return UnevenDTensor.wrap(value, frame.whole_like(value.shape)) if isinstance(value, torch.Tensor) else value

    return tree_map(rewrapped, result)


def _whole_operand(frame: ShardFrame, func: Any, elementwise: bool, value: Any) -> Any:
    if isinstance(value, UnevenDTensor) and value.shard_frame.is_whole:
        return value._local_tensor
    if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.ndim):
        if isinstance(value, DTensor) and all(placement.is_replicate() for placement in value.placements):
            return value._local_tensor
        return local_operand(frame, value, func, elementwise)
    return local_operand(frame, value, func)


# ---- single operations ----------------------------------------------------------------------------------------------


def _random(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Draw the whole tensor and keep this rank's elements: with equal seeds, what one process would have."""
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    drawn = torch.empty(tensor.shape, dtype=dtype, device=tensor._local_tensor.device)
    others = [_no_shard(func, arg) for arg in args[1:]]
    named = {key: arg for key, arg in kwargs.items() if key != "memory_format"}
    name = func._schema.name.removeprefix("aten::")
    result = func(drawn, *others, **named)
    piece = tensor.shard_frame.take(result)
    if name in _DRAWS:
        return UnevenDTensor.wrap(piece.clone(), tensor.shard_frame)
    tensor._local_tensor.copy_(piece)
    return tensor


def _no_shard(func: Any, value: Any) -> Any:
    if isinstance(value, UnevenDTensor):
        return _refuse(func, (value,), {})
    return value


def _same_shape_view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view or expansion to the tensor's own shape."""
    tensor, size = args[0], args[1]
    if isinstance(tensor, UnevenDTensor):
        wanted = [own if n == -1 else n for n, own in zip(size, tensor.shape, strict=False)]
        if len(size) == tensor.ndim and wanted == list(tensor.shape):
            local = tensor._local_tensor
            return UnevenDTensor.wrap(local.view(local.shape), tensor.shard_frame)
    return _unless_whole(_refuse)(func, args, kwargs)


def _new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`new_zeros` and the like, of the tensor's own shape."""
    tensor, size, *rest = args
    frame = tensor.shard_frame
    if list(size) != list(tensor.shape) or frame.is_whole:
        return _unless_whole(_refuse)(func, args, kwargs)
    if func._schema.name == "aten::new_empty_strided":
        return UnevenDTensor.wrap(tensor._local_tensor.new_empty(frame.description.local_shape, **kwargs), frame)
    return UnevenDTensor.wrap(func(tensor._local_tensor, frame.description.local_shape, *rest, **kwargs), frame)


def _is_same_size(_func: Any, args: Args, _kwargs: Kwargs) -> bool:
    return args[0].shape == args[1].shape


def _local_only(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """What concerns memory and not elements."""
    result = func(*tree_map(_local, args), **kwargs)
    return UnevenDTensor.wrap(result, args[0].shard_frame) if isinstance(result, torch.Tensor) else result


def _item(_func: Any, args: Args, _kwargs: Kwargs) -> Any:
    return args[0].full_tensor().item()


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, UnevenDTensor) else value


def _refuse(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        result = func.decompose(*args, **kwargs)  # under inference mode, compositions arrive here unopened
        if result is not NotImplemented:
            return result
    frames = _frames(args, kwargs)
    shapes = [tuple(frame.shape) for frame in frames]
    raise ShardOperationError(
        f"{func} cannot run on tensors that are sharded over ranks (shape {shapes[0] if shapes else '?'}): elementwise "
        "operations between tensors cut alike and reductions to one number can; use full_tensor() for the whole "
        f"tensor, or to_local() for this rank's elements{frames[0].advice if frames else ''}"
    )


_FILLS = frozenset(("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"))
_DRAWS = frozenset(("rand_like", "randn_like", "randint_like"))

_ELEMENTWISE = frozenset(
    (
        "_conj", "_to_copy", "__and__", "__iand__", "__ior__", "__or__", "__xor__", "alias", "clone", "copy_",
        "copysign_", "detach", "detach_", "empty_like", "fill", "fill_", "floor_divide", "floor_divide_", "full_like",
        "lift_fresh",
        "masked_fill", "masked_fill_", "nan_to_num_", "ones_like", "polar", "where", "zero", "zero_", "zeros_like",
    )
)  # fmt: skip
"""Elementwise operations that torch does not tag as such."""

_BY_NAME: dict[str, Rule] = {
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "_foreach_norm": reduce_rules.norms_of_list,
    "_foreach_max": _refuse,
    "_foreach_powsum": _refuse,
    "_local_scalar_dense": _item,
    "_unsafe_view": _same_shape_view,
    "equal": reduce_rules.equal,
    "expand": _same_shape_view,
    "is_pinned": _local_only,
    "is_same_size": _is_same_size,
    "new_empty": _new,
    "new_empty_strided": _new,
    "new_full": _new,
    "new_ones": _new,
    "new_zeros": _new,
    "pin_memory": _local_only,
    "_pin_memory": _local_only,
    "record_stream": _local_only,
    "view": _same_shape_view,
}
