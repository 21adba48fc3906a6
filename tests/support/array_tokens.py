"""Token ids in memory where the trainer has them in a file."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_fsdp.train.data.tokens import Feed, Microbatches, SampleOrder, TokenData, TokenFile
from megatron_fsdp.train.options.job import Job


def in_memory(array: NDArray[Any]) -> TokenFile:
    """Ids that pass for those of a file, as far as a feed asks."""
    return cast("TokenFile", SimpleNamespace(count=len(array), open=lambda: array))


def token_data(training: NDArray[Any], held_out: NDArray[Any] | None = None) -> TokenData:
    held_out = np.zeros(0, training.dtype) if held_out is None else held_out
    return TokenData(in_memory(training), in_memory(held_out), vocab_size=256, end_id=0, checksum="no checksum")


def feed_of(data: TokenData, job: Job, data_index: int, unlearned: int | None = None) -> Feed:
    """The trainer's feed over them; targets of the id `unlearned` do not count."""
    order = SampleOrder(data.training.count, job.seq_length, job.options.training.seed)
    return Feed(Microbatches(data.training, order, job.batch, data_index, unlearned), num_workers=0, pins=False)
