"""The collectives of a model's axes, recorded: what each does, and where in the pool it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.comm.axis import Axis
from tests.support.seams import engine_of


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        name: The method of the axis.
        addresses: Where its tensors begin.
        places: Where they lie in the pool, as (use of the block, its number, offset in the pool, bytes). What is a part
            of another tensor of the call, in place, is left out: it lies elsewhere on each rank.
    """

    name: str
    addresses: tuple[int, ...]
    places: tuple[tuple[str, int, int, int], ...]


@contextmanager
def recorded(model: MegatronFSDP) -> Iterator[list[Collective]]:
    """Record the collectives inside the block; each tensor has to lie inside of a block of the model's pool."""
    found: list[Collective] = []

    def recording(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(axis: Axis, *args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if axis.num_ranks > 1:
                addresses = tuple(tensor.data_ptr() for tensor in tensors)
                whole = [each for each in tensors if not any(_is_part(each, other) for other in tensors)]
                found.append(Collective(name, addresses, tuple(place_of(model, each) for each in whole)))
            return real(axis, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_reduce", "reduce_scatter", "exchange"):
            patch.setattr(Axis, name, recording(name, getattr(Axis, name)))
        yield found


def place_of(model: MegatronFSDP, tensor: torch.Tensor) -> tuple[str, int, int, int]:
    """Find the block of the model's pool that a tensor lies in."""
    pool = engine_of(model).executor.pool
    assert pool.plan is not None
    assert pool._memory is not None
    offset = tensor.data_ptr() - pool._memory.data_ptr()
    for block in pool.plan.blocks:
        if block.offset <= offset and offset + tensor.nbytes <= block.offset + block.num_bytes:
            return block.use.value, block.number, offset, tensor.nbytes
    raise AssertionError(f"{tensor.nbytes} bytes at {offset} lie in no block of the {pool.plan.num_bytes} bytes taken")


def _is_part(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    first, start = tensor.data_ptr(), other.data_ptr()
    return tensor.nbytes < other.nbytes and start <= first < start + other.nbytes
