"""Token ids in Megatron's pair of files, mapped into memory, and the samples of them that each step sees.

Of the pair PREFIX.bin holds ids, and PREFIX.idx says where. The index, little-endian:
the magic `MMIDIDX` and two zero bytes, the version (u64), the code of the ids' type (u8), the number of sequences S
(u64) and of ends of documents D (u64); then S int32 lengths in tokens, S int64 places in bytes, and D int64 numbers of
sequences at which documents end, the first of them 0. S bytes of modes may follow.

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
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.job import BatchPlan, Job

TokenArray = NDArray[np.integer]
"""[tokens] ids of any integer type."""

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCK = 4 * 1024**2  # tokens, or sequences, looked at in one go


@dataclass(frozen=True)
class TokenFile:
    """A range of `count` token ids in a file, from the byte `offset` on; `dtype` is numpy's, such as `<u2`."""

    path: Path
    dtype: str
    offset: int
    count: int

    @property
    def itemsize(self) -> int:
        """The bytes of an id."""
        return np.dtype(self.dtype).itemsize

    def open(self) -> TokenArray:
        """Map the ids into memory, read-only."""
        needed = self.offset + self.count * self.itemsize
        try:
            size = self.path.stat().st_size
            if size < needed:
                raise ConfigurationError(
                    f"{self.path} has {size:,} bytes where {needed:,} are needed: it was damaged; remove its folder, "
                    "or make the file again"
                )
            if self.count == 0:  # nothing can be mapped
                return np.empty(0, self.dtype)
            return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.count,))
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read ({error.strerror}): it holds the tokens") from None

    def part(self, start: int, stop: int) -> TokenFile:
        """Return the range between two tokens, counted from the beginning of this one."""
        return TokenFile(self.path, self.dtype, self.offset + start * self.itemsize, stop - start)


def dtype_for(vocab_size: int) -> np.dtype[np.integer]:
    """Return the smallest dtype of Megatron's files for ids below `vocab_size`: uint8, uint16 or int32."""
    for limit, name in ((2**8, "|u1"), (2**16, "<u2"), (2**31, "<i4")):
        if vocab_size <= limit:
            return np.dtype(name)
    raise ConfigurationError(f"invalid --vocab-size {vocab_size:,}: give at most {2**31:,}")


def digest(file: TokenFile, vocab_size: int) -> str:
    """Check that all ids are below `vocab_size`; return a checksum in hex, which does not depend on their dtype."""
    found = hashlib.blake2b(digest_size=16)
    tokens = file.open()
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        if int(block.min()) < 0 or int(block.max()) >= vocab_size:
            place = int(np.argmax((block < 0) | (block >= vocab_size)))
            raise ConfigurationError(
                f"token {start + place:,} of {file.path} has id {int(block[place])}, and ids are 0 to "
                f"{vocab_size - 1}: give the tokenizer, or the --vocab-size, that the file was made with"
            )
        found.update(block.astype("<i4", copy=False).tobytes())
    return found.hexdigest()


def bin_of(prefix: Path) -> Path:
    """Return the file of ids of a pair."""
    return prefix.with_name(prefix.name + ".bin")


def idx_of(prefix: Path) -> Path:
    """Return the index of a pair."""
    return prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True)
class Indexed:
    """A pair of matching files."""

    tokens: TokenFile
    lengths: NDArray[np.int32]  # [S] tokens of each sequence
    pointers: NDArray[np.int64]  # [S] byte at which each begins
    ends: NDArray[np.int64]  # [D] sequences before each document; the last is S

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.ends) - 1

    def document_start(self, document: int) -> int:
        """Return the number of tokens before a document; for the index after the last, the number of all."""
        sequence = int(self.ends[document])
        is_end = sequence == len(self.pointers)
        return self.tokens.count if is_end else int(self.pointers[sequence]) // self.tokens.itemsize


def write_index(prefix: Path, dtype: np.dtype[np.integer], lengths: Sequence[int], ends: Sequence[int]) -> None:
    """Write the index of a pair whose sequences lie one after another."""
    code = next(code for code, name in _DTYPES.items() if np.dtype(name) == dtype)
    sizes = np.array(lengths, "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * dtype.itemsize
    header = _HEADER.pack(MAGIC, VERSION, code, len(lengths), len(ends))
    idx_of(prefix).write_bytes(header + sizes.tobytes() + pointers.tobytes() + np.array(ends, "<i8").tobytes())


def open_indexed(prefix: Path) -> Indexed:
    """Map a pair of files into memory; neither is read whole."""
    index, ids = idx_of(prefix), bin_of(prefix)
    for path in (index, ids):
        if not path.is_file():
            raise ConfigurationError(f"{path} does not exist: {prefix}.bin and {prefix}.idx belong together")
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise ConfigurationError(f"{index} does not begin as Megatron's index files do: give the prefix of such a pair")
    _, version, code, sequences, ends = _HEADER.unpack(head)
    if version != VERSION:
        raise ConfigurationError(f"{index} has version {version} and only {VERSION} is known: write it with that one")
    if code not in _DTYPES:
        raise ConfigurationError(f"{index} says that ids have the type {code}: give whole numbers, {sorted(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code])
    offsets = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * ends])
    if index.stat().st_size not in (offsets[3], offsets[3] + sequences):
        raise ConfigurationError(f"{index} has not the {offsets[3]:,} bytes that its header says: make it again")
    if sequences == 0:
        raise ConfigurationError(f"{index} holds no sequence: give token files with text in them")
    found = Indexed(
        TokenFile(ids, dtype.str, 0, ids.stat().st_size // dtype.itemsize),
        np.memmap(index, "<i4", "r", int(offsets[0]), (sequences,)),
        np.memmap(index, "<i8", "r", int(offsets[1]), (sequences,)),
        np.memmap(index, "<i8", "r", int(offsets[2]), (ends,)),
    )
    _check(found, index)
    return found


def _check(found: Indexed, index: Path) -> None:
    """Check that every sequence begins where the one before it ends, so that the ids are contiguous."""
    expected = 0
    for start in range(0, len(found.lengths), _BLOCK):
        sizes = found.lengths[start : start + _BLOCK].astype(np.int64) * found.tokens.itemsize
        stops = expected + np.cumsum(sizes)
        if not np.array_equal(found.pointers[start : start + _BLOCK], stops - sizes):
            raise ConfigurationError(f"{index}: sequences do not lie one after another: write the pair again")
        expected = int(stops[-1])
    size = found.tokens.path.stat().st_size
    if expected != size:
        raise ConfigurationError(
            f"{found.tokens.path} has {size:,} bytes and its index says {expected:,}: they are not of one pair, or "
            "one was damaged; make them again"
        )
    ends = found.ends
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(found.lengths) or bool(np.any(np.diff(ends) < 0)):
        raise ConfigurationError(f"{index}: ends of documents do not go from 0 to {len(found.lengths)}: make it again")


@dataclass(frozen=True)
class TokenData:
    """The text as token ids, in files that ranks of a machine map into the same memory."""

    training: TokenFile
    held_out: TokenFile
    vocab_size: int
    end_id: int | None  # of the token that ends a text; None: not known
    checksum: str  # of all ids, whatever their dtype
    notes: tuple[str, ...] = ()  # remarks on the preparation, for the header


# ---- samples ---------------------------------------------------------------------------------------------------------


_ROUNDS = 6
_STEPS_AHEAD = 2

Place = tuple[int, int]
"""The first sample of a step, and the number of a microbatch in it."""


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 ... count - 1 that looks random and is computed value by value, without memory.

    A balanced Feistel network (Luby and Rackoff 1988) permutes the smallest power of four that is not below `count`;
    values outside are permuted again (cycle walking; Black and Rogaway 2002). `key` has at most 64 bytes.
    """

    count: int
    key: bytes

    def __call__(self, index: int) -> int:
        """Return the image of `index`, both from 0 to count - 1."""
        half = max(1, ((self.count - 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        while True:
            left, right = index >> half, index & mask
            for number in range(_ROUNDS):
                message = number.to_bytes(1, "little") + right.to_bytes(8, "little")
                mixed = hashlib.blake2b(message, digest_size=8, key=self.key).digest()
                left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
            index = left << half | right
            if index < self.count:
                return index


@dataclass(frozen=True)
class SampleOrder:
    """The first token of every sample of a run of `length` targets, in a text of `tokens`."""

    tokens: int
    length: int
    seed: int

    @property
    def samples(self) -> int:
        """The samples of an epoch."""
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
        """The number of learned targets of each sample, [samples] float32."""
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

    A place of None is a filler: the first sample of the text, with weights 0.
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


@dataclass(frozen=True)
class Microbatches(Dataset[Batch]):
    """The microbatches of one data-parallel rank, by their places; independent of reader and time."""

    tokens: TokenFile
    order: SampleOrder
    plan: BatchPlan
    data_index: int
    unlearned: int | None = None  # the target that does not count

    def __getitem__(self, place: Place) -> Batch:
        first, microbatch = place
        numbers = self.plan.positions(self.data_index, microbatch)
        starts = [None if number is None else self.order.start(first + number) for number in numbers]
        batch = cut_samples(self.tokens.open(), starts, self.order.length, self.unlearned)
        return replace(
            batch, dropout_seed=self.order.dropout_seed(first + self.plan.place(self.data_index, microbatch))
        )


class Feed:
    """Gives a rank its microbatches through torch's `DataLoader`, whose workers prefetch consecutive steps."""

    def __init__(self, microbatches: Microbatches, *, num_workers: int, pins: bool) -> None:
        """Prefetch in `num_workers` processes (0: none, batches are made on demand), into pinned memory if `pins`."""
        self._microbatches, self._num_workers, self._pins = microbatches, num_workers, pins
        self._iterator: Iterator[Batch] | None = None
        self._next = 0

    def batches(self, first_sample: int) -> list[Batch]:
        """Return this rank's microbatches of the step whose first sample over all ranks and steps is `first_sample`."""
        plan = self._microbatches.plan
        if self._iterator is None or first_sample != self._next:
            self.close()
            self._iterator = self._start(first_sample)
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

    Every rank gets the same number of batches, since evaluating a sharded model takes all ranks; a remainder is filled
    up with samples that do not count, so that the mean does not depend on the number of ranks.
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
    """Ignore signals that ask the ranks to end; the rank handles them, and a worker ends with its rank."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
