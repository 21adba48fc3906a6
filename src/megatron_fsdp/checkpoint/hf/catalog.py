"""Who holds which elements of which tensors, gathered once from all ranks."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_fsdp.checkpoint.agree import gather_objects
from megatron_fsdp.checkpoint.hf.live import LiveTensor, Piece
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box


@dataclass(frozen=True)
class Held:
    """One tensor and its holders.

    Attributes:
        shape: Of the global tensor.
        dtype: Of the main weight.
        holders: The ranks that hold each box, rising; boxes do not overlap and cover the tensor.
        is_shared_out: Whether it is a DTensor; of others the first rank's is taken.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: Mapping[Box, tuple[int, ...]]
    is_shared_out: bool

    def near(self, box: Box) -> Sequence[Box]:
        """The boxes that may share elements with this one, in an order that all ranks agree on.

        A fused weight of experts on many ranks has thousands of boxes and is asked for expert by expert; those that
        end before the box along the first dimension, or begin behind it, are not looked at.
        """
        if not self.shape:
            return self._sorted
        first = bisect.bisect_right(self._ends, box.offsets[0])
        last = bisect.bisect_left(self._starts, box.offsets[0] + box.lengths[0])
        return self._sorted[first:last]

    @functools.cached_property
    def _sorted(self) -> list[Box]:
        return sorted(self.holders, key=lambda box: (box.offsets, box.lengths))

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [box.offsets[0] for box in self._sorted]

    @functools.cached_property
    def _ends(self) -> list[int]:
        """For each box the last end of it and those before it."""
        return list(itertools.accumulate((box.offsets[0] + box.lengths[0] for box in self._sorted), max))

    def source_of(self, box: Box, wanted_by: int) -> int:
        """Which rank gives a box to another one: that one itself where it holds it, else they take turns."""
        ranks = self.holders[box]
        if not self.is_shared_out:
            return ranks[0]
        return wanted_by if wanted_by in ranks else ranks[wanted_by % len(ranks)]


def gather_catalog(
    live: Sequence[LiveTensor], pieces: Mapping[str, Sequence[Piece]], group: dist.ProcessGroup | None
) -> dict[str, Held]:
    """The tensors of all ranks' models by name; one collective.

    Args:
        live: This rank's.
        pieces: What it holds of each, by name.
        group: The ranks.

    Raises:
        CheckpointError: Ranks disagree on a tensor, or elements of one are held by nobody or twice; on every rank.
    """
    mine = [
        (tensor.name, tensor.shape, tensor.dtype, tensor.is_shared_out, _boxes(tensor, pieces[tensor.name]))
        for tensor in live
    ]
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, theirs in enumerate(gather_objects(mine, group)):
        for name, shape, dtype, is_shared_out, boxes in theirs:
            kind = kinds.setdefault(name, (shape, dtype, is_shared_out))
            if kind != (shape, dtype, is_shared_out):
                raise CheckpointError(
                    f"{name} is {shape} {dtype} on rank {rank}, and {kind[0]} {kind[1]} on one before it; all ranks "
                    "have to save the same model"
                )
            for box in boxes:
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    found = {}
    for name, (shape, dtype, is_shared_out) in kinds.items():
        ranks = {box: tuple(of_box) for box, of_box in holders.get(name, {}).items()}
        _check_cover(name, shape, ranks)
        found[name] = Held(shape, dtype, ranks, is_shared_out)
    return found


def _boxes(tensor: LiveTensor, pieces: Sequence[Piece]) -> list[Box]:
    return [box for box, _ in pieces] if tensor.is_saved_here else []


def _check_cover(name: str, shape: tuple[int, ...], boxes: Mapping[Box, object]) -> None:
    numel, held = torch.Size(shape).numel(), sum(box.numel for box in boxes)
    if held != numel:
        raise CheckpointError(
            f"the ranks hold {held} elements of {name}, which has {numel}; all ranks that share the model have to take "
            "part (see the argument group), and each has to have another part or the same one"
        )
