"""Peaks, memory and exposed communication as they are measured."""

import math
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_fsdp.trace.recorder import Recorder
from megatron_fsdp.train.loop import Run, train
from megatron_fsdp.train.measure import Speed, StepRecord, optimizer_bytes, peak_by_name, peak_bytes, peak_tflops
from megatron_fsdp.train.models.trained import build
from tests.conftest import RunRanks
from tests.support.array_tokens import feed_of, token_data
from tests.support.on_ranks import on_ranks
from tests.support.train_program import job_of_words, this_rank
from tests.train.models.runs import NoCheckpoints, Silent


@on_ranks(2)
def test_state_that_rests_on_the_host_is_not_counted_in_the_peak() -> None:
    peaks = []
    for fraction in ("0", "0.5", "1"):
        flags = "--preset tiny --seq-length 16 --optimizer-cpu-offload --optimizer-offload-fraction"
        job = job_of_words(f"{flags} {fraction}")
        built = build(job, 256, this_rank())
        for param in built.model.parameters():
            param.grad = torch.zeros_like(param)
        built.optimizer.step()
        assert built.inside is not None
        memory = built.inside.memory()
        peaks.append(peak_bytes(built) - memory.persistent_bytes - memory.transient_peak_bytes)
        assert peaks[-1] == optimizer_bytes(built.optimizer) - memory.offloaded.get("optimizer_state", 0)
    assert peaks[0] == optimizer_bytes(built.optimizer) > peaks[1] > peaks[2] == 0


def test_peaks_go_by_the_name_of_the_device_and_others_are_not_known() -> None:
    peaks = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA B200": 2250}
    assert {name: peak_by_name(name) for name in peaks} == peaks
    assert math.isnan(peak_by_name("NVIDIA RTX A1000"))
    job, told = (job_of_words(words) for words in ("--preset tiny", "--preset tiny --peak-tflops 2.5"))
    assert math.isnan(peak_tflops(job, torch.device("cpu")))
    assert math.isnan(peak_tflops(job, torch.device("cuda")))  # which computes in float32
    assert peak_tflops(told, torch.device("cpu")) == 2.5


FLAGS = "--preset tiny --seq-length 16 --micro-batch-size 2 --train-iters 7 --log-interval 3"
BUCKETS = (
    "--no-use-megatron-fsdp --data-parallel-sharding-strategy no_shard --use-distributed-optimizer "
    "--overlap-grad-reduce"
)


class Notes(Silent):
    """A watcher that keeps what belongs together."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[StepRecord]] = []

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        self.calls.append(list(records))


def trained(flags: str) -> tuple[list[list[StepRecord]], int, list[torch.Tensor]]:
    """What a run tells its watcher, how often it recorded, and this rank's weights at its end."""
    rank = this_rank()
    job = job_of_words(f"{FLAGS} {flags}", rank.count)
    tokens = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16)
    data = token_data(tokens, tokens[:400])
    built = build(job, data.vocab_size, rank)
    feed = feed_of(data, job, built.data_index)
    notes = Notes()
    speed = Speed(job.tokens_per_step, flops=2e9, ranks=rank.count, peak_tflops=0.5)
    with patch.object(Recorder, "start", autospec=True, side_effect=Recorder.start) as started:
        train(Run(job, built, data, feed, rank, speed), notes, NoCheckpoints())
    assert notes.said == []
    weights = [parameter.to_local().detach().clone() for parameter in built.model.parameters()]  # type: ignore[operator]
    return notes.calls, started.call_count, weights


@pytest.mark.full(short=["units"])
@pytest.mark.parametrize("flags", ["", BUCKETS], ids=["units", "buckets"])
def test_one_step_of_each_interval_is_measured_and_no_bit_changes(run_ranks: RunRanks, flags: str) -> None:
    measured = run_ranks(2, trained, flags)
    plain = run_ranks(2, trained, f"{flags} --no-log-exposed-communication")
    calls, recordings, _ = measured[0]
    assert (recordings, plain[0][1]) == (3, 0)
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
