"""The placement of each of a model's buffers on every mesh axis, by sharding strategy, and the factors of a reduction.

Nothing else scales a gradient, but for `GradientReducer.factor`, which makes up for an average that a local sum did not
take, and `unite_gradients`, which averages what a loss outside of forward gives. The user does by `scale_gradients`,
and `automodel/` for experts under FSDP2 and by token counts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

import torch

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError


class Placement(enum.Enum):
    """The placement of a buffer on one mesh axis."""

    REPLICATE = "replicate"  # every rank holds the same complete values
    PARTIAL = "partial"  # every rank holds a full-size summand; the sum has not been taken
    SHARD = "shard"  # every rank holds one of the equal contiguous shards


@dataclass(frozen=True)
class Placements:
    """The placements of a parameter group's buffers, one per mesh axis, outermost axis first."""

    compute_weight: tuple[Placement, ...]  # the weights that forward and backward use, between uses
    accumulated_grad: tuple[Placement, ...]  # before the gradient sync
    main_grad: tuple[Placement, ...]  # after the gradient sync; as `main_weight`, by which its buffer is cut
    main_weight: tuple[Placement, ...]  # what the optimizer updates, and its state

    @property
    def accumulates_shards(self) -> bool:
        """True if gradients are reduced over the sharding axis by every backward."""
        return self.accumulated_grad[-1] is Placement.SHARD

    def of_frozen(self) -> Placements:
        """Return the placements of frozen parameters: nothing is optimised, so main weights lie as compute weights."""
        if self.compute_weight[-1] is not Placement.SHARD:
            return self.of_scalars()
        return Placements(self.compute_weight, self.accumulated_grad, self.compute_weight, self.compute_weight)

    def of_scalars(self) -> Placements:
        """Return the placements of parameters without dimensions, of which every rank holds all."""
        whole, partial = (Placement.REPLICATE,) * len(self.main_weight), (Placement.PARTIAL,) * len(self.main_weight)
        return Placements(whole, partial, whole, whole)


_R, _P, _S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD


def placements_for(inner: ShardingStrategy, outer: ShardingStrategy | None = None) -> Placements:
    """Return the placement of each buffer under a strategy on the sharding axis (``dp_shard_dim``).

    `outer` is that on the hybrid axis (``dp_outer_dim``): ``no_shard`` (HSDP) or ``optim`` (HFSDP); None: no such axis.
    """
    weight = _S if inner.shards_compute_weights else _R
    accumulated = _S if inner.shards_gradients else _P
    main = _S if inner.shards_main_weights else _R
    if outer is None:
        return Placements((weight,), (accumulated,), (main,), (main,))
    if outer not in (ShardingStrategy.no_shard, ShardingStrategy.optim):
        raise ConfigurationError(
            f'outer_dp_sharding_strategy="{outer.name}" is not possible on the outer axis; '
            'give 0 or "no_shard", or 1 or "optim".'
        )
    if outer == ShardingStrategy.optim and inner == ShardingStrategy.no_shard:
        raise ConfigurationError(
            'outer_dp_sharding_strategy="optim" shards further what zero_dp_strategy shards, which is nothing under '
            '"no_shard"; use "optim", "optim_grads" or "optim_grads_params" inside, or '
            '"no_shard" outside.'
        )
    # Over the outer axis compute weights are replicated, and gradients partial until the sync.
    after_sync = _S if outer == ShardingStrategy.optim else _R
    return Placements((_R, weight), (_P, accumulated), (after_sync, main), (after_sync, main))


def strategies_of(placements: Placements) -> tuple[ShardingStrategy | None, ShardingStrategy | None]:
    """Return the strategies on the sharding and on the hybrid axis that place buffers so; None where there is none."""
    buffers = (placements.compute_weight, placements.accumulated_grad, placements.main_grad, placements.main_weight)
    on_inner = Placements(*(buffer[-1:] for buffer in buffers))
    inner = next((strategy for strategy in ShardingStrategy if placements_for(strategy) == on_inner), None)
    if len(placements.main_weight) == 1:
        return inner, None
    return inner, ShardingStrategy.optim if placements.main_weight[0] is _S else ShardingStrategy.no_shard


# A buffer that is sharded over several axes is cut over the innermost first, and each part then over the next one
# out, so that what one inner rank holds for all outer ranks is contiguous: with N inner and M outer ranks, the owner
# of shard number s of N * M is inner rank s // M, outer rank s % M.


class AxisPosition(Protocol):
    """The position of a rank on one axis."""

    @property
    def rank(self) -> int:
        """Position, 0 <= rank < num_ranks."""

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""


@dataclass(frozen=True)
class Region:
    """Elements [start, stop) of a flat buffer."""

    start: int
    stop: int

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def within(self, outer: Region) -> slice:
        """Return the slice of these elements in the memory of an enclosing region."""
        return slice(self.start - outer.start, self.stop - outer.start)


def held_region(numel: int, placements: Sequence[Placement], axes: Sequence[AxisPosition]) -> Region:
    """Return the elements of a flat buffer that a rank holds."""
    start, length = 0, numel
    for placement, axis in zip(reversed(placements), reversed(axes), strict=True):
        if placement is Placement.SHARD:
            length //= axis.num_ranks
            start += axis.rank * length
    return Region(start, start + length)


def shard_count(placements: Sequence[Placement], axes: Sequence[AxisPosition]) -> int:
    """Return the number of shards of a buffer over all axes."""
    count = 1
    for placement, axis in zip(placements, axes, strict=True):
        count *= axis.num_ranks if placement is Placement.SHARD else 1
    return count


# ---- from partial gradients to their sum or mean ---------------------------------------------------------------------


@dataclass(frozen=True)
class GradientReduction:
    """The reduction of per-rank gradients to the gradient that the optimizer sees.

    The value is ``post_factor * op over the group of (pre_factor * gradient of the rank)``.
    """

    op: Literal["sum", "avg"]  # of each collective of the reduction
    pre_factor: float  # multiplies each rank's whole gradient, once, before the first collective
    post_factor: float  # multiplies the reduced result (or shard), once, after the last collective
    group_size: int = field(default=1, compare=False)  # ranks that an average is taken over
    scales_first: bool = field(default=False, compare=False)  # sums of every dtype are scaled before they travel
    # Whether the gradients of the ranks are added to the accumulated gradient one after another, as one process
    # adds those of its microbatches, and not first to each other.
    one_by_one: bool = False

    @property
    def adds_up(self) -> bool:
        """True if gradients are summed over ranks without a factor, as `calculate_per_token_loss` asks for."""
        return self.op == "sum" and self.pre_factor * self.post_factor == 1.0

    def for_dtype(self, comm_dtype: torch.dtype) -> GradientReduction:
        """Return the same reduction in another communication dtype; float16 gradients are scaled before the sum."""
        factor = self.pre_factor * self.post_factor
        if comm_dtype == torch.float16:  # an averaging collective may add first and divide afterwards
            factor /= self.group_size if self.op == "avg" else 1
            return replace(self, op="sum", pre_factor=factor, post_factor=1.0, group_size=1)
        if self.op == "avg":
            return self
        factors = (factor, 1.0) if self.scales_first else (1.0, factor)
        return replace(self, op="sum", pre_factor=factors[0], post_factor=factors[1], group_size=1)


def gradient_reduction(
    dp_size: float,
    group_size: int,
    *,
    average_in_collective: bool,
    calculate_per_token_loss: bool,
    comm_dtype: torch.dtype,
    scales_first: bool = False,
) -> GradientReduction:
    """Return the reduce operation and the factors of a gradient reduction.

    Write ``g_r`` for the gradient of rank r, D for ``dp_size`` and G for ``group_size``. The wanted value is:

    * mean (default): ``sum_r(g_r) / D``, over all data-parallel ranks: inner times outer, and times context-parallel
      ranks where they are flattened into those axes. A hybrid reduction runs one collective per axis; G is the product
      of their sizes, ``op`` holds for each of them and the factors are applied once.
    * ``calculate_per_token_loss``: ``sum_r(g_r)``, no factor at all; the loss was divided by the global token count.
    * expert parameters: the sum runs over the G ranks that hold copies of the expert, but the factor stays that of the
      dense parameters, ``sum_r(g_r) / D``: the gradient of an expert's rank already adds up the tokens that the other
      ranks sent to it. So an average over the group must be multiplied by ``G / D``.

    How it is computed:

    * sum, then ``1 / D`` on the result: on a shard this is 1 / G of the work of scaling first.
    * sent in float16: ``1 / D`` first, then the sum, since the plain sum may leave the range of float16 (65504);
      also where the collective was to average, since some back ends add first and divide afterwards.
    * `scales_first` (`gradient_reduce_div_fusion=False`): ``1 / D`` first for every dtype, in the copy into the bucket;
      the sum cannot leave the range of a single gradient, and each summand is rounded once more.
    * ``average_in_collective``: the collective averages, which leaves ``G / D`` (1 for dense parameters).

    Accumulation over microbatches is a sum and has no factor; the caller divides the loss.
    """
    if calculate_per_token_loss:
        if average_in_collective:
            raise ConfigurationError(
                "average_in_collective=True contradicts calculate_per_token_loss=True, which asks for a plain sum; "
                "set one of them to False."
            )
        return GradientReduction("sum", 1.0, 1.0)
    if average_in_collective:
        return GradientReduction("avg", 1.0, group_size / dp_size, group_size).for_dtype(comm_dtype)
    return GradientReduction("sum", 1.0, 1.0 / dp_size, scales_first=scales_first).for_dtype(comm_dtype)
