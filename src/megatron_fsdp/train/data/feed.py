"""Feeds a rank its microbatches through torch's `DataLoader`: processes that work ahead, and pinned memory."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron_fsdp.train.data.batches import Batch, Feed
from megatron_fsdp.train.data.order import SampleOrder
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.data.samples import cut_samples
from megatron_fsdp.train.data.token_file import TokenArray, TokenFile
from megatron_fsdp.train.options.job import BatchPlan, Job

_STEPS_AHEAD = 2
_QUIET = "TOKENIZERS_PARALLELISM"

Place = tuple[int, int]
"""The first sample of a step, and the number of a microbatch in it."""


def make_feed(data: TokenData, job: Job, data_index: int, *, pins: bool = False) -> Feed:
    """Return the microbatches of a data-parallel rank.

    Args:
        data: The tokens.
        job: How samples are cut and ordered, and how many workers there are.
        data_index: Which data-parallel rank; ranks that share it get equal batches.
        pins: Whether batches lie in pinned memory, for an accelerator.
    """
    options = job.options
    order = SampleOrder(len(data.training), job.seq_length, options.training.seed)
    unlearned = data.vocabulary.end_id if options.data.eod_mask_loss else None
    microbatches = Microbatches(data.training_file, order, job.batch, data_index, unlearned)
    return LoaderFeed(microbatches, num_workers=options.data.num_workers, pins=pins)


class Microbatches(Dataset[Batch]):
    """The microbatches of one data-parallel rank, by their places; the same whoever reads them, and when."""

    def __init__(
        self, tokens: TokenFile, order: SampleOrder, plan: BatchPlan, data_index: int, unlearned: int | None = None
    ) -> None:
        """Cut samples out of a file.

        Args:
            tokens: To train on.
            order: Where samples begin.
            plan: Which samples of a step are this rank's.
            data_index: Which data-parallel rank.
            unlearned: A target that does not count; None: all do.
        """
        self.plan = plan
        self._file, self._order, self._index, self._unlearned = tokens, order, data_index, unlearned
        self._tokens: TokenArray | None = None

    def __getitem__(self, place: Place) -> Batch:
        if self._tokens is None:  # mapped by each process that reads
            self._tokens = self._file.open()
        first, microbatch = place
        numbers = self.plan.positions(self._index, microbatch)
        starts = [None if number is None else self._order.start(first + number) for number in numbers]
        batch = cut_samples(self._tokens, starts, self._order.length, self._unlearned)
        return replace(batch, dropout_seed=self._order.dropout_seed(first + self.plan.place(self._index, microbatch)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}


@dataclass
class _Places(Sampler[Place]):
    """The places of all steps from one on, without an end."""

    first: int
    plan: BatchPlan

    def __iter__(self) -> Iterator[Place]:
        for first in itertools.count(self.first, self.plan.total):
            yield from ((first, microbatch) for microbatch in range(self.plan.microbatches))


class LoaderFeed:
    """See `Feed`: steps in their order are prepared ahead; after a jump, workers begin anew at the new place."""

    def __init__(self, microbatches: Microbatches, *, num_workers: int, pins: bool) -> None:
        """Feed from so many processes; 0: from this one, when asked."""
        self._microbatches, self._num_workers, self._pins = microbatches, num_workers, pins
        self._iterator: Iterator[Batch] | None = None
        self._next = 0

    def batches(self, first_sample: int) -> list[Batch]:
        """See `Feed`."""
        if self._iterator is None or first_sample != self._next:
            self.close()
            self._iterator = self._start(first_sample)
        plan = self._microbatches.plan
        self._next = first_sample + plan.total
        return list(itertools.islice(self._iterator, plan.microbatches))

    def close(self) -> None:
        """See `Feed`."""
        self._iterator = None  # its workers end with it
        atexit.unregister(self.close)

    def _start(self, first_sample: int) -> Iterator[Batch]:
        plan, workers = self._microbatches.plan, self._num_workers
        loader: DataLoader[Batch] = DataLoader(
            self._microbatches,
            batch_size=None,
            sampler=_Places(first_sample, plan),
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=self._pins,
            worker_init_fn=_outlive_interrupts,
            generator=torch.Generator(),  # the default one belongs to the model
            prefetch_factor=-(-_STEPS_AHEAD * plan.microbatches // workers) if workers else None,
        )
        atexit.register(self.close)  # before multiprocessing waits for workers that do not hear its SIGTERM
        with _quiet_forks():
            return iter(loader)


def _as_it_is(batch: Any) -> Any:
    return batch


def _outlive_interrupts(_worker: int) -> None:
    """Leave it to the rank what Ctrl-C or a SIGTERM to all processes means; a worker ends with its rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _quiet_forks() -> Iterator[None]:
    """Keep `tokenizers` from warning that its threads do not live on in workers, which do not use it."""
    before = os.environ.get(_QUIET)
    os.environ.setdefault(_QUIET, "false")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_QUIET, None)
