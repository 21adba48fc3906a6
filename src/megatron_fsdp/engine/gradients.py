"""The gradients of a parameter group: from autograd into a bucket, through the reduction, into the main gradient.

    autograd's gradient  -> copied, cast ->  bucket (full, grad_comm dtype)  -> reduced ->  main gradient  -> `.grad`
    where all reduction is deferred:  -> added ->  unreduced gradient (full, main_grads dtype)  -> cast ->  bucket
    where there is an outer axis:  bucket  -> reduced inside, added ->  partly reduced gradient (an inner rank's shard,
        main_grads dtype)  -> cast, reduced across, at the sync ->  main gradient

The reduction comes first in this file. At the end ranks agree on which parameters any of them used (`UsageAgreement`),
and after a reset on which gradients wait to be reduced.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.collectives import (
    Axis,
    ChainedWork,
    CommStream,
    Launch,
    Work,
    add_up_into,
    put_scaled,
    real_values,
    sum_rows,
)
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.memory import FlatBuffer, allocate, full_view, padding_ranges, shard_view
from megatron_fsdp.engine.plans import GroupPlan
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.placement import Placement, held_region, is_power_of_two


# ---- the two stages of a reduction -----------------------------------------------------------------------------------
#
# Over the inner ranks first, then, at the sync, over the outer ones:
#
#     bucket (full)  -> inside ->  an inner rank's shard (or the full gradient)  -> across ->  what the optimizer sees
#
# Where gradients of a hybrid mesh are added in the order of ranks, one all-to-all over all ranks gives each rank its
# shard of every rank's gradient; the second stage all-gathers the sums where outer ranks are replicas.
#
# A stage is a launch, which starts the collective, and a function that returns its result once that is done.
#
# The dtype and factor of gradients that are sent are applied here: `encode` writes them into a bucket, `reduce_outer`
# casts partly reduced ones, and a stage's result, times `factor`, is their sum. `direct_hook` encodes a gradient by one
# function of torch where that is the same (`direct_encoders`). Their bytes are `bucket_bytes` and `outer_buffer_bytes`
# of `GroupPlan`.
#
# A format that is no dtype (int8 with scales, say) needs more: an exchange in place of reduce-scatters and all-reduces;
# no `direct_encoders` and no main gradient as its own bucket (`reduces_in_place`); a bucket of bytes, which
# `Unit.slice_of` and `scratch_of` give a dtype, `GradientBuffers` cuts into views shaped as parameters, and checks of
# gradients read; and its bytes in `plan/replay.py`.
class Stage(NamedTuple):
    """One collective of a reduction."""

    launch: Launch  # starts it
    result: Callable[[], torch.Tensor]  # to be called once, when it is done
    # memory of its own that it reads and writes, to be kept until it is done
    memory: tuple[torch.Tensor, ...] = ()
    # A fused `result`: writes it, times a factor, into a tensor; None where fusing reads memory as often.
    result_into: Callable[[torch.Tensor, float], None] | None = None
    # each rank's gradient, in rank order, where `result` adds them up here; to be read once the collective is done
    by_rank: tuple[torch.Tensor, ...] = ()


def _by_rank(axis: Axis, received: torch.Tensor, launch: Launch, own: torch.Tensor | None = None) -> Stage:
    """Make a stage that receives a row of each rank, or of each but this one, which is `own`, and sums them here."""
    rows = [*received.view(axis.num_ranks - (own is not None), -1).unbind()]
    rows[axis.rank : axis.rank] = [] if own is None else [own]
    return Stage(launch, partial(sum_rows, rows), (), partial(add_up_into, rows), tuple(rows))


def _native(axis: Axis, full: torch.Tensor, numel: int, average: bool) -> Stage:
    """Make a stage of the back end's own reduce-scatter, in place: its result is this rank's shard of `full`."""
    # In place, so that no memory for the result is needed: back ends allow the output to be this shard of the input.
    reduced = full.narrow(0, axis.rank * numel, numel)
    return Stage(partial(axis.reduce_scatter, reduced, full, average), lambda: reduced)


class GradientReducer:
    """Reduces the gradients of one parameter group over the ranks."""

    def __init__(self, plan: GroupPlan) -> None:
        axes, placement = plan.axes, plan.placements.main_weight
        self._outer = axes[0] if len(axes) > 1 else None
        self._inner = plan.axis
        self._flat = plan.rank_mesh.flat  # both axes as one
        self._numel = plan.layout.numel
        # what each of the two stages leaves on this rank; the same where the gradient is not sharded over outer ranks
        self.first_region, self.main_region = plan.inner_region, plan.main_region
        if self._flat is not None:
            first = Placement.SHARD if Placement.SHARD in placement else Placement.REPLICATE
            self.first_region = held_region(self._numel, [first] * len(axes), axes)
        # the first stage is an all-to-all and a local sum, and needs scratch
        self.exchanges_inner = plan.exchanges_inner
        self.change_format(plan)

    def change_format(self, plan: GroupPlan) -> None:
        """Send gradients as a plan says, from the next backward on."""
        self.reduction = plan.reduction
        self._comm_dtype = plan.precision.grad_comm
        # A product in the gradient's own dtype is exact: the factor is a power of two, which that dtype can hold.
        factor, precision = self.reduction.pre_factor, plan.precision
        is_exact = is_power_of_two(factor) and factor >= torch.finfo(precision.compute).tiny
        self._scales_exactly = is_exact and not precision.widens_sent

    @property
    def reduces_outer(self) -> bool:
        """True if gradients are reduced over the outer ranks in a stage of their own."""
        if self._flat is not None:
            return self.first_region.numel < self.main_region.numel
        return self._outer is not None and self._outer.num_ranks > 1

    @property
    def scatters_inner(self) -> bool:
        """True if the first stage leaves each inner rank a shard."""
        return self.first_region.numel < self._numel

    @property
    def scatters_outer(self) -> bool:
        """True if the second stage leaves each outer rank a shard."""
        return self.main_region.numel < self.first_region.numel

    @property
    def factor(self) -> float:
        """Factor that the final result is multiplied by."""
        factor = self.reduction.post_factor
        if self.reduction.op == "avg":  # a local sum averages nothing
            factor /= self._inner.num_ranks if self.exchanges_inner else 1
            if self.scatters_outer and self._outer is not None and self._outer.exchanges_pairwise:
                factor /= self._outer.num_ranks
        return factor

    # ---- the gradient format ------------------------------------------------------------------------------------

    def encode(self, grad: torch.Tensor, out: torch.Tensor, adds: bool = False) -> None:
        """Write a gradient into its part of a bucket as it is sent, or add it to another one there."""
        factor = self.reduction.pre_factor
        if adds:
            out.add_(grad, alpha=factor)
        elif factor == 1.0:
            out.copy_(grad)
        else:
            put_scaled(grad, factor, out)

    def direct_encoders(self, targets: Sequence[torch.Tensor]) -> Sequence[Callable[[torch.Tensor], object] | None]:
        """Return functions of torch that encode a gradient into each target; None where `encode` has to."""
        factor = self.reduction.pre_factor
        if factor == 1.0:
            return [target.copy_ for target in targets]
        if self._scales_exactly:
            scale = torch.tensor(factor)  # much faster than a number of Python
            return [partial(torch.mul, scale, out=target) for target in targets]
        return [None] * len(targets)

    # ---- the collectives ----------------------------------------------------------------------------------------

    def reduce_inner(self, bucket: torch.Tensor, scratch: torch.Tensor | None) -> Stage:
        """Reduce a bucket (numel,) in the communication dtype over the inner ranks.

        `scratch` has `scratch_bytes` of `GroupPlan` where `exchanges_inner`, else it is None. The stage's result is
        (first_region.numel,), as are its rows.
        """
        axis, average = self._inner, self.reduction.op == "avg"
        if self._flat is not None:
            axis = self._flat.axis
            if self.scatters_inner:
                # Gradients stay one row per rank until all ranks' rows are here, so one exchange goes over both axes.
                rows = bucket.view(axis.num_ranks, -1)
                sent = torch.cat([rows[row] for row in self._flat.shares])  # in the order of the ranks that add them up
                received = torch.empty_like(sent) if scratch is None else scratch
                stage = _by_rank(axis, received, partial(axis.exchange, received, sent))
                return stage._replace(memory=(sent, received))
        if not self.scatters_inner:
            if self.reduction.one_by_one and axis.num_ranks > 1:
                # An all-reduce adds in an order of its own; rows are added in rank order here.
                received = bucket.new_empty(axis.num_ranks * bucket.numel())
                stage = _by_rank(axis, received, partial(axis.gather_rows, received, bucket))
                return stage._replace(memory=(received,))
            return Stage(partial(axis.all_reduce, bucket, average), lambda: bucket)
        if self.exchanges_inner:
            assert scratch is not None
            own = bucket.view(axis.num_ranks, -1)[axis.rank] if scratch.numel() < bucket.numel() else None
            return _by_rank(axis, scratch, partial(axis.exchange, scratch, bucket), own)
        return _native(axis, bucket, self.first_region.numel, average)

    def reduce_outer(self, sums: torch.Tensor, outer_buffer: Sequence[torch.Tensor]) -> Stage:
        """Reduce partly reduced gradients (first_region.numel,) over the outer ranks; they may be overwritten.

        The stage's result is (main_region.numel,). `outer_buffer`: memory of the same shape in the communication dtype
        to send from, and for an exchange to receive into; empty: it is allocated.
        """
        axis, average = self._outer, self.reduction.op == "avg"
        assert axis is not None
        if self._flat is not None:
            # The first stage has summed over all ranks; this only spreads the sums to outer ranks that hold the same
            # shard, and must not round them.
            whole = sums.new_empty(self.main_region.numel)
            return Stage(partial(axis.gather_rows, whole, sums), lambda: whole, (sums, whole))
        if not self.reduction.one_by_one:  # they are scaled already
            sums = outer_buffer[0].copy_(sums) if outer_buffer else sums.to(self._comm_dtype)
        if not self.scatters_outer:
            return Stage(partial(axis.all_reduce, sums, average), lambda: sums, (sums,))
        if axis.exchanges_pairwise:
            received = outer_buffer[1] if len(outer_buffer) > 1 else torch.empty_like(sums)
            stage = _by_rank(axis, received, partial(axis.exchange, received, sums))
            return stage._replace(memory=(sums, received))
        stage = _native(axis, sums, self.main_region.numel, average)
        return stage._replace(memory=(sums,))


# ---- where a gradient is shown ---------------------------------------------------------------------------------------

# The gradient of a sharded parameter is in `.grad`, or in `.decoupled_grad`, which torch does not use: torch requires
# that `.grad` has the dtype of its parameter, and a further attribute may have any.
GradAttribute = Literal["grad", "decoupled_grad"]
GRAD: GradAttribute = "grad"
DECOUPLED: GradAttribute = "decoupled_grad"
plain_attributes = torch._C.DisableTorchFunctionSubclass
"""A context in which access to attributes of DTensors is as fast as of plain tensors.

Torch looks for `__torch_function__` at each access to an attribute of a subclass, which takes several times as long as
the access. DTensors have none, so that nothing else changes.
"""


# Note [Who owns a main gradient]
#
# A main gradient follows torch's contract for `.grad`: where a parameter's `.grad` is None the next reduction
# overwrites, else it adds; so clearing gradients in any of the usual ways is right.
#
# `.grad` is read when a reduction is started, on the compute stream (`_take_back`). From there to `attach` the main
# gradient belongs to the communication stream, which writes it at a time of its own. What autograd itself computes for
# sharded parameters meanwhile must not be added to that memory: it stays in `.grad` (`detach_main_gradient`), and
# `attach` adds it. From `attach` to the next reduction it belongs to the user, who may change, replace or clear it.
#
# A replicated main gradient that has no memory when a backward begins, since `zero_grad` has freed it, serves as its
# own bucket (`fill_main`): gradients are copied there and all-reduced in place. With memory it does not: the user
# may hold it, or a reduction may be about to add to it.
def get_grad(param: torch.Tensor, attribute: GradAttribute) -> torch.Tensor | None:
    """Return the gradient of a parameter, or None."""
    found: torch.Tensor | None = getattr(param, attribute, None)
    return found


def get_grads(params: Sequence[torch.Tensor], attribute: GradAttribute) -> list[torch.Tensor | None]:
    """Return the gradients of several parameters."""
    with plain_attributes():
        return [getattr(param, attribute, None) for param in params]


def shown_grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of several parameters, from `.decoupled_grad` if it is set, else from `.grad`."""
    decoupled = get_grads(params, DECOUPLED)
    return [own if other is None else other for own, other in zip(get_grads(params, GRAD), decoupled, strict=True)]


def show_grad(copy: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set `.grad` and `.decoupled_grad` of a full copy of a main weight, to a gradient of any dtype."""
    copy.grad = None
    if grad is not None:
        copy.grad_dtype = grad.dtype
    copy.grad = grad
    copy.decoupled_grad = grad  # type: ignore[attr-defined]


# ---- the main gradient -----------------------------------------------------------------------------------------------

# The memory of a group's main gradient exists from the first reduction until all gradients are cleared.
#
# Between `zero_grad` and the next reduction there are no gradients, and that is where forward needs most memory. So the
# storage is freed then and allocated again later, beneath the same tensors, to which the optimizer may refer. Where
# the user has kept a gradient, as torch allows, it is left to them and a new one is made.
_REFERENCES_TO_VIEW = 3  # of ours, to a DTensor during the check: two lists, the argument
_REFERENCES_TO_SHARD = 2  # to its local tensor: the DTensor, the argument
_local_tensor = attrgetter("_local_tensor")
DescribeShard = Callable[[int, torch.Tensor], DTensor]


class MainGradient:
    """This rank's shard of the accumulated gradients of a group, and the DTensors over it."""

    def __init__(self, plan: GroupPlan) -> None:
        self._layout = plan.layout
        self.region = plan.main_region  # the elements of the whole gradient that are here
        self.dtype = plan.precision.main_grads  # of the accumulation
        self.device = plan.device
        self.is_offloaded = plan.offload.main_gradients > 0
        self._buffer: FlatBuffer | None = None
        # the DTensor over each tensor's local shard, where it was made already
        self.views: list[DTensor | None] = [None] * len(plan.layout.shapes)
        self._targets: list[torch.Tensor] = []  # views of whole tensors, where gradients are reduced in place

    @property
    def num_bytes(self) -> int:
        """Size in bytes while it is allocated."""
        return self.region.numel * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes now."""
        return 0 if self._buffer is None else self._buffer.local.untyped_storage().nbytes()

    @property
    def filled(self) -> torch.Tensor | None:
        """All elements, (region.numel,), if there is a buffer, with or without memory."""
        return None if self._buffer is None else self._buffer.local

    def allocate(self) -> FlatBuffer:
        """Return the buffer; allocate it, uninitialised, if it has no memory."""
        if self._buffer is None:
            memory = allocate(self.is_offloaded, self.region.numel, self.dtype, self.device)
            self._buffer = FlatBuffer(self._layout, self.region, memory)
        elif self.num_bytes and not self.held_bytes:
            self._buffer.local.untyped_storage().resize_(self.num_bytes)
        return self._buffer

    @property
    def local(self) -> torch.Tensor:
        """All elements, (region.numel,); allocated as by `allocate`."""
        return self.allocate().local

    def local_shard(self, index: int) -> torch.Tensor:
        """Return the local shard of tensor `index`, a view; content as for `local`."""
        return self.allocate().local_shard(index)

    def targets(self) -> list[torch.Tensor]:
        """Return each tensor's view of the buffer, which is whole here; made once."""
        whole = self.local
        if not self._targets:
            self._targets = [full_view(self._layout, whole, index) for index in range(len(self.views))]
        return self._targets

    def view(self, index: int, describe: Callable[[int, torch.Tensor], DTensor]) -> DTensor:
        """Return the local shard of tensor `index` as a DTensor, made once."""
        found = self.views[index]
        if found is None:
            found = self.views[index] = describe(index, self.local_shard(index))
        return found

    def take_back(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Copy gradients, by index, that were replaced or handed out in another dtype back into the main gradient.

        Elements that still equal the rounded ones keep what was rounded off. Version counters would not tell: torch's
        operations on lists of DTensors, such as those of its gradient clipping, do not count.
        """
        for dtype in {grad.dtype for grad in grads.values()}:
            rounded = self.local.to(dtype)
            found = rounded.clone()
            chosen = {index: local_tensor(grad) for index, grad in grads.items() if grad.dtype == dtype}
            shards = [shard_view(self._layout, self.region, found, index) for index in chosen]
            torch._foreach_copy_(shards, list(chosen.values()))
            self.local.copy_(torch.where(rounded == found, self.local, found.to(self.dtype)))

    def free(self) -> None:
        """Free the memory. Call it when no element counts and nothing that writes here is in flight."""
        if not self.held_bytes:
            return
        assert self._buffer is not None
        if self._is_ours_alone(self._buffer):
            if not self.is_offloaded:  # else it is pinned once
                self._buffer.local.untyped_storage().resize_(0)
        else:
            self._buffer, self._targets = None, []
            self.views = [None] * len(self.views)

    def _is_ours_alone(self, buffer: FlatBuffer) -> bool:
        """Return True if the memory and the DTensors over it have no references but our own."""
        storage = buffer.local.untyped_storage()
        made = [view for view in self.views if view is not None]
        ours = 2 + len(self._targets) + len(made)  # `local` and `storage`
        if torch._C._storage_Use_Count(storage._cdata) != ours:
            return False
        # References from C++, as of an autograd graph; then those of the program, to the DTensor or its local tensor.
        return (
            max(map(torch.Tensor._use_count, made), default=1) == 1  # type: ignore[attr-defined]
            and max(map(sys.getrefcount, made), default=0) <= _REFERENCES_TO_VIEW
            and max(map(sys.getrefcount, map(_local_tensor, made)), default=0) <= _REFERENCES_TO_SHARD
        )


# ---- from autograd to the main gradient ------------------------------------------------------------------------------


# The hook that copies a gradient from autograd into its bucket runs for every parameter in every backward. So it does
# the common case, a plain gradient that is the first for its target in the bucket, without calling anything of ours:
# that halves the host time of a gradient.
Take = Callable[[torch.Tensor], None]
"""Called with a full parameter when autograd has accumulated its gradient."""
_STRIDED = torch.strided


def direct_hook(gradients: GradientBuffers, index: int, take: Take, count: Callable[[], object] | None = None) -> Take:
    """Make the hook of a full parameter: it copies a plain first gradient, and calls `take` for every other one.

    `index` is that of the parameter in its group. `count` is called after each copy.
    """
    direct, filled, arrived = gradients.direct, gradients.filled, gradients.arrived

    def receive(param: torch.Tensor) -> None:
        put, grad = direct[index], param.grad
        if put is None or grad is None or grad.layout is not _STRIDED or grad.requires_grad:
            take(param)
            return
        direct[index] = param.grad = None
        put(grad)
        filled[index] = arrived[index] = True
        if count is not None:
            count()

    return receive


def _zero(tensors: list[torch.Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


def _clear(*flags: bytearray) -> None:
    for each in flags:
        each[:] = bytes(len(each))


def _are_any(grads: Sequence[torch.Tensor | None]) -> bool:
    """Return True if any gradient is not None."""
    return any(map(partial(operator.is_not, None), grads))


Inspect = Callable[[int, torch.Tensor], None]


class GradientBuffers:
    """Main gradient, bucket and unreduced gradients of one trainable parameter group."""

    def __init__(self, plan: GroupPlan) -> None:
        self._name = plan.spec.parameters[0].name
        self.layout = plan.layout
        self.precision = plan.precision
        self.reducer = GradientReducer(plan)
        self.reduces_in_place = plan.reduces_in_place
        self.grad_attribute = GRAD  # where the sharded parameters show their gradient
        self.inspect: Inspect | None = None  # called with tensor i of each bucket before it is reduced
        # called with this rank's shard of each reduced gradient, before it is scaled and added; may change it in place
        self.after_reduction: Callable[[torch.Tensor], None] | None = None
        self.main = MainGradient(plan)
        # One item for each parameter. Hooks refer to these lists, so they stay the same objects. Flags are bytes, so
        # that one operation reads or sets those of all parameters.
        number = len(plan.layout.shapes)
        # where gradients of this backward go, views in the parameters' shapes; None while no memory is filled
        self._targets: list[torch.Tensor | None] = [None] * number
        # writes the next gradient there, if it is plain; None if it has to be added to another, or checked
        self.direct: list[Callable[[torch.Tensor], object] | None] = [None] * number
        self.filled = bytearray(number)  # a gradient of this backward is there
        self.arrived = bytearray(number)  # a gradient has come since gradients were last attached
        self.counts = bytearray(number)  # the main gradient holds a contribution that counts
        self.attached = bytearray(number)  # it was set as `.grad`, and not taken back since
        self._was_set = bytearray(number)  # `.grad` was set when the next gradient came, and will be set again
        self._padding = padding_ranges(plan.layout)
        # each bucket that was filled, and the views of its tensors, by its id; the memory beneath comes and goes
        self.bucket_views: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._filling: torch.Tensor | None = None
        self._unreduced_gradient: torch.Tensor | None = None
        self._partly_reduced: torch.Tensor | None = None
        self.renewed = False  # a reduction has ended since the gradients were last attached; the same on every rank

    # ---- filling ------------------------------------------------------------------------------------------------

    @property
    def is_filling(self) -> bool:
        """True if gradients of this backward are filling a bucket or the unreduced gradient."""
        return self._filling is not None

    @property
    def has_unreduced_gradient(self) -> bool:
        """True if gradients of earlier backwards wait for their whole reduction."""
        return self._unreduced_gradient is not None

    @property
    def has_partly_reduced(self) -> bool:
        """True if partly reduced gradients wait for their reduction over the outer ranks."""
        return self._partly_reduced is not None

    @property
    def is_busy(self) -> bool:
        """True if gradients are on their way to the main gradient."""
        return self.is_filling or self.has_unreduced_gradient or self.has_partly_reduced

    # A bucket is empty, filling (from `begin` on), reducing (from `reduce` on), and empty again when its work is done.

    def begin(self, bucket: torch.Tensor | None) -> None:
        """Begin to fill a bucket (numel,) in the communication dtype; None: the unreduced gradient."""
        if self.is_filling:
            raise ScheduleError(f"the bucket of {self._name} would be filled while it is filling")
        if bucket is not None:
            # Padding is reduced with the rest, and borrowed memory may hold NaN there.
            _zero([bucket[start:stop] for start, stop in self._padding])
            self._filling, targets = bucket, self._views_in(bucket)
        else:
            if self._unreduced_gradient is None:
                self._unreduced_gradient = self._zeros(self.layout.numel)
            self._filling = self._unreduced_gradient
            targets = self._make_views(self._unreduced_gradient)
        self._targets[:] = targets
        self.direct[:] = [None] * len(targets) if bucket is None else self.reducer.direct_encoders(targets)
        _clear(self.filled)

    def encode_nothing_directly(self) -> None:
        """Have hooks pass each gradient of this backward on, so that checks and observers see it."""
        self.direct[:] = [None] * len(self.direct)

    def fill_main(self, params: Sequence[nn.Parameter]) -> bool:
        """Begin to fill the main gradient, to be reduced there; return False if it cannot be its own bucket now.

        It has no memory, so what it held was cleared; but autograd may have set a gradient of a sharded parameter.
        """
        if not self.reduces_in_place or self.main.held_bytes:
            return False
        if _are_any(get_grads(params, self.grad_attribute)):
            return False
        _clear(self.counts, self.attached)
        self.begin(self.main.local)
        return True

    @property
    def fills_main(self) -> bool:
        """True if gradients of this backward are copied into the main gradient."""
        return self._filling is not None and self._filling is self.main.filled

    def _views_in(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of each tensor in a bucket (numel,), made once."""
        if bucket is self.main.filled:
            return self.main.targets()
        if id(bucket) not in self.bucket_views:
            self.bucket_views[id(bucket)] = bucket, self._make_views(bucket)
        return self.bucket_views[id(bucket)][1]

    def _make_views(self, full: torch.Tensor) -> list[torch.Tensor]:
        return [full_view(self.layout, full, index) for index in range(len(self.counts))]

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Copy the gradient of parameter `index` (its own shape, any dtype) into its target, with the cast."""
        target = self._targets[index]
        assert target is not None
        if self._filling is self._unreduced_gradient:
            target.add_(grad)  # in the dtype of accumulation; encoded when it is reduced
        else:
            self.reducer.encode(grad, target, adds=bool(self.filled[index]))
        self.filled[index] = self.arrived[index] = True
        self.direct[index] = None

    def stop_filling(self) -> None:
        """End the filling of a bucket or of the unreduced gradient."""
        self._filling = None
        self._targets[:] = [None] * len(self._targets)
        self.encode_nothing_directly()

    # ---- reducing -----------------------------------------------------------------------------------------------

    def reduce(
        self,
        stream: CommStream,
        bucket: torch.Tensor,
        scratch: torch.Tensor | None,
        params: Sequence[nn.Parameter],
        copy_stream: CommStream,
    ) -> tuple[Work, tuple[torch.Tensor, ...]]:
        """Start to reduce the new gradients over the inner ranks; missing gradients count as zero.

        `bucket` is (numel,) in the communication dtype: the one given to `begin`, or one to cast unreduced gradients
        into; `scratch` is as in `reduce_inner`. The `.grad` of the sharded `params` decides between overwriting and
        adding. An offloaded main gradient is copied on `copy_stream`. Returns the work, and memory to be kept until
        it was waited for.
        """
        if not self.is_filling and not self.has_unreduced_gradient:
            raise ScheduleError(f"the bucket of {self._name} would be reduced while it is empty")
        if self._unreduced_gradient is not None:
            self.reducer.encode(self._unreduced_gradient, bucket)
            self._unreduced_gradient = None
        else:
            filled = zip(self._targets, self.filled, strict=True)
            _zero([target for target, is_filled in filled if target is not None and not is_filled])
        self.stop_filling()
        if self.inspect is not None:
            for index, view in enumerate(self._views_in(bucket)):
                self.inspect(index, view)
        stage = self.reducer.reduce_inner(bucket, scratch)
        if not self.reducer.reduces_outer:
            # Now, and not when the result is there: `.grad` is read on the compute stream, before the caller goes on.
            self._take_back(params)
            return self._submit(stream, stage, copy_stream), stage.memory
        if self._partly_reduced is None:
            self._partly_reduced = self._zeros(self.reducer.first_region.numel)
            if self.reducer.reduction.one_by_one:
                self._move_into(self._partly_reduced, params)
        partly_reduced = self._partly_reduced
        # The gradient of every rank is added on its own, in rank order, so that the bits do not depend on the mesh.
        rows = stage.by_rank if self.reducer.reduction.one_by_one else None

        def add_to_partly_reduced() -> None:
            for row in rows or (stage.result(),):
                partly_reduced.add_(row)

        return stream.submit(stage.launch, add_to_partly_reduced), stage.memory

    def _submit(self, stream: CommStream, stage: Stage, copy_stream: CommStream) -> Work:
        """Start a stage whose result is added to the main gradient, or overwrites it."""
        if self.main.is_offloaded:
            return ChainedWork(stream, stage.launch, copy_stream, lambda: self._accumulate(stage))
        return stream.submit(stage.launch, lambda: self._accumulate(stage))

    def _move_into(self, partly_reduced: torch.Tensor, params: Sequence[nn.Parameter]) -> None:
        """Move the main gradient into a partly reduced gradient, to which each rank's gradient is added."""
        self._take_back(params)
        if not any(self.counts):
            partly_reduced.fill_(-0.0)  # which leaves every number that is added to it as it is, -0.0 too
        else:
            self._zero_what_does_not_count(self.main.local)
            partly_reduced.copy_(self.main.local[self.reducer.first_region.within(self.main.region)])
        _clear(self.counts)

    def _zero_what_does_not_count(self, sums: torch.Tensor) -> None:
        others = [index for index, counts in enumerate(self.counts) if not counts]
        _zero([shard_view(self.layout, self.main.region, sums, index) for index in others])

    def reduce_outer(
        self,
        stream: CommStream,
        params: Sequence[nn.Parameter],
        copy_stream: CommStream,
        outer_buffer: Sequence[torch.Tensor],
    ) -> tuple[Work, tuple[torch.Tensor, ...]]:
        """Start to reduce partly reduced gradients over the outer ranks; return a work and memory, as `reduce`.

        `outer_buffer`: what to send from, in the communication dtype, and what to receive into, where they are taken.
        """
        partly_reduced, self._partly_reduced = self._partly_reduced, None
        assert partly_reduced is not None
        self._take_back(params)
        stage = self.reducer.reduce_outer(partly_reduced, outer_buffer)
        return self._submit(stream, stage, copy_stream), stage.memory

    def _accumulate(self, stage: Stage) -> None:
        """Add a reduced gradient, shaped as the local main gradient, to it; or overwrite it."""
        if self.after_reduction is not None:
            reduced = stage.result()
            self.after_reduction(reduced)
            stage = Stage(stage.launch, lambda: reduced)
        main, factor = self.main.local, self.reducer.factor
        is_offloaded = self.main.is_offloaded
        # An offloaded main gradient is added to on the device, and copied back. See Note [Offloaded state] in
        # `memory.py`.
        sums = torch.empty_like(main, device=self.main.device, pin_memory=False) if is_offloaded else main
        rows = stage.by_rank if self.reducer.reduction.one_by_one else ()
        if any(self.counts):
            if is_offloaded:
                sums.copy_(main, non_blocking=True)
            self._zero_what_does_not_count(sums)
            rows = rows or (stage.result(),)
        elif rows:
            put_scaled(rows[0], factor, sums)
            rows = rows[1:]
        elif stage.result_into is not None:
            stage.result_into(sums, factor)
        elif (result := stage.result()) is not sums or factor != 1.0:  # else it was reduced in place
            put_scaled(result, factor, sums)
        for row in rows:
            sums.add_(row, alpha=factor)
        if is_offloaded:
            main.copy_(sums, non_blocking=True)
        self.counts[:] = b"\1" * len(self.counts)
        self.renewed = True

    def _take_back(self, params: Sequence[nn.Parameter]) -> None:
        """Read attached gradients, which the user may have cleared, changed or replaced, back into the main gradient.

        The current value of a copy or replacement counts. It is read on the compute stream, whose memory it is: a
        stream might read it after it was freed. Our own views stay in `.grad`; others leave None.
        """
        if self.reduces_in_place or self.main.device.type == "cuda":
            self.main.allocate()  # on the stream that will free it; on a CPU when the sum is there
        # See Note [Who owns a main gradient].
        changed: dict[int, torch.Tensor] = {}
        for index, grad in enumerate(get_grads(params, self.grad_attribute)):
            if grad is None:
                if self.attached[index]:
                    self.counts[index] = False
                continue
            self._was_set[index] = True
            if self.attached[index] and grad is not self.main.views[index]:
                changed[index], self.counts[index] = grad, True
                setattr(params[index], self.grad_attribute, None)
        _clear(self.attached)
        self.main.take_back(changed)

    def detach_main_gradient(self, index: int, param: torch.Tensor) -> None:
        """Detach `.grad` of a sharded parameter that a stream writes, since autograd is about to add to it."""
        # See Note [Who owns a main gradient].
        if not self.attached[index] and param.grad is not None and param.grad is self.main.views[index]:
            param.grad = None  # it was set, so `attach` shows it again, with what comes now

    # ---- showing ------------------------------------------------------------------------------------------------

    def attach(self, params: Sequence[nn.Parameter], used: Sequence[bool], describe: DescribeShard) -> None:
        """Set `.grad` of the sharded parameters to the main gradient, whose local shards `describe` wraps as DTensors.

        The parameters' own gradients are added to it first. A parameter that no rank has `used`, and that had no
        gradient, keeps None.
        """
        found = get_grads(params, self.grad_attribute)
        changed: dict[int, torch.Tensor] = {}
        own: dict[int, torch.Tensor] = {}
        for index, grad in enumerate(found):
            if grad is None:
                if self.attached[index]:
                    self.counts[index] = False  # cleared, and nothing was reduced since
            elif grad is not self.main.views[index]:
                if self.attached[index]:
                    changed[index], self.counts[index] = grad, True
                else:
                    own[index] = grad
        self.main.take_back(changed)
        self._add(own)
        if self.grad_attribute != GRAD:  # what autograd has set on sharded parameters themselves
            plain = {index: param.grad for index, param in enumerate(params) if param.grad is not None}
            self._add(plain)
            for index in plain:
                params[index].grad = None
        cast = None if self.shown_dtype == self.precision.main_grads else self.main.local.to(self.precision.main_params)
        renewed: list[tuple[nn.Parameter, torch.Tensor]] = []
        for index, shown in enumerate(found):
            # A parameter that no rank used has a sum of zeros, and keeps None: weight decay and momentum leave it
            # alone.
            if not (used[index] or self._was_set[index] or shown is not None):
                self.counts[index] = False
            if not self.counts[index]:
                continue
            if cast is None:
                grad = self.main.views[index]
                grad = self.main.view(index, describe) if grad is None else grad
            else:
                grad = describe(index, shard_view(self.layout, self.main.region, cast, index))
            if grad is not shown:
                renewed.append((params[index], grad))
        with plain_attributes():
            for param, grad in renewed:
                setattr(param, self.grad_attribute, grad)
        self.attached[:] = self.counts
        _clear(self.arrived, self._was_set)
        self.renewed = False

    @property
    def shown_dtype(self) -> torch.dtype:
        """Dtype of the gradients that sharded parameters show: their own, or that of accumulation where decoupled."""
        return self.precision.main_params if self.grad_attribute == GRAD else self.precision.main_grads

    def _add(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Add gradients, by index, of the sharded parameters themselves, which are final on this rank."""
        for is_sum, put in ((True, torch._foreach_add_), (False, torch._foreach_copy_)):
            chosen = {at: local_tensor(grad) for at, grad in grads.items() if self.counts[at] == is_sum}
            if chosen:
                put(list(map(self.main.local_shard, chosen)), list(chosen.values()))
        for index in grads:
            self.counts[index] = True

    def scale(self, factor: float, params: Sequence[nn.Parameter]) -> None:
        """Multiply all accumulated gradients, attached or not, reduced or not."""
        if self.main.held_bytes:
            self.main.local.mul_(factor)
        for view, param in zip(self.main.views, params, strict=True):
            grad = get_grad(param, self.grad_attribute)
            if grad is not None and grad is not view:
                grad.mul_(factor)  # a copy in another dtype, or set by the user
            if self.grad_attribute != GRAD and param.grad is not None:
                param.grad.mul_(factor)  # set by autograd, and not added yet
        for waiting in (self._unreduced_gradient, self._partly_reduced):
            if waiting is not None:
                waiting.mul_(factor)

    @property
    def has_unsynced(self) -> bool:
        """True if any gradient was accumulated that is not attached as `.grad`."""
        waits = self.has_unreduced_gradient or self.has_partly_reduced
        return waits or not all(self.attached)

    def drop_unsynced(self, index: int) -> None:
        """Drop the accumulated gradient of one parameter that is not attached as its `.grad` yet."""
        if not self.attached[index]:
            self.counts[index] = self._was_set[index] = self.arrived[index] = False
        if self._unreduced_gradient is not None:
            full_view(self.layout, self._unreduced_gradient, index).zero_()
        if self._partly_reduced is not None:
            shard_view(self.layout, self.reducer.first_region, self._partly_reduced, index).zero_()

    def free_if_cleared(self, params: Sequence[nn.Parameter]) -> None:
        """Free the main gradient's memory if no parameter has a gradient.

        Not to be called while reductions are in flight.
        """
        if not self.main.held_bytes or self.fills_main:  # the second after a backward that failed
            return
        waits = any(map(operator.gt, self.counts, self.attached))  # something counts that is not attached
        if not waits and not _are_any(get_grads(params, self.grad_attribute)):
            self.main.free()

    def clear(self) -> None:
        """Drop all accumulated and all deferred gradients."""
        _clear(self.counts, self.attached, self._was_set, self.arrived)
        self._unreduced_gradient = self._partly_reduced = None

    def _zeros(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=self.precision.main_grads, device=self.main.device)


# ---- what ranks agree on ---------------------------------------------------------------------------------------------


# A parameter that no rank used keeps `.grad` None, as on one process, so that weight decay and momentum leave it
# alone. A rank cannot know that by itself, so the ranks agree at the first sync. Where every parameter was
# used, which is the rule, they never ask again (and a parameter that goes unused later has a zero gradient); else they
# agree at every sync. `find_unused_parameters=True`, and units that ranks may skip, make them ask every time: one small
# collective, and one wait for it.
class UsageAgreement:
    """Agreement over a rank mesh on the parameters that got a gradient on any rank.

    Foreign groups hold other parameters instead of these, as expert-parallel ranks do: if any of them shows a
    gradient, all do, so that all join a norm that spans them. They ask at every sync.
    `always`: they ask at every sync in any case. `join`: the remedy for a rank without data.
    """

    def __init__(self, rank_mesh: RankMesh, device: torch.device, always: bool, join: str) -> None:
        self._join = join
        self._group = rank_mesh.group
        self._foreign_groups = rank_mesh.foreign_groups
        self._device = device
        self.never_knows = always or bool(rank_mesh.foreign_groups)  # ranks ask at every sync
        self.is_alone = rank_mesh.group is None and not rank_mesh.foreign_groups  # there is no other rank to ask
        self.is_known = False  # every parameter was used once, so that nobody asks any more

    @property
    def asks(self) -> bool:
        """True if the next sync asks the other ranks, and waits for their answer."""
        return self._group is not None and not self.is_known

    def forget(self) -> None:
        """Ask at the next sync, since other parameters take gradients now."""
        self.is_known = False

    @real_values()
    def agree(self, used_here: Sequence[bool], operations_digest: int) -> list[bool]:
        """All-reduce flags of used parameters, in the order that all ranks share; return those that any rank used.

        `operations_digest`, below 2 ** 62, is that of the gathers and reductions so far. Ranks that gathered or reduced
        different units all raise a ScheduleError.
        """
        if self.is_known:
            return [True] * len(used_here)
        # See Note [What ranks agree on, and when] in `engine.py`.
        if self._group is None:  # nothing to send, so no device sync
            return self._show_one(list(used_here))
        # The largest digest and the least one: where they are equal all are.
        flags = torch.tensor(
            [*used_here, operations_digest, -operations_digest], dtype=torch.int64, device=self._device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        *found, highest, minus_lowest = flags.tolist()
        if highest != -minus_lowest:
            raise ScheduleError(
                "ranks gathered or reduced different units, so weights or gradients of different units were mixed; "
                f"{self._join}; MFSDP_VERIFY_RANKS=1 "
                "names the first difference (mfsdp docs debugging)"
            )
        used = [bool(flag) for flag in found]
        self.is_known = all(used) and not self.never_knows
        return self._show_one(used)

    def _show_one(self, used: list[bool]) -> list[bool]:
        """Mark the first parameter as used, with a zero gradient, if only other experts got gradients."""
        if not self._foreign_groups:
            return used
        anything = torch.tensor([any(used)], dtype=torch.int32, device=self._device)
        for group in self._foreign_groups:
            dist.all_reduce(anything, op=dist.ReduceOp.MAX, group=group)
        return used if any(used) or not bool(anything.item()) else [True, *used[1:]]


def match_unreduced(gradients: Sequence[GradientBuffers], rank_mesh: RankMesh, device: torch.device) -> None:
    """Allocate zero gradients where peers have unreduced ones, so that all reduce the same later. Collective."""
    if rank_mesh.group is None or not gradients:
        return
    flags = torch.tensor(
        [[each.has_unreduced_gradient, each.has_partly_reduced] for each in gradients], dtype=torch.int32, device=device
    )
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=rank_mesh.group)
    for each, (deferred, inner) in zip(gradients, flags.tolist(), strict=True):
        if deferred and each._unreduced_gradient is None:
            each._unreduced_gradient = each._zeros(each.layout.numel)
        if inner and each._partly_reduced is None:
            each._partly_reduced = each._zeros(each.reducer.first_region.numel)
