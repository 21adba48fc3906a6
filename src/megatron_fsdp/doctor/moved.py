"""Tensors whose elements are right but stand in the wrong place (pure)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_fsdp.doctor.tolerance import Nearness


def tell_moved(expected: Tensor, found: Tensor, num_ranks: int, near: Nearness) -> str | None:
    """Say how the elements have changed places.

    Args:
        expected: The right tensor.
        found: One of the same shape that differs.
        num_ranks: How many shards there may be.
        near: Which elements agree.

    Returns:
        Words, or None where no such change was found.
    """
    return (
        _tell_transposed(expected, found, near)
        or _tell_swapped_shards(expected, found, num_ranks, near)
        or _tell_swapped_halves(expected, found, near)
        or _tell_rolled(expected, found, num_ranks, near)
    )


def _tell_transposed(expected: Tensor, found: Tensor, near: Nearness) -> str | None:
    if expected.dim() != 2:
        return None
    if near.same(_transposed(expected), found):
        return "is transposed"
    for dim in (0, 1):
        if expected.shape[dim] % 2 == 0:
            halves = [_transposed(half) for half in expected.chunk(2, dim)]
            if near.same(torch.cat(halves, dim), found):
                return f"has transposed halves: each half along dimension {dim} is transposed by itself"
    return None


def _transposed(matrix: Tensor) -> Tensor:
    """The transposed matrix, read in order into the shape of the matrix."""
    return matrix.t().reshape(matrix.shape)


def _tell_swapped_halves(expected: Tensor, found: Tensor, near: Nearness) -> str | None:
    for dim, length in enumerate(expected.shape):
        if length > 1 and length % 2 == 0:
            first, second = expected.chunk(2, dim)
            if near.same(torch.cat([second, first], dim), found):
                return f"has transposed halves: the two halves along dimension {dim} have changed places"
    return None


def _tell_swapped_shards(expected: Tensor, found: Tensor, num_ranks: int, near: Nearness) -> str | None:
    """Two pieces of equal length, of rows or of elements, that have changed places."""
    for what, rows in (("rows", len(expected) if expected.dim() else 1), ("elements", expected.numel())):
        want, got = expected.reshape(rows, -1), found.reshape(rows, -1)
        for first, second, length in _candidates(near.differing(want, got).any(1), num_ranks):
            swapped = want.clone()
            swapped[first : first + length] = want[second : second + length]
            swapped[second : second + length] = want[first : first + length]
            if near.same(swapped, got):
                return (
                    f"has two shards swapped: {what} {first}..{first + length - 1} and "
                    f"{second}..{second + length - 1} have changed places{_of_ranks(first, second, length, rows)}"
                )
    return None


def _candidates(differs: Tensor, num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Where two pieces may start and how long they may be: what differs says so, or the even cut over ranks."""
    places = differs.nonzero().flatten()
    if len(places) == 0:
        return
    first, last, rows = int(places[0]), int(places[-1]) + 1, len(differs)
    gaps = (places.diff() > 1).nonzero().flatten()
    run = int(gaps[0]) + 1 if len(gaps) else len(places)
    for length in dict.fromkeys((run, (last - first) // 2)):
        if 0 < length <= (last - first) // 2:
            yield first, last - length, length
    size = -(-rows // num_ranks)
    for low in range(0, rows, size):
        for high in range(low + size, rows - size + 1, size):
            yield low, high, size


def _of_ranks(first: int, second: int, length: int, rows: int) -> str:
    """Which ranks hold the pieces, where the tensor is cut evenly into such pieces."""
    if rows % length or first % length or second % length:
        return ""
    return f" (with an even cut, the shards of ranks {first // length} and {second // length})"


def _tell_rolled(expected: Tensor, found: Tensor, num_ranks: int, near: Nearness) -> str | None:
    flat, got = expected.flatten(), found.flatten()
    if num_ranks < 3 or len(flat) % num_ranks:
        return None
    for by in range(1, num_ranks):
        if near.same(flat.roll(by * len(flat) // num_ranks), got):
            return f"has its shards moved on by {by} rank(s): each rank holds what belongs to another one"
    return None
