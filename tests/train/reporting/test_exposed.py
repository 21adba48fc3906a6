"""Exposed communication is measured in one step of each interval, and changes no bit of the training."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.trace.recorder import Recorder
from megatron_fsdp.train.engines.build import build
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.loop import Run, train
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.exposed import ExposedCommunication
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord
from megatron_fsdp.train.reporting.speed import Speed
from tests.conftest import RunRanks
from tests.support.array_tokens import feed_of, token_data

SIZES = {"--seq-length": 16, "--micro-batch-size": 2, "--train-iters": 7, "--log-interval": 3}
FLAGS = ("--preset", "tiny", *(str(word) for item in SIZES.items() for word in item))
BUCKETS = (
    "--no-use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "no_shard",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
)


class Notes:
    """A watcher and a keeper that only take notes."""

    is_interrupted = False

    def __init__(self) -> None:
        self.began: list[int] = []
        self.calls: list[list[StepRecord]] = []

    def start(self, progress: Progress | None = None) -> Any:
        if progress is not None:
            self.began.append(progress.steps)
        return Progress()

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        self.calls.append(list(records))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Not looked at."""

    def say(self, text: str) -> None:
        raise AssertionError(text)

    def is_due(self, step: int) -> bool:  # noqa: ARG002
        return False

    def save(self, progress: Progress) -> None:
        """Nothing."""


class HereRank(Rank):
    """A rank whose launcher is not looked for."""

    def require_launcher(self) -> None:
        """It lives."""


def trained(flags: Sequence[str]) -> tuple[list[list[StepRecord]], list[int], int, list[torch.Tensor]]:
    """What a run tells its watcher, how often it recorded, and this rank's weights at its end."""
    rank = HereRank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), 0)
    job = resolve(parse_options([*FLAGS, *flags]), World(rank.count, "cpu"))
    tokens = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16)
    data = token_data(tokens, tokens[:400], 400)
    built = build(job, data.vocabulary.vocab_size, rank)
    feed = feed_of(data, job, built.data_index)
    notes = Notes()
    speed = Speed(job.tokens_per_step, flops=2e9, ranks=rank.count, peak_tflops=0.5)
    with patch.object(Recorder, "start", autospec=True, side_effect=Recorder.start) as started:
        train(Run(job, built, data, feed, rank, speed), notes, notes)
    weights = [parameter.to_local().detach().clone() for parameter in built.model.parameters()]  # type: ignore[operator]
    return notes.calls, notes.began, started.call_count, weights


@pytest.mark.full(short=["units"])
@pytest.mark.parametrize("flags", [(), BUCKETS], ids=["units", "buckets"])
def test_one_step_of_each_interval_is_measured_and_no_bit_changes(run_ranks: RunRanks, flags: tuple[str, ...]) -> None:
    measured = run_ranks(2, trained, flags)
    plain = run_ranks(2, trained, (*flags, "--no-log-exposed-communication"))
    calls, began, recordings, _ = measured[0]
    assert began == [0]
    assert (recordings, plain[0][2]) == (3, 0)
    steps = [[record.step for record in call] for call in calls]
    shares = {record.step: record.exposed_share for call in calls for record in call}
    assert steps == [[1, 2, 3], [4, 5, 6], [7]]
    assert all(0 < shares[step] < 1 for step in (3, 6, 7))
    assert all(math.isnan(shares[step]) for step in (1, 2, 4, 5))
    assert {r.step: r.exposed_share for call in measured[1][0] for r in call if r.step in (3, 6, 7)} == {
        step: shares[step] for step in (3, 6, 7)
    }
    assert all(math.isnan(record.exposed_share) for call in plain[0][0] for record in call)
    for (with_it, *_, ours), (without, *_, theirs) in zip(measured, plain, strict=True):
        losses = [[(r.loss, r.grad_norm) for call in calls for r in call] for calls in (with_it, without)]
        assert losses[0] == losses[1]
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_each_step_has_its_own_speed(run_ranks: RunRanks) -> None:
    calls, *_ = run_ranks(2, trained, ("--no-log-exposed-communication",))[0]
    records = [record for call in calls for record in call]
    assert len({record.step_s for record in records}) == len(records)
    for before, record in zip([None, *records], records, strict=False):
        assert record.step_s == record.elapsed_s - (0.0 if before is None else before.elapsed_s)
        assert math.isclose(record.tokens_per_s, 2 * 2 * 16 / record.step_s)
        assert math.isclose(record.tflops, 2e9 / record.step_s / 2 / 1e12)
        assert math.isclose(record.mfu, record.tflops / 0.5)


class _Foreign:
    """An engine that cannot be observed."""

    inside = None
    device = torch.device("cpu")


def test_an_engine_without_phases_is_not_measured() -> None:
    meter = ExposedCommunication(_Foreign(), is_wanted=True)  # type: ignore[arg-type]
    with meter.step(is_measured=True), nullcontext():
        pass
    assert math.isnan(meter.take_share())
