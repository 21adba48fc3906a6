"""Finds the first operation in which ranks differ, and the ranks that stand out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.hang.state import Operation

Operations = Mapping[int, Operation]

BESIDE = frozenset(phase.value for phase in (Phase.AGREE, Phase.NORM, Phase.WHOLE))
"""Phases that the caller asks for, outside of forward and backward too."""


class Difference(Enum):
    """The property in which operations differ."""

    SKIPPED = "skipped"
    ORDER = "order"
    BYTES = "bytes"
    EARLIER = "earlier"  # before the first operation in the logs
    EXTRA = "extra"  # something that the caller asks for, which takes all ranks


@dataclass(frozen=True)
class Mismatch:
    """The first operation in which ranks differ.

    Attributes:
        difference: In what.
        number: Which operation.
        odd: The ranks that do something else than most.
        others: The ranks that do what most do.
        odd_does: What the first odd rank does.
        others_do: What the others do.
    """

    difference: Difference
    number: int
    odd: tuple[int, ...]
    others: tuple[int, ...]
    odd_does: Operation
    others_do: Operation


def first_mismatch(by_rank: Mapping[int, Operations]) -> Mismatch | None:
    """Compare what ranks did, by number; None where nothing differs as far as all logs reach.

    Args:
        by_rank: The operations of each rank that can be compared, by their number.
    """
    logs = {rank: operations for rank, operations in by_rank.items() if operations}
    if len(logs) < 2:
        return None
    first = max(min(operations) for operations in logs.values())
    for number in range(first, max(max(operations) for operations in logs.values()) + 1):
        there = {rank: operations[number] for rank, operations in logs.items() if number in operations}
        if len(there) < 2:
            return None
        if len({operation.kind for operation in there.values()}) > 1:
            return _judged(number, there, logs)
        if len({operation.hash for operation in there.values()}) > 1:
            odd, others = _sides(there, lambda operation: operation.hash)
            return _mismatch(Difference.EARLIER, number, odd, others, there)
    return None


def _sides(there: Mapping[int, Operation], key: object) -> tuple[list[int], list[int]]:
    """Split ranks into minority and majority; in a tie, the lowest rank belongs to the majority."""
    assert callable(key)
    camps: dict[object, list[int]] = {}
    for rank in sorted(there):
        camps.setdefault(key(there[rank]), []).append(rank)
    others = max(camps.values(), key=len)  # the first of equals, which has the lowest rank
    return [rank for rank in sorted(there) if rank not in others], others


def _judged(number: int, there: Mapping[int, Operation], logs: Mapping[int, Operations]) -> Mismatch:
    odd, others = _sides(there, lambda operation: operation.kind)
    if len(odd) == len(others) and _is_odd(number, logs[others[0]], logs[odd[0]]):
        odd, others = others, odd
    mine, theirs = there[odd[0]], there[others[0]]
    if (mine.phase, mine.unit) == (theirs.phase, theirs.unit):
        return _mismatch(Difference.BYTES, number, odd, others, there)
    difference = Difference.ORDER
    if _is_extra(number, logs[odd[0]], logs[others[0]]):
        difference = Difference.EXTRA
    elif _skips(number, logs[odd[0]], logs[others[0]]):
        difference = Difference.SKIPPED
    return _mismatch(difference, number, odd, others, there)


def _mismatch(
    difference: Difference, number: int, odd: Sequence[int], others: Sequence[int], there: Mapping[int, Operation]
) -> Mismatch:
    return Mismatch(difference, number, tuple(odd), tuple(others), there[odd[0]], there[others[0]])


def _what(operation: Operation) -> tuple[str, int]:
    return operation.phase, operation.unit


def _is_odd(number: int, one: Operations, other: Operations) -> bool:
    """Return whether `one`, of two that differ, is the odd one.

    It is if the other does what followed the same operation before; else, if it alone skips something for good; else,
    if it alone is ahead in the order of units.
    """
    before = _came_next_before(number, one)
    if before is not None and (before == _what(one[number])) != (before == _what(other[number])):
        return before == _what(other[number])
    one_skips, other_skips = _skips_surely(number, one, other), _skips_surely(number, other, one)
    if one_skips != other_skips:
        return one_skips
    if (one[number].phase in BESIDE) != (other[number].phase in BESIDE):
        return one[number].phase in BESIDE
    return _is_ahead(one[number], other[number])


def _came_next_before(number: int, operations: Operations) -> tuple[str, int] | None:
    """Return what followed, the last time, after the operation that precedes this one."""
    place = _last_time(number, operations)
    return None if place is None else _what(operations[place])


def _last_time(number: int, operations: Operations) -> int | None:
    """Return the earlier place at which this operation was due: after the same operation as now."""
    if number - 1 not in operations:
        return None
    previous = operations[number - 1]
    for earlier in range(number - 2, min(operations) - 1, -1):
        found = operations.get(earlier)
        if found is not None and _what(found) == _what(previous) and found.in_backward == previous.in_backward:
            return earlier + 1
    return None


def _is_extra(number: int, one: Operations, other: Operations) -> bool:
    """Return whether `one` does something that the other does not do at all.

    If the other does it later, or `one` did it later the last time, `one` skips what precedes it instead.
    """
    mine = one[number]
    if mine.phase not in BESIDE or other[number].phase in BESIDE or _what(mine) in _after(number, other):
        return False
    place = _last_time(number, one)
    if place is None:
        return True
    return _what(one[place]) == _what(mine) or _what(mine) not in _after(place - 1, one)


def _after(number: int, operations: Operations) -> set[tuple[str, int]]:
    """Return what is done after operation `number`, in the same step."""
    step = operations[number].step
    return {_what(later) for place, later in operations.items() if place > number and later.step == step}


def _skips_surely(number: int, one: Operations, other: Operations) -> bool:
    """Return whether the other does later what `one` does now, and `one` never does what it skips."""
    return _what(one[number]) in _after(number, other) and _what(other[number]) not in _after(number, one)


def _skips(number: int, one: Operations, other: Operations) -> bool:
    """Return whether `one` seems to skip what the other does."""
    if _what(other[number]) in _after(number, one):
        return False
    if other[number].phase in BESIDE:
        return one[number].phase in BESIDE or one[number].step > other[number].step
    return _what(one[number]) in _after(number, other) or _is_ahead(one[number], other[number])


def _is_ahead(one: Operation, other: Operation) -> bool:
    """Return whether a pass that visits units in order, forward or backward, reaches `one` later.

    Operations of the whole model (unit 0, apart from its own gather) stand at the end of a pass.
    """
    if one.in_backward != other.in_backward:
        return one.in_backward
    if 0 in (one.unit, other.unit):
        return one.unit == 0
    return one.unit < other.unit if one.in_backward else one.unit > other.unit
