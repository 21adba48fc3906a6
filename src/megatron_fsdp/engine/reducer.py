"""The two stages of a gradient reduction: over the inner ranks, then, at the sync, over the outer ones.

bucket (full)  -> inside ->  an inner rank's shard (or the full gradient)  -> across ->  what the optimizer sees

Where gradients of a hybrid mesh are added in the order of ranks, one all-to-all over all ranks gives each rank its
shard of every rank's gradient; the second stage all-gathers the sums where outer ranks are replicas.

A stage is a launch, which starts the collective, and a function that returns its result once that is done.

The dtype and factor of gradients that are sent are applied here: `encode` writes them into a bucket, `reduce_outer`
casts partly reduced ones, and a stage's result, times `factor`, is their sum. Their bytes are `bucket_bytes` and
`outer_buffer_bytes` of `GroupPlan`. A format that is no dtype (int8 with scales, say) needs a bucket of bytes, too,
whose views in `gradients.py` are not shaped as parameters, and an exchange instead of a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron_fsdp.comm.axis import Axis, add_up_into, put_scaled, sum_rows
from megatron_fsdp.comm.streams import Launch
from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.sharding.placement import Placement, held_region


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


class GradientReducer:
    """Reduces the gradients of one parameter group over the ranks."""

    def __init__(self, plan: GroupPlan) -> None:
        axes, placement = plan.axes, plan.placements.main_grad
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
