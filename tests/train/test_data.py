from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_fsdp.train.corpus import Corpus
from megatron_fsdp.train.vocabulary import ByteVocabulary

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data import (
    Share,
    TokenSets,
    encode_corpus,
    held_out_batches,
    held_out_starts,
    load_token_sets,
    require_enough_tokens,
    sample_start,
    save_token_sets,
    training_batch,
)

TOKENS = np.arange(200, dtype=np.uint8)


def global_batch(num_ranks: int, microbatches: int, total: int = 12) -> torch.Tensor:
    batch_size = total // num_ranks // microbatches
    parts = [
        training_batch(TOKENS, 7, 5, 3, Share(rank, num_ranks, batch_size).sample_indices(microbatch)).inputs
        for microbatch in range(microbatches)
        for rank in range(num_ranks)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(("num_ranks", "microbatches"), [(2, 1), (3, 1), (4, 1), (1, 2), (2, 3)])
def test_global_batch_does_not_depend_on_the_number_of_ranks(num_ranks: int, microbatches: int) -> None:
    assert torch.equal(global_batch(num_ranks, microbatches), global_batch(1, 1))


def test_same_seed_and_step_give_the_same_batch_and_others_do_not() -> None:
    first = training_batch(TOKENS, 7, seed=1, step=2, indices=range(8)).inputs
    assert torch.equal(first, training_batch(TOKENS, 7, seed=1, step=2, indices=range(8)).inputs)
    assert not torch.equal(first, training_batch(TOKENS, 7, seed=1, step=3, indices=range(8)).inputs)
    assert not torch.equal(first, training_batch(TOKENS, 7, seed=2, step=2, indices=range(8)).inputs)


def test_targets_are_the_inputs_shifted_by_one() -> None:
    batch = training_batch(TOKENS, 7, seed=0, step=0, indices=range(4))
    assert batch.inputs.shape == batch.targets.shape == (4, 7)
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)  # the tokens are 0, 1, 2, ...
    assert batch.weights.tolist() == [1.0] * 4


def test_every_possible_start_is_drawn_and_none_beyond() -> None:
    starts = {sample_start(0, 0, index, num_starts=5) for index in range(200)}
    assert starts == {0, 1, 2, 3, 4}


def test_shortest_corpus_gives_one_sample() -> None:
    batch = training_batch(TOKENS[:8], 7, seed=0, step=0, indices=[0])
    assert batch.inputs.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert batch.targets.tolist() == [[1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(("training", "held_out", "side"), [(7, 200, "training"), (200, 7, "held-out")])
def test_too_small_corpus_is_refused_with_the_numbers(training: int, held_out: int, side: str) -> None:
    sets = TokenSets(TOKENS[:training], TOKENS[:held_out], held_out)
    with pytest.raises(ConfigurationError, match=rf"the {side} text has 7 tokens and one sample needs 8: .*--data"):
        require_enough_tokens(sets, 7)


def test_corpus_of_exactly_one_sample_is_enough() -> None:
    require_enough_tokens(TokenSets(TOKENS[:8], TOKENS[:8], 8), 7)


def test_held_out_samples_are_spread_and_do_not_overlap() -> None:
    assert held_out_starts(101, 10, max_samples=100) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert held_out_starts(101, 10, max_samples=4) == [0, 20, 50, 70]
    assert held_out_starts(11, 10, max_samples=4) == [0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_held_out_samples_are_each_counted_once_whatever_the_ranks(num_ranks: int) -> None:
    per_rank = [held_out_batches(TOKENS[:101], 10, 100, Share(rank, num_ranks, 2)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1  # all ranks do the same number of forwards
    counted = [
        int(first)
        for batches in per_rank
        for batch in batches
        for first, weight in zip(batch.inputs[:, 0], batch.weights, strict=True)
        if weight > 0
    ]
    assert sorted(counted) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]


def test_token_sets_survive_saving_and_loading(tmp_path: Path) -> None:
    sets = encode_corpus(Corpus(("ab", "c"), ("dé",)), ByteVocabulary())
    assert sets.held_out_bytes == 4  # d, two bytes of é, and the separator
    save_token_sets(sets, tmp_path)
    loaded = load_token_sets(tmp_path, sets.held_out_bytes)
    assert loaded.training.tolist() == [97, 98, 0, 99, 0]
    assert loaded.held_out.tolist() == [100, 0xC3, 0xA9, 0]
    assert loaded.training.dtype == np.uint8
