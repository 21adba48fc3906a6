"""From token ids to samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from megatron_fsdp.train.data.batches import Batch, filled_up
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.data.vocabulary import TokenArray
from megatron_fsdp.train.options.batch import BatchPlan


def cut_samples(tokens: TokenArray, starts: Sequence[int], length: int) -> Batch:
    """Return the samples of `length` tokens that begin at these places; every target counts."""
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    samples = torch.from_numpy(rows)
    checksum = sum(zlib.crc32(row.tobytes()) for row in rows)
    inputs, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    return Batch(inputs, targets, torch.ones(targets.shape), checksum)


class SimpleFeed:
    """Samples drawn with replacement: where a sample begins follows from the seed and its number."""

    def __init__(self, data: TokenData, plan: BatchPlan, length: int, seed: int, data_index: int) -> None:
        """Feed data-parallel rank `data_index`."""
        self._tokens, self._plan, self._length, self._seed, self._index = data.training, plan, length, seed, data_index

    def batches(self, first_sample: int) -> list[Batch]:
        """See `Feed`."""
        return [self._batch(first_sample, microbatch) for microbatch in range(self._plan.microbatches)]

    def close(self) -> None:
        """See `Feed`."""

    def _batch(self, first_sample: int, microbatch: int) -> Batch:
        places = self._plan.positions(self._index, microbatch)
        starts = [self._start(first_sample + place) for place in places if place is not None]
        batch = cut_samples(self._tokens, starts + [0] * (len(places) - len(starts)), self._length)
        return filled_up(batch, tuple(place is not None for place in places))

    def _start(self, sample: int) -> int:
        return int(np.random.default_rng((self._seed, sample)).integers(len(self._tokens) - self._length))
