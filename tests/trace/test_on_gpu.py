"""On CUDA: times are those of streams, taken without waiting for them."""

from collections import Counter

import pytest
import torch

from megatron_fsdp.comm.collectives import StreamClock, make_clock
from megatron_fsdp.trace import Timeline
from megatron_fsdp.trace.summary import summarise
from tests.conftest import RunRanks
from tests.support.zoo import FLOORS
from tests.trace.training import sharded_tower, train

pytestmark = pytest.mark.gpu


def _train(is_traced: bool) -> tuple[list[float], Timeline | None, dict[str, int]]:
    values, timeline = train(sharded_tower(device="cuda"), is_traced)
    return values["losses"], timeline, {"gather": values["traffic"].gathers, "reduce": values["traffic"].reductions}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recording_on_streams(run_ranks: RunRanks, ranks: int) -> None:
    plain = run_ranks(ranks, _train, False, device_type="cuda")
    traced = run_ranks(ranks, _train, True, device_type="cuda")
    for (losses, timeline, sent), (expected, _, _) in zip(traced, plain, strict=True):
        assert losses == expected
        assert (timeline.clock, timeline.memory_kind) == ("stream", "allocated")
        assert Counter(span.phase for span in timeline.spans)["forward"] == 2 * (FLOORS + 1)
        assert all(span.duration_ns >= 0 for span in timeline.spans)
        assert all(sample.num_bytes > 0 for sample in timeline.memory)
        assert Counter(one.purpose for one in timeline.collectives) == Counter(
            {purpose: count for purpose, count in sent.items() if count}
        )
        for step in summarise(timeline):
            assert 0 <= step.exposed_ns <= step.communication_ns <= step.duration_ns


def _known_wait() -> tuple[bool, int]:
    clock = make_clock(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(clock, StreamClock)
    assert not clock.is_host
    start = clock.mark()
    torch.cuda._sleep(200_000_000)  # cycles, about a tenth of a second
    end = clock.mark()
    waited = end.query()
    clock.settle()
    return waited, clock.elapsed_ns(start, end)


def test_the_clock_of_a_stream_counts_what_runs_on_it(run_ranks: RunRanks) -> None:
    ((waited, elapsed_ns),) = run_ranks(1, _known_wait, device_type="cuda")
    assert not waited
    assert elapsed_ns > 10_000_000  # 20 GHz, and the sleep would be shorter
