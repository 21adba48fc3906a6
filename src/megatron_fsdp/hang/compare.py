"""Finds the first operation in which ranks differ, and the ranks that stand out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.hang.log_file import Record
from megatron_fsdp.hang.reading import ON_REQUEST

Operations = Mapping[int, Record]


class Kind(Enum):
    """The kind of a finding."""

    NOTHING = "nothing is odd"
    MISSING = "a rank has no log"
    DIED = "a process died"
    RAISED = "a rank raised an error"
    ENDED = "a rank ended its program"
    SKIPPED = "a rank skipped a unit"
    ORDER = "ranks communicate in another order"
    BYTES = "ranks communicate another number of bytes"
    RESET = "not all ranks were reset"
    ELSEWHERE = "a rank is busy elsewhere"
    ALONE = "a rank does alone what takes all"
    BEHIND = "a rank is behind"
    EQUAL = "all ranks wait for the same"


@dataclass(frozen=True)
class Mismatch:
    """The first operation in which ranks differ.

    Attributes:
        kind: How: SKIPPED, ORDER, BYTES or ALONE.
        number: Which operation.
        odd: The ranks that do something else than most.
        others: The ranks that do what most do.
        odd_does: What the first odd rank does.
        others_do: What the others do; the same where ranks differed before the first operation in the logs.
    """

    kind: Kind
    number: int
    odd: tuple[int, ...]
    others: tuple[int, ...]
    odd_does: Record
    others_do: Record


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
        kinds = {rank: operation.kind for rank, operation in there.items()}
        hashes = {rank: operation.hash for rank, operation in there.items()}
        differs = len(set(kinds.values())) > 1
        if differs or len(set(hashes.values())) > 1:
            odd, others = _sides(kinds if differs else hashes)
            if differs and len(odd) == len(others) and _is_odd(number, logs[others[0]], logs[odd[0]]):
                odd, others = others, odd
            kind = _kind(number, logs[odd[0]], logs[others[0]])
            return Mismatch(kind, number, odd, others, there[odd[0]], there[others[0]])
    return None


def _sides(by_rank: Mapping[int, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split ranks into minority and majority; in a tie, the lowest rank belongs to the majority."""
    camps: dict[object, list[int]] = {}
    for rank in sorted(by_rank):
        camps.setdefault(by_rank[rank], []).append(rank)
    others = max(camps.values(), key=len)  # the first of equals, which has the lowest rank
    return tuple(rank for rank in sorted(by_rank) if rank not in others), tuple(others)


def _kind(number: int, odd: Operations, others: Operations) -> Kind:
    if odd[number].kind == others[number].kind:
        return Kind.ORDER
    if _what(odd[number]) == _what(others[number]):
        return Kind.BYTES
    if _is_extra(number, odd, others):
        return Kind.ALONE
    return Kind.SKIPPED if _skips(number, odd, others) else Kind.ORDER


def _what(operation: Record) -> tuple[Phase, int]:
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
    if (one[number].phase in ON_REQUEST) != (other[number].phase in ON_REQUEST):
        return one[number].phase in ON_REQUEST
    return _is_ahead(one[number], other[number])


def _came_next_before(number: int, operations: Operations) -> tuple[Phase, int] | None:
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
    if mine.phase not in ON_REQUEST or other[number].phase in ON_REQUEST or _what(mine) in _after(number, other):
        return False
    place = _last_time(number, one)
    if place is None:
        return True
    return _what(one[place]) == _what(mine) or _what(mine) not in _after(place - 1, one)


def _after(number: int, operations: Operations) -> set[tuple[Phase, int]]:
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
    if other[number].phase in ON_REQUEST:
        return one[number].phase in ON_REQUEST or one[number].step > other[number].step
    return _what(one[number]) in _after(number, other) or _is_ahead(one[number], other[number])


def _is_ahead(one: Record, other: Record) -> bool:
    """Return whether a pass that visits units in order, forward or backward, reaches `one` later.

    Operations of the whole model (unit 0, apart from its own gather) stand at the end of a pass.
    """
    if one.in_backward != other.in_backward:
        return one.in_backward
    if 0 in (one.unit, other.unit):
        return one.unit == 0
    return one.unit < other.unit if one.in_backward else one.unit > other.unit
