"""Reductions of shards to a scalar: each rank's part, and the all-reduce of the parts."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp.comm.agreement import Companion
from megatron_fsdp.errors import ShardOperationError, waits_for

Groups = tuple[dist.ProcessGroup, ...]


class Combine(enum.Enum):
    """The operation that combines the parts of all ranks."""

    SUM = "sum"
    MAX = "max"
    POWER = "power"


@dataclass(frozen=True)
class Reduction:
    """A scalar of which every rank has a part."""

    part: torch.Tensor  # () in the dtype that travels: float32, float64, complex or int64
    combine: Combine  # SUM, MAX, or POWER: the root of the sum of powers
    groups: Groups  # reduced over one after another; none where every rank has everything
    dtype: torch.dtype  # of the result
    power: float = 1.0  # exponent of `POWER`
    divisor: int = 1  # the result is divided by it
    negate: bool = False  # the result is negated: a minimum is the negative maximum of negatives
    # Groups to reduce over in addition where norms are stacked to become one: ranks with other tensors in place
    # of this one, as expert-parallel ranks have.
    further: Groups = ()

    def key(self) -> tuple[Any, ...]:
        """Return the key by which reductions share a collective."""
        names = tuple(group.group_name for group in self.groups)
        return self.combine.value, names, self.part.dtype, self.part.device, self.power

    def finish(self, total: torch.Tensor) -> torch.Tensor:
        """Compute the value from the combined parts, ()."""
        if self.negate:
            total = -total
        if self.divisor != 1:
            total = total / self.divisor
        return total.to(self.dtype)


def resolve(reductions: Sequence[Reduction]) -> list[torch.Tensor]:
    """Compute reductions; those over the same groups with the same operation share one collective.

    Every rank has to resolve the same reductions in the same order.
    """
    batches: dict[tuple[Any, ...], list[int]] = {}
    for place, reduction in enumerate(reductions):
        batches.setdefault(reduction.key(), []).append(place)
    values: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for places in batches.values():
            totals = _combine(torch.stack([reductions[place].part for place in places]), reductions[places[0]])
            values.update((place, reductions[place].finish(total)) for place, total in zip(places, totals, strict=True))
    return [values[place] for place in range(len(reductions))]


_AT_ONCE = 64
"""Parts are padded to a multiple of this, so that ranks whose numbers of parts differ a little can compare them."""
_NUMBER = "the number of sharded tensors that are reduced together (a gradient that is None is not among them)"


def _combine(parts: torch.Tensor, like: Reduction) -> torch.Tensor:
    if not like.groups:
        return parts
    number, is_max = len(parts), like.combine is Combine.MAX
    compared = Companion("reducing sharded tensors", {_NUMBER: str(number)}, like.groups)
    if like.combine is Combine.POWER:
        parts = parts**like.power
    if parts.is_cpu:  # elsewhere the comparison would be a wait for the device
        parts = torch.cat([F.pad(parts, (0, -number % _AT_ONCE)), compared.marks(parts, is_max)])
    with waits_for("norms, sums or extremes of sharded tensors are combined (as in torch.nn.utils.clip_grad_norm_)"):
        if is_max:
            parts = largest(parts, like.groups)
        else:
            for group in like.groups:
                dist.all_reduce(parts, op=dist.ReduceOp.SUM, group=group)
    if parts.is_cpu:
        compared.check(parts[number + -number % _AT_ONCE :], is_max)
        parts = parts[:number]
    if like.combine is Combine.POWER:
        parts = parts ** (1.0 / like.power)
    return parts


def largest(parts: torch.Tensor, groups: Groups) -> torch.Tensor:
    """All-reduce to the maximum of each; NaN wins, which a back end's own maximum does not promise."""
    if not groups or not parts.is_floating_point():
        for group in groups:
            dist.all_reduce(parts, op=dist.ReduceOp.MAX, group=group)
        return parts
    unknown = parts.isnan()
    both = torch.stack([parts.masked_fill(unknown, -math.inf), unknown.to(parts.dtype)])
    for group in groups:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0].masked_fill(both[1] > 0, math.nan)


class WholeScalar(torch.Tensor):
    """A scalar that every rank has whole, such as a norm of all gradients: a plain tensor with methods of DTensors.

    Any operation on it gives a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def full_tensor(self) -> torch.Tensor:
        """Return the scalar as a plain tensor, for code that expects a DTensor."""
        return self.clone()

    to_local = full_tensor

    def tolist(self) -> Any:
        """Return the number, or a nested list of it."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array of the number."""
        return self.full_tensor().numpy(force=force)

    def __format__(self, format_spec: str) -> str:
        return format(self.full_tensor(), format_spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.full_tensor())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.detach().clone())


class StackedNorms(torch.Tensor):
    """Norms of sharded tensors in one plain tensor; its own norm, as torch's clipping takes it, is a `WholeScalar`."""

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        is_total = func in (torch.linalg.vector_norm, torch.norm) and found.ndim == 0
        return found.as_subclass(WholeScalar) if is_total else found


class ReducedScalar(WholeScalar):
    """A reduced scalar, the same on every rank; any operation on it gives a plain tensor.

    Every rank puts the number into a loss of its own, so its gradient differs between ranks: `unite` makes one gradient
    for all of them before autograd goes on to their shards.
    """

    value: torch.Tensor  # the number
    reduction: Reduction  # the one that gave it
    # makes that gradient; None where all elements are on every rank, or no gradient is needed
    unite: Callable[[torch.Tensor], torch.Tensor] | None

    @classmethod
    def of(
        cls,
        value: torch.Tensor,
        reduction: Reduction,
        unite: Callable[[torch.Tensor], torch.Tensor] | None = None,
        ndim: int = 0,
    ) -> ReducedScalar:
        """Wrap the result of a reduction, with `ndim` dimensions of length 1."""
        made: ReducedScalar = torch.Tensor._make_wrapper_subclass(
            cls, (1,) * ndim, dtype=value.dtype, device=value.device
        )
        made.value, made.reduction, made.unite = value, reduction, unite
        return made

    def _is_used(self) -> None:
        """Attach the hook at first use; autograd offers no earlier point."""
        if self.unite is not None and self.requires_grad and torch.is_grad_enabled():
            self.register_hook(self.unite)  # type: ignore[no-untyped-call]  # torch's own, without hints
            self.unite = None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReducedScalar({self.value.item()})"

    # Of the number itself: torch.tensor([...]) asks for them where no operation of a subclass arrives any more.
    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return self.value.__index__()

    def __bool__(self) -> bool:
        return bool(self.value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            args[0]._is_used()
            return cls.of(args[0].value, args[0].reduction, ndim=args[0].ndim)
        numbers = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReducedScalar)]
        for number in numbers:
            number._is_used()
        if func is torch.ops.aten.stack.default and not any(number.ndim for number in numbers):
            return func(_values_to_stack(args[0]), *args[1:], **kwargs).as_subclass(StackedNorms)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def _values_to_stack(scalars: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of reduced scalars that are stacked, for one norm of all.

    Where other ranks have other tensors (`Reduction.further`), and maybe another number of them, the first value
    becomes the norm of all such tensors on all ranks, and the others become neutral.
    """
    values = [plain(each) for each in scalars]
    families: dict[tuple[Any, ...], list[tuple[int, Reduction]]] = {}
    for index, each in enumerate(scalars):
        if isinstance(each, ReducedScalar) and each.reduction.further:
            over = replace(each.reduction, groups=each.reduction.further, divisor=1)
            families.setdefault(over.key(), []).append((index, over))
    for members in families.values():
        (place, first), *_ = members
        own = torch.stack([values[index].to(first.part.dtype) for index, _ in members])
        for index, _ in members:
            values[index] = torch.full_like(values[index], math.inf if first.negate else 0.0)
        (values[place],) = resolve([replace(first, part=_together(own, first))])
    return values


def _together(values: torch.Tensor, like: Reduction) -> torch.Tensor:
    """Combine several local parts into one part of their common reduction."""
    if like.combine is Combine.SUM:
        return values.sum()
    if like.combine is Combine.MAX:
        return (-values if like.negate else values).max()
    return torch.linalg.vector_norm(values, like.power)


def plain(value: Any) -> Any:
    """Return a reduced scalar as a plain tensor; anything else unchanged."""
    return value.value.reshape(value.shape) if isinstance(value, ReducedScalar) else value


def unite_gradients(grad: torch.Tensor, groups: Groups, adds_up: bool) -> torch.Tensor:
    """All-reduce the gradient of a replicated value that each rank used for its own loss.

    It is the mean over ranks, as the gradient of the model is that of the mean of their losses. Where gradients are
    summed instead (`adds_up`), such a gradient may stand for its rank alone or for all, so they have to agree.
    """
    if not groups:
        return grad
    local = grad._local_tensor if isinstance(grad, DTensor) else plain(grad)
    exact = torch.promote_types(local.dtype, torch.float32 if local.ndim else torch.float64)
    with torch.no_grad():
        if not adds_up:
            total = local.to(exact, copy=True, memory_format=torch.contiguous_format)
            for group in groups:
                dist.all_reduce(total, group=group)
            return (total / math.prod(map(dist.get_world_size, groups))).to(local.dtype)
        bounds = torch.stack([local, -local])
        for group in groups:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        if bool((bounds[0] != -bounds[1]).any()):
            raise ShardOperationError(
                "ranks have different gradients for a number or a whole tensor that was made of sharded parameters "
                "outside of the model's forward, and calculate_per_token_loss=True adds gradients up, so nothing says "
                "whether each stands for one rank's loss or for that of all; use these parameters inside of a forward, "
                "or average (calculate_per_token_loss=False)"
            )
    return grad


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the communication dtype of a reduction over tensors of `dtype`."""
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def local_norms(locals_: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each local tensor; the neutral value (0 or infinity) for an empty one."""
    filled = [local for local in locals_ if local.numel()]
    found = iter(torch._foreach_norm(filled, order, dtype=dtype) if filled else ())
    neutral = math.inf if order < 0 else 0.0
    return [
        next(found) if local.numel() else torch.full((), neutral, dtype=dtype, device=local.device) for local in locals_
    ]


def norm_reduction(
    part: torch.Tensor, order: float, groups: Groups, dtype: torch.dtype, further: Groups = ()
) -> Reduction:
    """Return the unresolved reduction of a whole tensor's norm, from the norm of this rank's elements."""
    if math.isinf(order):
        negate = order < 0
        return Reduction(-part if negate else part, Combine.MAX, groups, dtype, negate=negate, further=further)
    combine = Combine.SUM if order == 0 else Combine.POWER
    return Reduction(part, combine, groups, dtype, power=order, further=further)
