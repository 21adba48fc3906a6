"""Microbatches of token ids: which samples a step sees, in which order, and what feeds them to the training loop.

A sample is `length + 1` tokens of the concatenated documents; neighbours share one token, which is the last target of
the one and the first input of the other. Sample n of all steps is number k of epoch e, (e, k) = divmod(n, samples), and
lies at place P_e(k), where P_e shuffles the places. So a run is resumed from the number n alone, and the
samples of a step do not depend on the number of ranks.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import signal
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.data.token_file import TokenArray, TokenFile
from megatron_fsdp.train.options.job import BatchPlan, Job

_ROUNDS = 6
_STEPS_AHEAD = 2

Place = tuple[int, int]
"""The first sample of a step, and the number of a microbatch in it."""


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 ... count - 1 that looks random and is computed value by value, without memory.

    A balanced Feistel network (Luby and Rackoff 1988) permutes the smallest power of four that is not below `count`;
    what falls outside goes through again (cycle walking; Black and Rogaway 2002). `key` has at most 64 bytes.
    """

    count: int
    key: bytes

    def __call__(self, index: int) -> int:
        """Return where `index` goes, both from 0 to count - 1."""
        half = max(1, ((self.count - 1).bit_length() + 1) // 2)
        found = self._walk(index, half)
        while found >= self.count:
            found = self._walk(found, half)
        return found

    def _walk(self, value: int, half: int) -> int:
        mask = (1 << half) - 1
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            message = number.to_bytes(1, "little") + right.to_bytes(8, "little")
            mixed = hashlib.blake2b(message, digest_size=8, key=self.key).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        return left << half | right


@dataclass(frozen=True)
class SampleOrder:
    """The place at which every sample of a run of `length` targets begins, in a text of `tokens`."""

    tokens: int
    length: int
    seed: int

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return (self.tokens - 1) // self.length

    def start(self, number: int) -> int:
        """Return the token at which a sample begins, by its number over all steps and epochs.

        Each epoch shifts its samples by a random offset within the remainder (less than a sample), so that no token is
        always left out.
        """
        epoch, index = divmod(number, self.samples)
        key = hashlib.blake2b(f"{self.seed}:{epoch}".encode(), digest_size=32).digest()
        rest = (self.tokens - 1) % self.length
        shift = int.from_bytes(key[:8], "little") % (rest + 1)
        return shift + self.length * Permutation(self.samples, key)(index)

    def dropout_seed(self, number: int) -> int:
        """Return a 63-bit seed for the dropout of a forward whose first sample has this number over all steps."""
        digest = hashlib.blake2b(f"{self.seed}:dropout:{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank."""

    inputs: Tensor  # [samples, length] int64 token ids
    targets: Tensor  # [samples, length] int64, the token after each input
    weights: Tensor  # [samples, length] float32: 1 where the target is learned, else 0, as in all that only fills up
    checksum: int = 0  # of tokens that count; sums over ranks are the same for any cut of the same samples
    dropout_seed: int = 0  # of the run and the first sample, so that any ranks drop the same

    @property
    def counts(self) -> Tensor:
        """[samples] float32: how many targets of each sample are learned."""
        return self.weights.sum(dim=1)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; `DataLoader` calls this."""
        inputs, targets, weights = (tensor.pin_memory() for tensor in (self.inputs, self.targets, self.weights))
        return replace(self, inputs=inputs, targets=targets, weights=weights)

    def factors_per_sample(self, total_samples: int) -> Tensor:
        """Return [samples, length] float32 factors for the mean over samples of their mean token loss."""
        return self.weights / self.counts[:, None].clamp(min=1.0) / total_samples

    def factors_per_token(self, total_tokens: float) -> Tensor:
        """Return [samples, length] float32 factors for the mean over all tokens that count."""
        return self.weights / max(1.0, total_tokens)


def cut_samples(tokens: TokenArray, starts: Sequence[int | None], length: int, unlearned: int | None = None) -> Batch:
    """Return the samples of `length` tokens that begin at given places; the target `unlearned` does not count.

    A place of None only fills up: the first sample of the text, with weights 0.
    """
    rows = np.stack([tokens[start or 0 : (start or 0) + length + 1] for start in starts]).astype(np.int64)
    is_real = [start is not None for start in starts]
    checksum = sum(zlib.crc32(row.tobytes()) for row, real in zip(rows, is_real, strict=True) if real)
    samples = torch.from_numpy(rows)
    inputs, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    weights = torch.tensor(is_real, dtype=torch.float32)[:, None].expand(targets.shape).clone()
    if unlearned is not None:
        weights *= targets != unlearned
    return Batch(inputs, targets, weights, checksum)


class Microbatches(Dataset[Batch]):
    """The microbatches of one data-parallel rank, by their places; independent of who reads them, and when."""

    def __init__(
        self, tokens: TokenFile, order: SampleOrder, plan: BatchPlan, data_index: int, unlearned: int | None = None
    ) -> None:
        """Cut the samples of a data-parallel rank out of a file; the target `unlearned` does not count."""
        self.plan = plan
        self._file, self._order, self._index, self._unlearned = tokens, order, data_index, unlearned

    def __getitem__(self, place: Place) -> Batch:
        first, microbatch = place
        numbers = self.plan.positions(self._index, microbatch)
        starts = [None if number is None else self._order.start(first + number) for number in numbers]
        batch = cut_samples(self._file.open(), starts, self._order.length, self._unlearned)
        return replace(batch, dropout_seed=self._order.dropout_seed(first + self.plan.place(self._index, microbatch)))


class Feed:
    """Gives a rank its microbatches through torch's `DataLoader`, whose workers prefetch consecutive steps."""

    def __init__(self, microbatches: Microbatches, *, num_workers: int, pins: bool) -> None:
        """Prefetch in `num_workers` processes (0: none, batches are made on demand), into pinned memory if `pins`."""
        self._microbatches, self._num_workers, self._pins = microbatches, num_workers, pins
        self._iterator: Iterator[Batch] | None = None
        self._next = 0

    def batches(self, first_sample: int) -> list[Batch]:
        """Return this rank's microbatches of the step whose first sample over all ranks and steps is `first_sample`."""
        if self._iterator is None or first_sample != self._next:
            self.close()
            self._iterator = self._start(first_sample)
        plan = self._microbatches.plan
        self._next = first_sample + plan.total
        return list(itertools.islice(self._iterator, plan.microbatches))

    def close(self) -> None:
        """Stop the workers."""
        self._iterator = None  # its workers end with it
        atexit.unregister(self.close)

    def _start(self, first_sample: int) -> Iterator[Batch]:
        plan, workers = self._microbatches.plan, self._num_workers
        loader: DataLoader[Batch] = DataLoader(
            self._microbatches,
            batch_size=None,
            sampler=((step, i) for step in itertools.count(first_sample, plan.total) for i in range(plan.microbatches)),
            num_workers=workers,
            pin_memory=self._pins,
            worker_init_fn=_outlive_interrupts,
            generator=torch.Generator(),  # the default one belongs to the model
            prefetch_factor=-(-_STEPS_AHEAD * plan.microbatches // workers) if workers else None,
        )
        atexit.register(self.close)  # before multiprocessing waits for workers that ignore its SIGTERM
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns of forks, which do not use it
        return iter(loader)


def make_feed(data: TokenData, job: Job, data_index: int, *, pins: bool = False) -> Feed:
    """Return the microbatches of a data-parallel rank; ranks that share the index get equal ones."""
    options = job.options
    order = SampleOrder(data.training.count, job.seq_length, options.training.seed)
    unlearned = data.end_id if options.data.eod_mask_loss else None
    microbatches = Microbatches(data.training, order, job.batch, data_index, unlearned)
    return Feed(microbatches, num_workers=options.data.num_workers, pins=pins)


def held_out_batches(
    data: TokenData, length: int, max_samples: int, plan: BatchPlan, data_index: int
) -> Iterator[Batch]:
    """Yield a data-parallel rank's part of the held-out samples: evenly spaced, never overlapping.

    Every rank gets the same number of batches, since evaluating a sharded model takes all ranks; a remainder is
    filled up with samples that do not count, so that the mean does not depend on the number of ranks.
    """
    tokens = data.held_out.open()
    available = (len(tokens) - 1) // length
    count = min(available, max_samples)
    starts = [i * available // count * length for i in range(count)]
    whole = BatchPlan(plan.micro, count, plan.ranks)
    for i in range(whole.microbatches):
        places = whole.positions(data_index, i)
        yield cut_samples(tokens, [None if place is None else starts[place] for place in places], length)


def _outlive_interrupts(_worker: int) -> None:
    """Ignore signals that ask the ranks to end, which are the rank's to handle; a worker ends with its rank."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
