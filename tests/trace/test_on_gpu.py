"""On CUDA: times are those of streams, taken without waiting for them."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard
from megatron_fsdp.comm.streams import StreamClock, make_clock
from megatron_fsdp.trace import Timeline, trace
from megatron_fsdp.trace.summary import summarise
from tests.conftest import RunRanks
from tests.support.on_ranks import fixed_seed
from tests.support.zoo import FLOORS, TOWER_FEATURES, Floor, Tower, tower_loss

pytestmark = pytest.mark.gpu


def _train(is_traced: bool) -> tuple[list[float], Timeline | None, dict[str, int]]:
    with fixed_seed(0):
        model = Tower().cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Floor], zero_dp_strategy=3
    )
    x = torch.linspace(-1, 1, 4 * TOWER_FEATURES, device="cuda").view(4, TOWER_FEATURES)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = tower_loss(sharded, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step()]
    before = sharded.traffic()
    recording: Any = None
    if is_traced:
        with trace(sharded) as recording:
            losses += [step() for _ in range(2)]
    else:
        losses += [step() for _ in range(2)]
    sent = sharded.traffic().since(before)
    counts = {"gather": sent.gathers, "reduce": sent.reductions}
    return [loss.item() for loss in losses], recording and recording.result(), counts


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recording_on_streams(run_ranks: RunRanks, ranks: int) -> None:
    plain = run_ranks(ranks, _train, False, device_type="cuda")
    for (losses, timeline, sent), (expected, _, _) in zip(
        run_ranks(ranks, _train, True, device_type="cuda"), plain, strict=True
    ):
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
