"""Dispatch of torch's operations on shards: one rule per kind of operation, looked up once per operation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp.dtensor.reduction import (
    Combine,
    ReducedScalar,
    Reduction,
    local_norms,
    norm_reduction,
    plain,
    resolve,
    unite_gradients,
    wide,
)
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ConfigurationError, ShardOperationError

# Reductions of shards to one number, operation by operation.

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]


def bound(func: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return all arguments by name, with defaults."""
    names, defaults = _signature(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _name(func: Any) -> str:
    name: str = func._schema.name.removeprefix("aten::")
    return name


@functools.cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return tuple(argument.name for argument in arguments), defaults


def is_total(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Return True if a reduction goes over all dimensions."""
    named = bound(func, args, kwargs)
    dim = named.get("dim")
    dims = () if dim is None else tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    ndim = named["self"].ndim
    covered = not dims or {d % max(ndim, 1) for d in dims} == set(range(ndim))
    return covered and "out" not in kwargs and len(func._schema.returns) == 1


def _numbers(
    tensors: Sequence[torch.Tensor], reductions: Sequence[Reduction], keepdim: bool = False
) -> list[ReducedScalar]:
    """Resolve reductions of tensors to scalars; with `keepdim`, of the tensors' number of dimensions."""
    made = []
    for tensor, reduction, value in zip(tensors, reductions, resolve(reductions), strict=True):
        unite = None
        if isinstance(tensor, UnevenDTensor) and tensor.requires_grad and tensor.shard_spec.shard_groups:
            spec = tensor.shard_spec
            unite = functools.partial(unite_gradients, groups=spec.shard_groups, adds_up=spec.adds_up)
        made.append(ReducedScalar.of(value, reduction, unite, tensor.ndim if keepdim else 0))
    return made


_REDUCTIONS = frozenset(
    (
        "all", "amax", "amin", "any", "count_nonzero", "linalg_vector_norm", "max", "mean", "min", "nansum", "norm",
        "sum",
    )
)  # fmt: skip


def _total(func: Any, args: Args, kwargs: Kwargs) -> ReducedScalar:
    """Reduce all elements to one number."""
    named = bound(func, args, kwargs)
    tensor = named["self"]
    if not is_total(func, args, kwargs):
        raise ShardOperationError(
            f"{func} over dim={named.get('dim')}, keepdim={named.get('keepdim')} cannot run on a tensor of shape "
            f"{tuple(tensor.shape)} that is sharded over ranks; reduce all dimensions, or use full_tensor()"
            f"{tensor.shard_spec.advice}"
        )
    return _numbers([tensor], [_reduction(_name(func), tensor, named)], bool(named.get("keepdim")))[0]


def _reduction(name: str, tensor: UnevenDTensor, named: dict[str, Any]) -> Reduction:
    """Return the unresolved reduction of all elements, with this rank's part."""
    local, groups, dtype = tensor._local_tensor, tensor.shard_spec.groups, named.get("dtype") or tensor.dtype
    match name:
        case "all":
            return Reduction(-local.all().to(torch.int64), Combine.MAX, groups, torch.bool, negate=True)
        case "any":
            return Reduction(local.any().to(torch.int64), Combine.MAX, groups, torch.bool)
        case "count_nonzero":
            return Reduction(torch.count_nonzero(local), Combine.SUM, groups, torch.int64)
        case "linalg_vector_norm" | "norm":
            order = named.get("ord", named.get("p"))
            return _norms([tensor], 2.0 if order is None else float(order), named.get("dtype"))[0]
        case "mean":
            part = local.sum(dtype=wide(dtype))
            if not tensor.numel():
                part = part + math.nan
            return Reduction(part, Combine.SUM, groups, dtype, divisor=max(tensor.numel(), 1))
        case "sum" | "nansum":
            if named.get("dtype") is None and not (dtype.is_floating_point or dtype.is_complex):
                dtype = torch.int64
            filled = local.masked_fill(local.isnan(), 0) if name == "nansum" else local
            return Reduction(filled.sum(dtype=wide(dtype)), Combine.SUM, groups, dtype)
    if not tensor.numel():
        raise ShardOperationError(f"a tensor of shape {tuple(tensor.shape)} has no elements, so no largest or smallest")
    values, is_smallest = local.to(wide(tensor.dtype)), name in ("amin", "min")
    if local.numel():
        part = -values.min() if is_smallest else values.max()
    else:
        part = values.new_full((), -math.inf if values.dtype.is_floating_point else -(2**63 - 1))
    return Reduction(part, Combine.MAX, groups, tensor.dtype, negate=is_smallest)


def norms_of_list(func: Any, args: Args, kwargs: Kwargs) -> list[ReducedScalar]:
    """Run `_foreach_norm`; tensors sharded over the same ranks share one all-reduce."""
    named = bound(func, args, kwargs)
    return _numbers(named["self"], _norms(named["self"], float(named["ord"]), named.get("dtype")))


def _norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[Reduction]:
    if any(each.dtype.is_complex for each in tensors):
        raise ShardOperationError("norms of complex sharded tensors are not offered; take the norm of abs()")
    parts = local_norms([_local(each) for each in tensors], order, wide(dtype or tensors[0].dtype))
    made = []
    for each, part in zip(tensors, parts, strict=True):
        spec = each.shard_spec if isinstance(each, UnevenDTensor) else None
        groups, further = (spec.groups, spec.foreign_groups) if spec is not None else ((), ())
        made.append(norm_reduction(part, order, groups, dtype or each.dtype, further))
    return made


def equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Run `torch.equal` or `allclose` over all ranks; the two tensors may be cut differently, or one be plain."""
    first, second, *rest = args
    if first.shape != second.shape:
        return False if _name(func) == "equal" else _refuse(func, args, kwargs)
    spec = _spec_of_result((first, second), {})
    agree = func(*(cut_alike(spec, each) for each in (first, second)), *rest, **kwargs)
    part = torch.tensor(-int(agree), device=first.device)
    return bool(resolve([Reduction(part, Combine.MAX, spec.groups, torch.bool, negate=True)])[0])


def cut_alike(spec: ShardSpec, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor resharded as `spec`; gathers it if it is cut differently."""
    if isinstance(value, UnevenDTensor) and value.shard_spec == spec:
        return value._local_tensor
    return spec.take(value.full_tensor() if isinstance(value, DTensor) else value)


def local_operand(spec: ShardSpec, value: Any, func: Any, elementwise: bool = True) -> Any:
    """Return the elements of an operand that go with this rank's shard of a tensor cut as `spec`."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ReducedScalar):
        return plain(value).reshape(())
    if not isinstance(value, DTensor):
        return _part_of_plain(spec, value, func, elementwise)
    if isinstance(value, UnevenDTensor):
        if value.shard_spec is spec or value.shard_spec == spec:
            return value._local_tensor
        is_whole = value.shard_spec.is_whole
    else:
        is_whole = _is_replicated(value) and (not value.ndim or value.device_mesh == spec.mesh)
    if not is_whole:
        raise ShardOperationError(
            f"{func} mixes tensors that are cut differently: shape {tuple(spec.shape)} with placements "
            f"{spec.placements}, and shape {tuple(value.shape)} with placements {value.placements}; bring both to "
            "whole tensors by full_tensor(), or the second to Replicate on the same mesh"
        )
    full = value._local_tensor
    return spec.take(full) if full.ndim else full


def _is_replicated(value: DTensor) -> bool:
    return all(placement.is_replicate() for placement in value.placements)


def _part_of_plain(spec: ShardSpec, value: torch.Tensor, func: Any, elementwise: bool) -> torch.Tensor:
    if value.ndim == 0:
        return value
    # Whether autograd calls: its full-size tensors come from reductions, the same on every rank.
    in_backward = torch._C._current_graph_task_id() != -1
    lengths = zip(value.shape, value.stride(), strict=True)
    spreads = elementwise or in_backward
    if spreads and value.numel() and all(length == 1 or stride == 0 for length, stride in lengths):
        one = value[(0,) * value.ndim]  # one number, expanded, as the gradients of sums are
        return one.expand(spec.description.local_shape) if spec.shape else one
    if in_backward:
        return spec.take(value)
    raise ShardOperationError(
        f"{func} mixes a tensor of shape {tuple(spec.shape)} that is sharded over ranks with a plain tensor of shape "
        f"{tuple(value.shape)}, of which nothing says that it is the same on every rank; wrap it by "
        "DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim), or compute on to_local()"
        f"{spec.advice}"
    )


# Operations on lists of tensors, which optimizers and clipping use.

Specs = list[ShardSpec | None]


def elementwise_on_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a `_foreach_*` or `_fused_*` operation on the local tensors of its lists."""
    specs: Specs | None = None
    for arg in args:
        if isinstance(arg, list | tuple) and any(isinstance(each, UnevenDTensor) for each in arg):
            specs = [each.shard_spec if isinstance(each, UnevenDTensor) else None for each in arg]
            break
    if specs is None:
        raise ShardOperationError(f"{func} mixes a list of plain tensors with a sharded tensor; give one sort")
    inner = [_local_argument(func, arg, specs) for arg in args]
    result = func(*inner, **{key: _local_argument(func, arg, specs) for key, arg in kwargs.items()})
    return _wrap(result, specs)


def _local_argument(func: Any, arg: Any, specs: Specs) -> Any:
    if isinstance(arg, list | tuple):
        return [_local_element(func, each, specs, index) for index, each in enumerate(arg)]
    if isinstance(arg, UnevenDTensor):
        if not arg.shard_spec.is_whole:
            raise ShardOperationError(f"{func}: a single tensor beside lists must not be sharded over ranks")
        return arg._local_tensor
    return plain(arg)


def _local_element(func: Any, each: Any, specs: Specs, index: int) -> Any:
    if type(each) is UnevenDTensor:
        spec = specs[index]
        if each.shard_spec is spec:
            return each._local_tensor
    if not isinstance(each, torch.Tensor) or (each.ndim == 0 and not isinstance(each, UnevenDTensor)):
        return plain(each)
    spec = specs[index] if index < len(specs) else None
    if spec is None:
        if isinstance(each, UnevenDTensor):
            raise ShardOperationError(f"{func} mixes plain and sharded tensors at place {index} of its lists")
        return each
    return local_operand(spec, each, func)


def _wrap(result: Any, specs: Specs) -> Any:
    if not isinstance(result, list | tuple):
        return result
    if result and isinstance(result[0], list | tuple):
        return type(result)(_wrap(each, specs) for each in result)
    return type(result)(
        each if spec is None else UnevenDTensor.wrap(each, spec) for each, spec in zip(result, specs, strict=True)
    )


def unscale(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run `GradScaler`'s check and unscaling; an infinity on one rank is found on all that hold shards or replicas."""
    grads, found_inf, *rest = args
    func([_local(each) for each in grads], found_inf, *rest, **kwargs)
    groups = {
        group.group_name: group
        for each in grads
        if isinstance(each, UnevenDTensor)
        for group in each.shard_spec.all_groups
    }
    for name in sorted(groups):
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=groups[name])


def dispatch(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation that has an `UnevenDTensor` among its arguments.

    Operations on local tensors count in their version counters, which their views share: so the engine sees a write
    into main weights, whichever alias of a parameter it goes through.
    """
    if func._schema.is_mutable:
        _check_unused(func, args)
    with _counts_versions():
        return _rule(func)(func, args, kwargs)


# What counts is excluded where torch calls `__torch_dispatch__`, since the DTensor itself was counted.
_counts_versions = functools.partial(torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False)


def _check_unused(func: Any, args: Args) -> None:
    """Raise if an operation changes gradients that an optimizer in backward has already used."""
    written = args[0] if args else None
    for each in written if isinstance(written, list | tuple) else (written,):
        if isinstance(each, UnevenDTensor) and each.used_for:
            raise ConfigurationError(
                f"{func} would change the gradient of {each.used_for}, which optimizer.step_in_backward() has used "
                "already, as clipping, scalers and penalties do; leave step_in_backward out"
            )


@functools.cache
def _rule(func: Any) -> Rule:
    name = _name(func)
    if name in _REDUCTIONS:
        return _unless_whole(_total, reduces=True)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(("_foreach_", "_fused_")):
        return elementwise_on_lists
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _unless_whole(_random if name in _FILLS or name in _DRAWS else _refuse)
    if torch.Tag.inplace_view in func.tags:
        return _refuse_reshaping
    if _is_elementwise(name):
        return _elementwise
    return _unless_whole(_refuse)


def _is_elementwise(name: str) -> bool:
    """Return True if torch tags an operation, its out-of-place form or its forward as pointwise."""
    names = {name, name.replace("__i", "__")} | {name.removesuffix(each) for each in ("_", "_backward", "_copy")}
    packets = [getattr(torch.ops.aten, each) for each in names if hasattr(torch.ops.aten, each)]
    tagged = any(torch.Tag.pointwise in getattr(each, form).tags for each in packets for form in each.overloads())
    return tagged or name.endswith("_like") or not names.isdisjoint(_UNTAGGED)


def _unless_whole(rule: Rule, reduces: bool = False) -> Rule:
    """Apply a rule to sharded operands; run the operation itself on replicated ones."""

    def either(func: Any, args: Args, kwargs: Kwargs) -> Any:
        if reduces and is_total(func, args, kwargs):
            return rule(func, args, kwargs)
        specs = _specs(args, kwargs)
        if all(spec.is_whole for spec in specs):
            return _on_whole(func, args, kwargs, specs[0], elementwise=False)
        return rule(func, args, kwargs)

    return either


def _specs(args: Args, kwargs: Kwargs) -> list[ShardSpec]:
    return [leaf.shard_spec for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, UnevenDTensor)]


# ---- elementwise ----------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    target = _written(func, args, kwargs)
    if target is not None:
        if not isinstance(target, UnevenDTensor):  # into another kind of tensor, such as a plain one
            if not all(spec.is_whole for spec in _specs(args, kwargs)):
                return _refuse(func, args, kwargs)
            func(*tree_map(_local, args), **tree_map(_local, kwargs))
            return target
        spec = target.shard_spec
    else:
        spec = _spec_of_result(args, kwargs)
    if spec.is_whole:
        return _on_whole(func, args, kwargs, spec)
    inner = [local_operand(spec, arg, func) for arg in args]
    named = {key: local_operand(spec, arg, func) for key, arg in kwargs.items() if key != "memory_format"}
    result = func(*inner, **named)
    return target if target is not None else _wrapped(func, result, spec)


def _written(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the tensor that an operation writes in place; None if it makes a new one."""
    if "out" in kwargs:
        return kwargs["out"]
    name = func._schema.name
    return args[0] if name.endswith("_") and not name.endswith("__") else None


def _spec_of_result(args: Args, kwargs: Kwargs) -> ShardSpec:
    found = None
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, UnevenDTensor):
            if not arg.shard_spec.is_whole:
                return arg.shard_spec
            if found is None or arg.ndim > len(found.shape):
                found = arg.shard_spec
    if found is None:
        found = _specs(args, kwargs)[0]
    return found


def _wrapped(func: Any, result: Any, spec: ShardSpec) -> Any:
    if isinstance(result, torch.Tensor):
        if result.shape != spec.description.local_shape:
            raise ShardOperationError(
                f"{func} would broadcast shards of a tensor of shape {tuple(spec.shape)} to another shape, which "
                "only whole tensors can: use full_tensor(), or redistribute to Replicate"
            )
        return UnevenDTensor.wrap(result, spec)
    if isinstance(result, tuple | list):
        return type(result)(_wrapped(func, each, spec) for each in result)
    return result


# ---- whole on every rank --------------------------------------------------------------------------------------------


def _on_whole(func: Any, args: Args, kwargs: Kwargs, spec: ShardSpec, elementwise: bool = True) -> Any:
    """Run any operation on replicated tensors."""
    target = _written(func, args, kwargs)
    operand = functools.partial(_whole_operand, spec, func, elementwise)
    result = func(*tree_map(operand, args), **tree_map(operand, kwargs))
    if target is not None:
        return target

    def rewrapped(value: Any) -> Any:
        return UnevenDTensor.wrap(value, spec.whole_like(value.shape)) if isinstance(value, torch.Tensor) else value

    return tree_map(rewrapped, result)


def _whole_operand(spec: ShardSpec, func: Any, elementwise: bool, value: Any) -> Any:
    is_whole = isinstance(value, UnevenDTensor) and value.shard_spec.is_whole
    if is_whole or (isinstance(value, DTensor) and _is_replicated(value)):
        return value._local_tensor
    return local_operand(spec, value, func, elementwise)


# ---- single operations ----------------------------------------------------------------------------------------------


def _random(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Draw the whole tensor and keep this rank's elements: with equal seeds the values are those of one process."""
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    drawn = torch.empty(tensor.shape, dtype=dtype, device=tensor._local_tensor.device)
    if any(isinstance(arg, UnevenDTensor) for arg in args[1:]):
        return _refuse(func, args, kwargs)
    named = {key: arg for key, arg in kwargs.items() if key != "memory_format"}
    shard = tensor.shard_spec.take(func(drawn, *args[1:], **named))
    if _name(func) in _DRAWS:
        return UnevenDTensor.wrap(shard.clone(), tensor.shard_spec)
    tensor._local_tensor.copy_(shard)
    return tensor


def _alias(_func: Any, args: Args, _kwargs: Kwargs) -> Any:
    """Return an alias of the same local tensor; an assignment to `data` moves it for all aliases."""
    return UnevenDTensor.wrap(args[0]._local_tensor, args[0].shard_spec)


def _refuse_reshaping(func: Any, args: Args, _kwargs: Kwargs) -> Any:
    """Raise if an in-place operation would change a tensor's shape or memory."""
    target = args[0]
    if _name(func) == "set_" and len(args) == 2 and _local(args[1]) is _local(target):
        return target
    raise ShardOperationError(
        f"{func} would change the shape or the memory of a tensor of shape {tuple(target.shape)}, which sharded "
        "tensors cannot in place: copy into it, or change the model before it is sharded"
    )


def _same_shape_view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """View or expand a tensor to its own shape."""
    tensor, size = args[0], args[1]
    if isinstance(tensor, UnevenDTensor) and isinstance(size, list | tuple):
        wanted = [own if n == -1 else n for n, own in zip(size, tensor.shape, strict=False)]
        if len(size) == tensor.ndim and wanted == list(tensor.shape):
            return _alias(func, args, kwargs)
    return _unless_whole(_refuse)(func, args, kwargs)


def _new(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `new_zeros` and the like for the tensor's own shape."""
    tensor, size, *rest = args
    spec = tensor.shard_spec
    if list(size) != list(tensor.shape) or spec.is_whole:
        return _unless_whole(_refuse)(func, args, kwargs)
    if func._schema.name == "aten::new_empty_strided":
        return UnevenDTensor.wrap(tensor._local_tensor.new_empty(spec.description.local_shape, **kwargs), spec)
    return UnevenDTensor.wrap(func(tensor._local_tensor, spec.description.local_shape, *rest, **kwargs), spec)


def _local_only(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on the local tensor's memory (not its elements)."""
    result = func(*tree_map(_local, args), **kwargs)
    return UnevenDTensor.wrap(result, args[0].shard_spec) if isinstance(result, torch.Tensor) else result


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, UnevenDTensor) else value


def _refuse(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        result = func.decompose(*args, **kwargs)  # under inference mode, composite operations arrive here undecomposed
        if result is not NotImplemented:
            return result
    specs = _specs(args, kwargs)
    shapes = [tuple(spec.shape) for spec in specs]
    raise ShardOperationError(
        f"{func} cannot run on tensors that are sharded over ranks (shape {shapes[0] if shapes else '?'}): elementwise "
        "operations between tensors cut alike and reductions to one number can; use full_tensor() for the whole "
        "tensor, to_local() for this rank's elements, save_hf(model, folder) of megatron_fsdp.checkpoint.hf where "
        "save_pretrained has asked, or fully_shard_optimizer(optimizer) where an optimizer of whole tensors has"
        f"{specs[0].advice if specs else ''}"
    )


_FILLS = frozenset(("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"))
_DRAWS = frozenset(("rand_like", "randn_like", "randint_like"))

_UNTAGGED = frozenset(
    (
        "_add_relu", "_conj", "_to_copy", "alias", "complex", "copy", "detach", "fill", "floor_divide", "hardswish",
        "lift", "lift_fresh", "log_sigmoid", "log_sigmoid_forward", "polar", "zero",
    )
)  # fmt: skip
"""Elementwise operations that torch does not tag as pointwise, by the names of their out-of-place forms."""

_BY_NAME: dict[str, Rule] = {
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "_foreach_norm": norms_of_list,
    "_foreach_max": _refuse,
    "_foreach_powsum": _refuse,
    "_local_scalar_dense": lambda _func, args, _kwargs: args[0].full_tensor().item(),
    "_unsafe_view": _same_shape_view,
    "alias": _alias,
    "allclose": equal,
    "detach": _alias,
    "detach_": lambda _func, args, _kwargs: args[0],
    "equal": equal,
    "expand": _same_shape_view,
    "is_pinned": _local_only,
    "is_same_size": lambda _func, args, _kwargs: args[0].shape == args[1].shape,
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
