"""Which samples a step sees, in which order, and what feeds them: the same on any number of ranks."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.train.data.tokens import (
    Batch,
    Feed,
    Microbatches,
    Permutation,
    SampleOrder,
    TokenData,
    TokenFile,
    cut_samples,
    held_out_batches,
    make_feed,
)
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import BatchPlan, Job, World, resolve
from tests.support.array_tokens import in_memory


@given(count=st.integers(1, 600), key=st.binary(max_size=32))
def test_every_place_is_taken_once(count: int, key: bytes) -> None:
    permutation = Permutation(count, key)
    assert sorted(permutation(i) for i in range(count)) == list(range(count))


def test_the_permutation_is_this_one_on_every_machine() -> None:
    assert [Permutation(10, b"key")(i) for i in range(10)] == [0, 7, 8, 6, 5, 3, 1, 9, 4, 2]


@given(tokens=st.integers(2, 400), length=st.integers(1, 30), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_learns_every_token_once_but_a_rest(tokens: int, length: int, seed: int, epoch: int) -> None:
    length = min(length, tokens - 1)
    order = SampleOrder(tokens, length, seed)
    starts = sorted(order.start(epoch * order.samples + k) for k in range(order.samples))
    assert starts == list(range(starts[0], starts[0] + order.samples * length, length))  # targets side by side
    assert starts[0] >= 0
    assert starts[-1] + length + 1 <= tokens
    assert tokens - 1 - order.samples * length < length  # what is left out is less than a sample


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [SampleOrder(1001, 10, seed) for seed in (0, 1)]
    shuffles = [tuple(order.start(e * 100 + k) for k in range(100)) for order in orders for e in range(3)]
    assert len(set(shuffles)) == 6
    assert {frozenset(shuffle) for shuffle in shuffles} == {frozenset(range(0, 1000, 10))}


def test_the_rest_moves_so_that_no_token_is_always_left_out() -> None:
    order = SampleOrder(25, 10, 0)  # 2 samples, 4 targets over
    begins = {min(order.start(2 * epoch), order.start(2 * epoch + 1)) for epoch in range(40)}
    assert begins == {0, 1, 2, 3, 4}


TOKENS = np.arange(200, dtype=np.uint8)
LENGTH = 7
ORDER = SampleOrder(len(TOKENS), LENGTH, seed=3)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    path = tmp_path_factory.mktemp("tokens") / "training.bin"
    path.write_bytes(TOKENS.tobytes())
    return TokenFile(path, "|u1", 0, len(TOKENS))


def data_of(file: TokenFile) -> TokenData:
    return TokenData(file, in_memory(TOKENS[:101]), 256, 0, "checksum")


def job_of(*options: str, ranks: int = 1) -> Job:
    asked = ["--preset", "tiny", "--seq-length", str(LENGTH), "--seed", "3", "--micro-batch-size", "2", *options]
    return resolve(parse_options(asked), World(ranks, "cpu"))


def samples_of(file: TokenFile, plan: BatchPlan, first: int) -> tuple[list[list[int]], int]:
    """Inputs of the samples of a step that count, over all ranks and in their order, and their checksum."""
    rows, checksum = [], 0
    for microbatch in range(plan.microbatches):
        for rank in range(plan.ranks):
            batch = Microbatches(file, ORDER, plan, rank)[first, microbatch]
            assert batch.inputs.shape == (plan.micro, LENGTH)
            rows += [row.tolist() for row, count in zip(batch.inputs, batch.counts, strict=True) if count == LENGTH]
            checksum += batch.checksum
    return rows, checksum


def equal(one: list[Batch], other: list[Batch]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(
        torch.equal(a.inputs, b.inputs)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.weights, b.weights)
        and a.checksum == b.checksum
        for a, b in pairs
    )


@given(micro=st.integers(1, 5), ranks=st.integers(1, 4), total=st.integers(1, 14), first=st.integers(0, 100))
def test_a_step_has_the_same_samples_for_any_ranks_and_microbatches(
    token_file: TokenFile, micro: int, ranks: int, total: int, first: int
) -> None:
    rows, checksum = samples_of(token_file, BatchPlan(micro, total, ranks), first)
    starts = [ORDER.start(first + place) for place in range(total)]
    assert rows == [list(range(start, start + LENGTH)) for start in starts]
    assert checksum == samples_of(token_file, BatchPlan(1, total, 1), first)[1]


@pytest.mark.full(short=["1"])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_going_on_at_any_sample_gives_what_an_uninterrupted_run_has(token_file: TokenFile, num_workers: int) -> None:
    job = job_of("--global-batch-size", "6", "--num-workers", str(num_workers))
    plain = Microbatches(token_file, ORDER, job.batch, 0)
    feed = make_feed(data_of(token_file), job, 0)
    for first in (0, 6, 12, 18, 30, 36, 6, 7, 13):  # in order, ahead, in order, back, and with another batch size
        assert equal(feed.batches(first), [plain[first, microbatch] for microbatch in range(3)])
    feed.close()


def test_ranks_of_one_data_rank_get_equal_batches_and_other_seeds_others(token_file: TokenFile) -> None:
    before = torch.get_rng_state()
    jobs = [job_of("--global-batch-size", "8", "--seed", seed, ranks=2) for seed in ("3", "4")]
    chosen = ((0, 1), (0, 1), (0, 0), (1, 1))
    found = [make_feed(data_of(token_file), jobs[job], index).batches(8) for job, index in chosen]
    assert [equal(found[0], other) for other in found[1:]] == [True, False, False]
    assert torch.equal(torch.get_rng_state(), before)  # the random numbers of the model are left alone


def test_targets_are_the_inputs_shifted_by_one() -> None:
    batch = cut_samples(TOKENS, [0, 5, None], LENGTH)
    assert batch.inputs.tolist() == [list(range(7)), list(range(5, 12)), list(range(7))]
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert batch.counts.tolist() == [7.0, 7.0, 0.0]
    assert batch.checksum == cut_samples(TOKENS, [0, 5], LENGTH).checksum != 0
    only_filled = cut_samples(TOKENS, [None, None], LENGTH)
    assert (only_filled.inputs.shape, only_filled.counts.tolist(), only_filled.checksum) == ((2, 7), [0.0, 0.0], 0)


def test_ends_of_texts_are_not_learned_where_the_job_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes([5, 0, 6, 7, 0, 8, 9, 4]))
    data = data_of(TokenFile(tmp_path / "a", "|u1", 0, 8))
    (plain,) = make_feed(data, job_of("--micro-batch-size", "1"), 0).batches(0)
    (masked,) = make_feed(data, job_of("--micro-batch-size", "1", "--eod-mask-loss"), 0).batches(0)
    assert plain.targets.tolist() == masked.targets.tolist() == [[0, 6, 7, 0, 8, 9, 4]]
    assert plain.weights.tolist() == [[1.0] * 7]
    assert masked.weights.tolist() == [[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]]
    assert plain.checksum == masked.checksum


@pytest.fixture
def workers() -> Callable[[], set[int | None]]:
    """Asks for the processes that were started since the test began; ranks of other tests may live in between."""
    before = {child.pid for child in multiprocessing.active_children()}
    return lambda: {child.pid for child in multiprocessing.active_children()} - before


def test_workers_outlive_signals_that_a_rank_deals_with(
    token_file: TokenFile, workers: Callable[[], set[int | None]]
) -> None:
    feed = make_feed(data_of(token_file), job_of("--num-workers", "1"), 0)
    feed.batches(0)
    (worker,) = workers()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert worker is not None
        os.kill(worker, number)
    for step in range(1, 20):  # beyond what was prepared already
        feed.batches(2 * step)
    assert workers() == {worker}
    feed.close()


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_for_an_accelerator_are_pinned(token_file: TokenFile, num_workers: int) -> None:
    plain = Microbatches(token_file, ORDER, BatchPlan(2, 4, 1), 0)
    feed = Feed(plain, num_workers=num_workers, pins=True)
    found = feed.batches(4)
    feed.close()
    assert all(batch.inputs.is_pinned() and batch.targets.is_pinned() and batch.weights.is_pinned() for batch in found)
    assert equal(found, [plain[4, 0], plain[4, 1]])


def test_held_out_samples_are_spread_and_do_not_overlap(token_file: TokenFile) -> None:
    def starts(tokens: int, max_samples: int) -> list[int]:
        data = replace(data_of(token_file), held_out=in_memory(TOKENS[:tokens]))
        (batch,) = held_out_batches(data, 10, max_samples, BatchPlan(100, 12, 1), 0)
        return [int(first) for first, count in zip(batch.inputs[:, 0], batch.counts, strict=True) if count > 0]

    assert starts(101, max_samples=100) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert starts(101, max_samples=4) == [0, 20, 50, 70]
    assert starts(11, max_samples=4) == [0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_held_out_samples_are_each_counted_once_whatever_the_ranks(token_file: TokenFile, num_ranks: int) -> None:
    data, plan = data_of(token_file), BatchPlan(2, 12, num_ranks)
    per_rank = [list(held_out_batches(data, 10, 100, plan, rank)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1  # all ranks do the same number of forwards
    counted = [
        int(first)
        for batches in per_rank
        for batch in batches
        for first, count in zip(batch.inputs[:, 0], batch.counts, strict=True)
        if count > 0
    ]
    assert sorted(counted) == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
