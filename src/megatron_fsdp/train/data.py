"""Batches of token ids: which samples a step sees is a pure function of the seed, so ranks never talk about data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.corpus import Corpus
from megatron_fsdp.train.vocabulary import TokenArray, Vocabulary

TRAINING_FILE = "training.npy"
HELD_OUT_FILE = "held_out.npy"


@dataclass(frozen=True)
class TokenSets:
    """The corpus as token ids.

    Attributes:
        training: Ids to train on.
        held_out: Ids to evaluate on.
        held_out_bytes: UTF-8 bytes that the held-out ids stand for (for bits per byte).
    """

    training: TokenArray
    held_out: TokenArray
    held_out_bytes: int


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank.

    Attributes:
        inputs: [samples, length] int64 token ids.
        targets: [samples, length] int64, the token after each input.
        weights: [samples] float32; 0 marks a sample that only fills the batch up.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Share:
    """Which part of every global batch belongs to a rank.

    Attributes:
        rank: This rank.
        num_ranks: Ranks that share a batch.
        batch_size: Samples per rank and microbatch.
    """

    rank: int
    num_ranks: int
    batch_size: int

    def sample_indices(self, microbatch: int) -> range:
        """Return the indices, within the global batch of a step, of this rank's samples."""
        start = (microbatch * self.num_ranks + self.rank) * self.batch_size
        return range(start, start + self.batch_size)


def encode_corpus(corpus: Corpus, vocabulary: Vocabulary) -> TokenSets:
    """Turn both sides of a corpus into token ids."""
    held_out_bytes = sum(len(text.encode()) + 1 for text in corpus.held_out)
    return TokenSets(vocabulary.encode(corpus.training), vocabulary.encode(corpus.held_out), held_out_bytes)


def require_enough_tokens(sets: TokenSets, sequence_length: int) -> None:
    """Check that both sides hold at least one whole sample.

    Raises:
        ConfigurationError: The corpus is too small.
    """
    for name, tokens in (("training", sets.training), ("held-out", sets.held_out)):
        if len(tokens) <= sequence_length:
            raise ConfigurationError(
                f"the {name} text has {len(tokens):,} tokens and one sample needs {sequence_length + 1:,}: "
                "give --data more text or lower --sequence-length"
            )


def save_token_sets(sets: TokenSets, folder: Path) -> None:
    """Write both sides as .npy files."""
    np.save(folder / TRAINING_FILE, sets.training)
    np.save(folder / HELD_OUT_FILE, sets.held_out)


def load_token_sets(folder: Path, held_out_bytes: int) -> TokenSets:
    """Map the files of `save_token_sets` into memory, which all ranks of a machine then share."""
    training = np.load(folder / TRAINING_FILE, mmap_mode="r")
    return TokenSets(training, np.load(folder / HELD_OUT_FILE, mmap_mode="r"), held_out_bytes)


def sample_start(seed: int, step: int, index: int, num_starts: int) -> int:
    """Return where sample `index` of the global batch of `step` starts, in [0, num_starts)."""
    return int(np.random.default_rng((seed, step, index)).integers(num_starts))


def cut_samples(tokens: TokenArray, starts: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [samples, length] that begin at these places."""
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    samples = torch.from_numpy(rows)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def training_batch(tokens: TokenArray, length: int, seed: int, step: int, indices: Sequence[int]) -> Batch:
    """Return the samples with these indices of the global batch of a step."""
    starts = [sample_start(seed, step, index, len(tokens) - length) for index in indices]
    inputs, targets = cut_samples(tokens, starts, length)
    return Batch(inputs, targets, torch.ones(len(starts)))


def held_out_starts(num_tokens: int, length: int, max_samples: int) -> list[int]:
    """Return evenly spaced starts of at most `max_samples` samples that do not overlap."""
    available = (num_tokens - 1) // length
    count = min(available, max_samples)
    return [i * available // count * length for i in range(count)]


def held_out_batches(tokens: TokenArray, length: int, max_samples: int, share: Share) -> list[Batch]:
    """Return this rank's part of the held-out samples.

    Every rank gets the same number of batches, since evaluating a sharded model takes all ranks; what is missing is
    filled up with samples of weight 0, so that the mean does not depend on the number of ranks.
    """
    starts = held_out_starts(len(tokens), length, max_samples)
    rounds = -(-len(starts) // (share.num_ranks * share.batch_size))
    batches = []
    for i in range(rounds):
        indices = share.sample_indices(i)
        inputs, targets = cut_samples(tokens, [starts[j % len(starts)] for j in indices], length)
        batches.append(Batch(inputs, targets, torch.tensor([float(j < len(starts)) for j in indices])))
    return batches
