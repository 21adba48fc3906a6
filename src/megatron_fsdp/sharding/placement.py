"""Flat buffers on a mesh: the placements of a model's buffers, the tensors' places in them, and gradient factors.

Pure data: no devices, no side effects. `placements_for` gives the placement of each buffer on every mesh axis by
sharding strategy, `held_region` the elements that a rank holds, `gradient_reduction` the factors of a reduction,
`plan_layout` the place of each tensor. Offsets and lengths count elements unless a name says otherwise.

Nothing else scales a gradient, but for `GradientReducer.factor`, which makes up for an average that a local sum did not
take, and `unite_gradients`, which averages what a loss outside of forward gives. The user does by `scale_gradients`,
and `automodel/` for experts under FSDP2 and by token counts.
"""

from __future__ import annotations

import bisect
import enum
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Protocol

import torch

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.shards import BufferCut


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
    main_weight: tuple[Placement, ...]  # what the optimizer updates, its state, and gradients after their sync

    @property
    def accumulates_shards(self) -> bool:
        """True if gradients are reduced over the sharding axis by every backward."""
        return self.accumulated_grad[-1] is Placement.SHARD

    def of_frozen(self) -> Placements:
        """Return the placements of frozen parameters: nothing is optimised, so main weights lie as compute weights."""
        if self.compute_weight[-1] is not Placement.SHARD:
            return self.of_scalars()
        return Placements(self.compute_weight, self.accumulated_grad, self.compute_weight)

    def of_scalars(self) -> Placements:
        """Return the placements of parameters without dimensions, of which every rank holds all."""
        whole, partial = (Placement.REPLICATE,) * len(self.main_weight), (Placement.PARTIAL,) * len(self.main_weight)
        return Placements(whole, partial, whole)


_R, _P, _S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD


def placements_for(inner: ShardingStrategy, outer: ShardingStrategy | None = None) -> Placements:
    """Return the placement of each buffer under a strategy on the sharding axis (``dp_shard_dim``).

    `outer` is that on the hybrid axis (``dp_outer_dim``): ``no_shard`` (HSDP) or ``optim`` (HFSDP); None: no such axis.
    """
    weight = _S if inner.shards_compute_weights else _R
    accumulated = _S if inner.shards_gradients else _P
    main = _S if inner.shards_main_weights else _R
    if outer is None:
        return Placements((weight,), (accumulated,), (main,))
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
    return Placements((_R, weight), (_P, accumulated), (after_sync, main))


def strategies_of(placements: Placements) -> tuple[ShardingStrategy | None, ShardingStrategy | None]:
    """Return the strategies on the sharding and on the hybrid axis that place buffers so; None where there is none."""
    buffers = (placements.compute_weight, placements.accumulated_grad, placements.main_weight)
    on_inner = Placements(*(buffer[-1:] for buffer in buffers))
    inner = next((strategy for strategy in ShardingStrategy if placements_for(strategy) == on_inner), None)
    if len(placements.main_weight) == 1:
        return inner, None
    return inner, ShardingStrategy.optim if placements.main_weight[0] is _S else ShardingStrategy.no_shard


# ---- the elements that a rank holds ----------------------------------------------------------------------------------


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
    # Whether the gradients of the ranks are added to the accumulated gradient one after another, as one process
    # adds those of its microbatches, and not first to each other.
    one_by_one: bool = False

    @property
    def adds_up(self) -> bool:
        """True if gradients are summed over ranks without a factor, as `calculate_per_token_loss` asks for."""
        return self.op == "sum" and self.pre_factor * self.post_factor == 1.0


def gradient_reduction(
    dp_size: float,
    group_size: int,
    *,
    average_in_collective: bool,
    calculate_per_token_loss: bool,
    comm_dtype: torch.dtype,
    scales_first: bool = False,
    is_whole: bool = False,
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
    * `is_whole`, every rank keeps the whole result: ``1 / D`` first, which the copy does on the way, where D is a power
      of two. It gives the same bits, but for subnormal numbers.
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
    if average_in_collective and comm_dtype != torch.float16:
        return GradientReduction("avg", 1.0, group_size / dp_size)
    scales_first |= comm_dtype == torch.float16 or (is_whole and is_power_of_two(dp_size))
    factors = (1.0 / dp_size, 1.0) if scales_first else (1.0, 1.0 / dp_size)
    return GradientReduction("sum", *factors)


def is_power_of_two(factor: float) -> bool:
    """Return True if a positive number is a power of two, by which floating-point products are exact."""
    return math.frexp(factor)[0] == 0.5


# ---- the places of tensors in a buffer -------------------------------------------------------------------------------


SEGMENT_BYTES = 2**20
"""Bytes up to which neighbouring shards are stepped as one tensor. Beyond them memory bandwidth decides the time of a
step; and where torch steps one tensor after another, its temporary memory grows with the largest tensor."""


@dataclass(frozen=True)
class Layout:
    """Tensors in one flat buffer of `num_shards * shard_numel` elements.

    Shard r is the r-th stretch of `shard_numel`; `held_region` says which rank has it.
    """

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # first element of each tensor in the buffer; tensors without elements have one too
    num_shards: int
    shard_numel: int

    def cut(self, index: int) -> BufferCut:
        """Return the ranges of one tensor's flattened elements that the shards hold."""
        return BufferCut(self.offsets[index], self.shard_numel, self.num_shards, self.tensor_numel(index))

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_numel

    @property
    def payload_numel(self) -> int:
        """Elements that belong to tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no tensor."""
        return self.numel - self.payload_numel

    @property
    def padding_fraction(self) -> float:
        """Padding divided by payload; 0.0 where there is no payload."""
        payload_numel = self.payload_numel
        return self.padding_numel / payload_numel if payload_numel else 0.0

    def tensor_numel(self, index: int) -> int:
        """Return the elements of one tensor."""
        return math.prod(self.shapes[index])

    def tensor_range(self, index: int) -> tuple[int, int]:
        """Return the half-open range of one tensor in the buffer."""
        return self.places[index][:2]

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """For each tensor its half-open range in the buffer, and its shape."""
        placed = zip(self.offsets, self.shapes, strict=True)
        return tuple((offset, offset + math.prod(shape), shape) for offset, shape in placed)

    def range_in(self, index: int, region: Region) -> tuple[int, int]:
        """Return the half-open range of one tensor's flattened elements in a region of the buffer, maybe empty."""
        offset, numel = self.offsets[index], self.tensor_numel(index)
        return min(max(region.start - offset, 0), numel), min(max(region.stop - offset, 0), numel)

    def shards_in(self, region: Region) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Return for each tensor the half-open range of its shard in the memory of a region, and its `shard_shape`.

        Computed once for each region.
        """
        if region not in self._by_region:
            found = []
            for index, whole in enumerate(self.shapes):
                start, stop = self.range_in(index, region)
                shape = whole if region.numel == self.numel else self.shard_shape(index, stop - start)
                first = self.offsets[index] + start - region.start if start < stop else 0
                found.append((first, first + stop - start, shape))
            self._by_region[region] = tuple(found)
        return self._by_region[region]

    def segments_in(self, region: Region, indexes: Sequence[int], itemsize: int) -> list[slice]:
        """Cut tensors into segments, whose shards follow one another in a region, of `SEGMENT_BYTES` at most.

        `indexes` are those of the tensors, `itemsize` the bytes of an element. Returns positions in `indexes`.
        """
        shards, cuts, end, numel = self.shards_in(region), [0], None, 0
        for position, index in enumerate(indexes):
            start, stop, _ = shards[index]
            follows = start == stop or end in (None, start)
            fits = (numel + stop - start) * itemsize <= SEGMENT_BYTES
            if position and not (follows and fits and index == indexes[position - 1] + 1):
                cuts.append(position)
                end, numel = None, 0
            end, numel = stop if start < stop else end, numel + stop - start
        return [slice(*cut) for cut in pairwise([*cuts, len(indexes)])]

    @functools.cached_property
    def _by_region(self) -> dict[Region, tuple[tuple[int, int, tuple[int, ...]], ...]]:
        return {}

    def is_row_sharded(self, index: int) -> bool:
        """Return True if every rank's shard of this tensor is whole rows of dim 0; the same on all ranks.

        Tensors without dimensions or with empty rows never are.
        """
        shape = self.shapes[index]
        row_numel = math.prod(shape[1:])
        return len(shape) > 0 and row_numel > 0 and self.cut(index).is_multiple_of(row_numel)

    def shard_shape(self, index: int, numel: int) -> tuple[int, ...]:
        """Return the shape of a shard of `numel` elements: `(rows, *shape[1:])` if row sharded, else `(elements,)`."""
        if not self.is_row_sharded(index):
            return (numel,)
        row_shape = self.shapes[index][1:]
        return (numel // math.prod(row_shape), *row_shape)


# The search for the smallest shard, in integers; `plan_layout` below is what others call.
#
# Tensors lie one behind the other in a buffer of N shards of S elements. A shard edge may fall between two tensors,
# into padding, or between two rows of a tensor:
#
#     | rank 0                | rank 1                | rank 2                |
#     [A0  A1  A2  A3  A4  A5  A6  A7  A8][b ][  C0      C1      C2  ][ D ]...
#                             ^                       ^                    padding
#                             between two rows of A   between two rows of C, thanks to b in front
#
# What makes padding is an edge at a wrong place, and there are only three cases:
#
# - a tensor that crosses no edge is free to lie anywhere;
# - one that crosses one edge only needs the right start: a gap shorter than a row in front of it, which small tensors
#   fill later;
# - one that crosses several edges needs a row that divides S. Only tensors longer than 2 S must cross several, so only
#   their rows are binding.
#
# So S starts at the lower bound payload / N and goes up through the values that the rows of the long tensors allow. For
# each, tensors are laid greedily; the first S that holds everything wins. Where that wastes more than allowed, some
# tensors give up their rows: the search begins with all rows given up, which has no padding but for alignment, and
# takes rows back, group by group, small rows first, as long as the result stays within the limit.
#
# Lengths in this search are counted in alignment units, so that alignment needs no further thought: with a row of g
# elements and an alignment of A, a tensor can be cut at multiples of lcm(g, A) elements, which is a whole number of
# units. Where the whole buffer must be a multiple of M elements, N S is one if and only if M / gcd(N, M) divides S,
# so that S goes up through the multiples of that only.

# Shard lengths tried one by one before the steps double; bounds the work where the lower bound is far off.
_DENSE_TRIES = 12

# Halvings of the last doubled step, to come back to a length close to the smallest.
_REFINING_TRIES = 12

# Tensors at each end of the queue that may jump it where the next in line would leave a gap.
_WINDOW = 4

# Searches spent on giving rows back to lowered tensors.
_MAX_ROW_SEARCHES = 64


@dataclass(frozen=True)
class _Span:
    """A tensor in alignment units, cut only at multiples of `step` behind its start (never, if step >= length)."""

    index: int
    length: int
    step: int


@dataclass(frozen=True)
class _Shards:
    """The number of shards, and the step that their length is a multiple of, in units."""

    count: int
    step: int

    def rounded_up(self, length: int) -> int:
        """Return the smallest possible shard length from `length` on."""
        return -(-length // self.step) * self.step


@dataclass(frozen=True)
class _Solution:
    """A shard length in units, and the start of each span by its index."""

    shard_length: int
    starts: dict[int, int]


def _span(index: int, shape: Sequence[int], alignment_numel: int) -> _Span:
    row_numel = max(1, math.prod(shape[1:]))
    step_numel = math.lcm(row_numel, alignment_numel)
    return _Span(index, -(-math.prod(shape) // alignment_numel), step_numel // alignment_numel)


def _with_lowered(spans: Iterable[_Span], lowered: set[int]) -> list[_Span]:
    return [replace(span, step=1) if span.index in lowered else span for span in spans]


def _with_most_rows(spans: Sequence[_Span], shards: _Shards, limit: int) -> _Solution:
    """Place spans in shards of `limit` units (or the smallest that fit), keeping as many whole rows as possible.

    At first all give up their rows; then as much of that as possible is undone: all at once, else in ever smaller
    groups.
    """
    lowered = {span.index for span in spans if span.step > 1}  # with a step of one unit there are no rows to give up
    # One shard that holds everything always exists.
    solution = _smallest(_with_lowered(spans, lowered), shards, shards.rounded_up(sum(span.length for span in spans)))
    assert solution is not None
    limit = max(solution.shard_length, limit)
    wishes = sorted((span for span in spans if span.step > 1), key=lambda span: (span.step, span.length, span.index))
    pending = [wishes] if wishes else []
    for _ in range(_MAX_ROW_SEARCHES):
        if not pending:
            break
        group = pending.pop()
        still_lowered = lowered - {span.index for span in group}
        found = _smallest(_with_lowered(spans, still_lowered), shards, limit)
        if found is not None:
            solution, lowered = found, still_lowered
        elif len(group) > 1:
            pending.extend(reversed(_halves(group)))
    return solution


def _halves(group: list[_Span]) -> tuple[list[_Span], list[_Span]]:
    """Split spans near the middle, where possible between different steps: equal steps fit together or not at all."""
    borders = [i for i in range(1, len(group)) if group[i].step != group[i - 1].step]
    middle = min(borders, key=lambda border: abs(2 * border - len(group)), default=len(group) // 2)
    return group[:middle], group[middle:]


def _orders(spans: Sequence[_Span]) -> list[list[_Span]]:
    """Return the orders in which to try to place spans: as given, longest first, largest step first."""
    longest_first = sorted(spans, key=lambda span: (-span.length, -span.step))
    largest_step_first = sorted(spans, key=lambda span: (-min(span.step, span.length), -span.length))
    orders: list[list[_Span]] = []
    for order in (list(spans), longest_first, largest_step_first):
        if order not in orders:
            orders.append(order)
    return orders


def _place(orders: Iterable[Sequence[_Span]], num_shards: int, shard_length: int) -> _Solution | None:
    """Place all spans into shards of this length, in the first order that works; None if no order does."""
    for order in orders:
        starts = _place_in_order(order, num_shards, shard_length)
        if starts is not None:
            return _Solution(shard_length, starts)
    return None


def _place_in_order(order: Sequence[_Span], num_shards: int, shard_length: int) -> dict[int, int] | None:
    """Place spans one behind the other, each in the tightest earlier gap that holds it whole, if any."""
    starts: dict[int, int] = {}
    gaps = _Gaps(shard_length)
    waiting = list(order)
    position = 0
    while waiting:
        gap_start = gaps.take(waiting[0].length)
        if gap_start is not None:
            starts[waiting.pop(0).index] = gap_start
            continue
        chosen = _next_in_line(waiting, position, shard_length)
        span = waiting.pop(chosen)
        start = _first_start(span, position, shard_length)
        if start is None or start + span.length > num_shards * shard_length:
            return None
        gaps.add(position, start)
        starts[span.index] = start
        position = start + span.length
    return starts


def _next_in_line(waiting: Sequence[_Span], position: int, shard_length: int) -> int:
    """Choose the first span of the queue, or one that reaches the next shard edge with a smaller gap."""
    next_edge = (position // shard_length + 1) * shard_length
    count = len(waiting)
    chosen, smallest_gap = 0, None
    for candidate in (*range(min(_WINDOW, count)), *range(max(_WINDOW, count - _WINDOW), count)):
        start = _first_start(waiting[candidate], position, shard_length)
        if start is None or (candidate and start + waiting[candidate].length < next_edge):
            continue
        if smallest_gap is None or start - position < smallest_gap:
            chosen, smallest_gap = candidate, start - position
        if smallest_gap == 0:
            break
    return chosen


def _first_start(span: _Span, position: int, shard_length: int) -> int | None:
    """Return the first start >= `position` at which shard edges cut the span at its steps only, or None."""
    into_shard = position % shard_length
    if into_shard + span.length <= shard_length:
        return position
    edge = position - into_shard + shard_length
    start = position + (edge - position) % span.step
    if shard_length % span.step == 0 or start + span.length <= edge + shard_length:
        return start
    # It would reach a second edge inside a step: begin in the next shard, as early as possible.
    start = edge + shard_length % span.step
    return start if start + span.length <= edge + 2 * shard_length else None


class _Gaps:
    """The free ranges between spans, split at shard edges, so that a span placed in one crosses no edge."""

    def __init__(self, shard_length: int) -> None:
        self._shard_length = shard_length
        self._gaps: list[tuple[int, int]] = []  # (length, start), sorted

    def add(self, start: int, stop: int) -> None:
        """Add the range [start, stop) as free."""
        while start < stop:
            edge = min(stop, (start // self._shard_length + 1) * self._shard_length)
            bisect.insort(self._gaps, (edge - start, start))
            start = edge

    def take(self, length: int) -> int | None:
        """Take `length` from the tightest gap that holds it and return its start, or None."""
        at = bisect.bisect_left(self._gaps, (length, 0))
        if at == len(self._gaps):
            return None
        gap_length, start = self._gaps.pop(at)
        self.add(start + length, start + gap_length)
        return start


def _smallest(spans: Sequence[_Span], shards: _Shards, limit: int) -> _Solution | None:
    """Search for the smallest shard length up to `limit` and its placement; None if nothing fits.

    Lengths are tried one by one at first, then in doubling steps, whose last one is refined by bisection. (A longer
    shard is not always easier to fill, so that this is a search and not a proof.)
    """
    orders = _orders(spans)
    lengths = _ShardLengths(spans, shards)
    failed, best = lengths.lower_bound - shards.step, None
    step, tries = shards.step, 0
    while best is None:
        # Halving the way to the limit keeps a large step from jumping over the last candidates.
        candidate = lengths.next_from(failed + max(1, min(step, (limit - failed) // 2)))
        if candidate > limit:
            return None
        best = _place(orders, shards.count, candidate)
        failed = candidate if best is None else failed
        tries += 1
        step = step if tries < _DENSE_TRIES else 2 * step
    for _ in range(_REFINING_TRIES):
        candidate = lengths.next_from((failed + best.shard_length) // 2 + 1)
        if candidate >= best.shard_length:
            break
        shorter = _place(orders, shards.count, candidate)
        failed, best = (candidate, best) if shorter is None else (failed, shorter)
    return best


class _ShardLengths:
    """The candidate shard lengths, by bounds that hold for any order of the spans."""

    def __init__(self, spans: Sequence[_Span], shards: _Shards) -> None:
        by_length = sorted(spans, key=lambda span: span.length)
        total = sum(span.length for span in spans)
        self._lengths = [span.length for span in by_length]
        # A shard holds at least a whole span or one step of it, and all shards hold everything.
        needed = max([-(-total // shards.count), *(min(span.length, span.step) for span in spans)])
        self.lower_bound = shards.rounded_up(needed)
        self._multiples = self._common_steps(by_length, shards.step, total)

    @staticmethod
    def _common_steps(by_length: Sequence[_Span], shard_step: int, total: int) -> list[int]:
        """Return for each position the least common multiple of the shard's step and the steps of the spans behind it.

        It is capped. A capped one is never used: it is longer than a shard at which the shortest of the spans stops
        being long.
        """
        multiples = [shard_step]
        for span in reversed(by_length):
            multiples.append(min(math.lcm(multiples[-1], span.step), total + 1))
        return multiples[::-1]

    def next_from(self, shard_length: int) -> int:
        """Return the smallest length >= `shard_length` that is a multiple of the steps of the shard and the long spans.

        Long spans are those of more than two shards.
        """
        while True:
            first_long = bisect.bisect_right(self._lengths, 2 * shard_length)
            multiple = self._multiples[first_long]
            candidate = -(-shard_length // multiple) * multiple
            if candidate == shard_length or first_long == len(self._lengths):
                return candidate
            # The shortest of the long spans stops being long before that, and its step need not divide any more.
            released = -(-self._lengths[first_long] // 2)
            if candidate <= released:
                return candidate
            shard_length = released


def plan_layout(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    alignment_numel: int = 1,
    max_waste: float = 0.01,
    numel_multiple: int = 1,
) -> Layout:
    """Lay tensors into one flat buffer of `num_shards` equal shards, with as little padding as the search finds.

    Every tensor and every shard starts at a multiple of `alignment_numel`. Where whole rows cost more than `max_waste`,
    as few tensors as reasonable are cut at any aligned element instead. The same arguments give the same layout on
    every rank and in every run.

    With T non-empty tensors the padding is guaranteed not to exceed

        max(max_waste * payload_numel, T * (alignment_numel - 1) + (num_shards - 1) * alignment_numel)

    elements. With a `numel_multiple` the second term is T * (alignment_numel - 1) + common - alignment_numel, where
    common = lcm(num_shards * alignment_numel, numel_multiple): what equal shards of aligned length add up to. So
    alignment aside it costs less than one multiple where num_shards * alignment_numel divides it.

    Args:
        shapes: Shape of each tensor; `()` is a scalar, and a tensor may have no elements.
        num_shards: Number of equal shards, at least 1.
        alignment_numel: Alignment in elements, e.g. 16 bytes divided by the item size.
        max_waste: Padding divided by payload that keeping rows whole may cost.
        numel_multiple: The whole buffer is a multiple of this many elements, e.g. 2**16 for fast rings of NCCL. Where
            it leaves no cheap length for whole rows, more tensors are cut inside rows than without it.
    """
    spans = [_span(index, shape, alignment_numel) for index, shape in enumerate(shapes) if math.prod(shape)]
    step_numel = math.lcm(numel_multiple // math.gcd(num_shards, numel_multiple), alignment_numel)
    shards = _Shards(num_shards, step_numel // alignment_numel)
    payload_numel = sum(math.prod(shape) for shape in shapes)
    most_numel = payload_numel + int(max_waste * payload_numel)
    solution = _with_most_rows(spans, shards, most_numel // (num_shards * alignment_numel))
    return Layout(
        shapes=tuple(tuple(map(int, shape)) for shape in shapes),
        offsets=tuple(solution.starts.get(index, 0) * alignment_numel for index in range(len(shapes))),
        num_shards=num_shards,
        shard_numel=solution.shard_length * alignment_numel,
    )
