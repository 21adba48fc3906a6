"""The search for the smallest shard (pure integers); `megatron_fsdp.layout.plan_layout` is its front door.

Tensors lie one behind the other in a buffer of N shards of S elements. A shard edge may fall between two tensors, into
padding, or between two granules (say rows) of a tensor:

    | rank 0                | rank 1                | rank 2                |
    [A0  A1  A2  A3  A4  A5  A6  A7  A8][b ][  C0      C1      C2  ][ D ]...
                            ^                       ^                    padding
                            between two rows of A   between two rows of C, thanks to b in front

What makes padding is an edge at a wrong place, and there are only three cases:

- a tensor that crosses no edge is free to lie anywhere;
- one that crosses one edge only needs the right start: a gap shorter than a granule in front of it, which small tensors
  fill later;
- one that crosses several edges needs a granule that divides S. Only tensors longer than 2 S must cross several, so
  only their granules are binding.

So S starts at the lower bound payload / N and goes up through the values that the granules of the long tensors allow.
For each, tensors are laid greedily; the first S that holds everything wins. Where that wastes more than allowed, some
tensors give up their rows: the search begins with all rows given up, which has no padding but for alignment, and takes
rows back, group by group, small rows first, as long as the result stays within the limit.

Lengths in here are counted in alignment units, so that alignment needs no further thought: with a granule of g elements
and an alignment of A, a tensor can be cut at multiples of lcm(g, A) elements, which is a whole number of units. Where
the whole buffer must be a multiple of M elements, N S is one if and only if M / gcd(N, M) divides S, so that S goes up
through the multiples of that only.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

# Shard lengths tried one by one before the steps double; bounds the work where the lower bound is far off.
_DENSE_TRIES = 12
# Halvings of the last doubled step, to come back to a length close to the smallest.
_REFINING_TRIES = 12
# Tensors at each end of the queue that may jump it where the next in line would leave a gap.
_WINDOW = 4
# Searches spent on giving rows back to lowered tensors.
_MAX_ROW_SEARCHES = 64


@dataclass(frozen=True)
class Item:
    """One tensor to place.

    Attributes:
        numel: Elements, may be 0.
        granule_numel: Elements that stay together, at least 1.
        may_be_lowered: Whether the planner may cut at any element where that saves padding.
    """

    numel: int
    granule_numel: int
    may_be_lowered: bool


@dataclass(frozen=True)
class Placement:
    """The result in elements: one offset and one granule per item, in the order of the items, and the shard length."""

    offsets: tuple[int, ...]
    granules: tuple[int, ...]
    shard_numel: int


@dataclass(frozen=True)
class _Span:
    """A tensor in alignment units. It may be cut at multiples of `step` behind its start: never, if step >= length."""

    index: int
    length: int
    step: int


@dataclass(frozen=True)
class _Shards:
    """How many shards there are, and what must divide their length, in units."""

    count: int
    step: int

    def rounded_up(self, length: int) -> int:
        """The smallest possible shard length from `length` on."""
        return -(-length // self.step) * self.step


@dataclass(frozen=True)
class _Solution:
    """A shard length in units, and the start of each span by its index."""

    shard_length: int
    starts: dict[int, int]


def plan_placement(
    items: Sequence[Item], num_shards: int, alignment_numel: int, max_waste: float, numel_multiple: int = 1
) -> Placement:
    """Place items into equal shards; the module docstring has the idea, `plan_layout` the contract.

    Args:
        items: The tensors.
        num_shards: Number of shards, at least 1.
        alignment_numel: Every offset and the shard length are multiples of this many elements.
        max_waste: Padding divided by payload that whole rows may cost.
        numel_multiple: `num_shards` times the shard length is a multiple of this many elements.
    """
    spans = [_span(index, item, alignment_numel) for index, item in enumerate(items) if item.numel]
    # With a step of one unit there is nothing to give up.
    lowered = {span.index for span in spans if items[span.index].may_be_lowered and span.step > 1}
    shards = _Shards(num_shards, _shard_step(num_shards, alignment_numel, numel_multiple))
    # One shard that holds everything always exists.
    solution = _smallest(_with_lowered(spans, lowered), shards, shards.rounded_up(sum(span.length for span in spans)))
    assert solution is not None
    if lowered:
        payload_numel = sum(item.numel for item in items)
        most_numel = payload_numel + int(max_waste * payload_numel)
        limit = max(solution.shard_length, most_numel // (num_shards * alignment_numel))
        solution, lowered = _take_rows_back(spans, lowered, shards, limit, solution)
    return Placement(
        offsets=tuple(solution.starts.get(index, 0) * alignment_numel for index in range(len(items))),
        granules=tuple(1 if index in lowered else item.granule_numel for index, item in enumerate(items)),
        shard_numel=solution.shard_length * alignment_numel,
    )


def _shard_step(num_shards: int, alignment_numel: int, numel_multiple: int) -> int:
    """What must divide a shard length, in alignment units."""
    step_numel = numel_multiple // math.gcd(num_shards, numel_multiple)
    return math.lcm(step_numel, alignment_numel) // alignment_numel


def _span(index: int, item: Item, alignment_numel: int) -> _Span:
    step_numel = math.lcm(item.granule_numel, alignment_numel)
    return _Span(index, -(-item.numel // alignment_numel), step_numel // alignment_numel)


def _with_lowered(spans: Iterable[_Span], lowered: set[int]) -> list[_Span]:
    return [replace(span, step=1) if span.index in lowered else span for span in spans]


def _take_rows_back(
    spans: Sequence[_Span], lowered: set[int], shards: _Shards, limit: int, solution: _Solution
) -> tuple[_Solution, set[int]]:
    """Undo as much lowering as shards of `limit` units allow: all at once if possible, else by ever smaller groups."""
    wishes = [span for span in spans if span.index in lowered]
    pending = [sorted(wishes, key=lambda span: (span.step, span.length, span.index))]
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
    return solution, lowered


def _halves(group: list[_Span]) -> tuple[list[_Span], list[_Span]]:
    """Split near the middle, between two steps where there are several, since equal steps stand or fall together."""
    borders = [i for i in range(1, len(group)) if group[i].step != group[i - 1].step]
    middle = min(borders, key=lambda border: abs(2 * border - len(group)), default=len(group) // 2)
    return group[:middle], group[middle:]


def _smallest(spans: Sequence[_Span], shards: _Shards, limit: int) -> _Solution | None:
    """The solution with the smallest shard length up to `limit` that the search finds, or None.

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
    """The shard lengths that are worth a try: what is needed whatever the order of the spans."""

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
        """Per position, what the shard and the steps from there on need in common, capped where it is out of reach.

        A capped one is never used: it is longer than a shard at which the shortest of the spans stops being long.
        """
        multiples = [shard_step]
        for span in reversed(by_length):
            multiples.append(min(math.lcm(multiples[-1], span.step), total + 1))
        return multiples[::-1]

    def next_from(self, shard_length: int) -> int:
        """The smallest length from `shard_length` on that the shard's step divides, and those of the long spans.

        Long spans are those of more than two shards.
        """
        while True:
            first_long = bisect.bisect_right(self._lengths, 2 * shard_length)
            multiple = self._multiples[first_long]
            candidate = -(-shard_length // multiple) * multiple
            if candidate == shard_length or first_long == len(self._lengths):
                return candidate
            # The shortest of the long spans stops being long before that: then fewer steps must divide.
            released = -(-self._lengths[first_long] // 2)
            if candidate <= released:
                return candidate
            shard_length = released


def _orders(spans: Sequence[_Span]) -> list[list[_Span]]:
    """The orders to lay spans in, without repetition: as given, longest first, and largest step first."""
    longest_first = sorted(spans, key=lambda span: (-span.length, -span.step))
    largest_step_first = sorted(spans, key=lambda span: (-min(span.step, span.length), -span.length))
    orders: list[list[_Span]] = []
    for order in (list(spans), longest_first, largest_step_first):
        if order not in orders:
            orders.append(order)
    return orders


def _place(orders: Iterable[Sequence[_Span]], num_shards: int, shard_length: int) -> _Solution | None:
    """Place all spans into shards of this length, in the first order that works; None where no order does."""
    for order in orders:
        starts = _place_in_order(order, num_shards, shard_length)
        if starts is not None:
            return _Solution(shard_length, starts)
    return None


def _place_in_order(order: Sequence[_Span], num_shards: int, shard_length: int) -> dict[int, int] | None:
    """Lay spans one behind the other, but each into the tightest gap left so far that holds it whole, if any."""
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
    """The first in the queue, or one that reaches the next edge with a smaller gap in front of it."""
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
    """The first start from `position` on at which shard edges cut the span between steps only; None if none exists."""
    into_shard = position % shard_length
    if into_shard + span.length <= shard_length:
        return position
    edge = position - into_shard + shard_length
    start = position + (edge - position) % span.step
    if shard_length % span.step == 0 or start + span.length <= edge + shard_length:
        return start
    # It would reach a second edge, which its steps cannot meet as well: begin in the next shard, as early as possible.
    start = edge + shard_length % span.step
    return start if start + span.length <= edge + 2 * shard_length else None


class _Gaps:
    """The room left between spans, one piece per shard it touches, so that what fits into a piece crosses no edge."""

    def __init__(self, shard_length: int) -> None:
        self._shard_length = shard_length
        self._pieces: list[tuple[int, int]] = []  # (length, start), sorted

    def add(self, start: int, stop: int) -> None:
        """Note the range [start, stop) as free."""
        while start < stop:
            edge = min(stop, (start // self._shard_length + 1) * self._shard_length)
            bisect.insort(self._pieces, (edge - start, start))
            start = edge

    def take(self, length: int) -> int | None:
        """The start of a piece of `length` cut from the tightest gap that holds it, or None."""
        at = bisect.bisect_left(self._pieces, (length, 0))
        if at == len(self._pieces):
            return None
        gap_length, start = self._pieces.pop(at)
        self.add(start + length, start + gap_length)
        return start
