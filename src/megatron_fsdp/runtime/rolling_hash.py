"""A number for a sequence of operations, to compare what ranks did without sending it."""

from __future__ import annotations

_LIMIT = 2**61 - 1  # a Mersenne prime; sums and differences fit into int64
_FACTOR = 1_000_003


def fold(so_far: int, operation: int, unit: int, num_bytes: int) -> int:
    """The hash of a sequence with one more operation: a polynomial in the operations, modulo 2 ** 61 - 1.

    Args:
        so_far: The hash before it; 0 for an empty sequence.
        operation: Which, 0 or more.
        unit: Of which unit, 0 or more.
        num_bytes: Of how many bytes.
    """
    for part in (operation, unit, num_bytes):
        so_far = (so_far * _FACTOR + part + 1) % _LIMIT
    return so_far
