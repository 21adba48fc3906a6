"""Samples to evaluate on: evenly spaced, never overlapping, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.data.samples import cut_samples
from megatron_fsdp.train.options.job import BatchPlan


def held_out_starts(num_tokens: int, length: int, max_samples: int) -> list[int]:
    """Return evenly spaced starts of at most `max_samples` samples that do not overlap."""
    available = (num_tokens - 1) // length
    count = min(available, max_samples)
    return [i * available // count * length for i in range(count)]


def held_out_batches(
    data: TokenData, length: int, max_samples: int, plan: BatchPlan, data_index: int
) -> Iterator[Batch]:
    """Yield a data-parallel rank's part of the held-out samples.

    Every rank gets the same number of batches, since evaluating a sharded model takes all ranks; what is missing is
    filled up with samples that do not count, so that the mean does not depend on the number of ranks.
    """
    starts = held_out_starts(len(data.held_out), length, max_samples)
    whole = BatchPlan(plan.micro, len(starts), plan.ranks)
    for i in range(whole.microbatches):
        places = whole.positions(data_index, i)
        yield cut_samples(data.held_out, [None if place is None else starts[place] for place in places], length)
