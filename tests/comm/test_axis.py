"""Collectives on 1 to 4 ranks: right values, minimal bytes, float32 sums in rank order."""

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.comm.axis import Axis, Traffic
from megatron_fsdp.comm.reduction import sum_received
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks

RANKS = [1, 3]
SHARD = 5  # elements per rank


def world_axis() -> Axis:
    num_ranks = dist.get_world_size()
    return Axis(dist.group.WORLD if num_ranks > 1 else None, dist.get_rank(), num_ranks)


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def contribution(rank: int, num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank puts in: small integers, exact in every dtype and in every order of summation."""
    return (torch.arange(num_ranks * SHARD) + 100 * rank).remainder(13).to(dtype)


def expected_sum(num_ranks: int) -> torch.Tensor:
    return torch.stack([contribution(rank, num_ranks, torch.float32) for rank in range(num_ranks)]).sum(0)


@pytest.mark.parametrize("num_ranks", RANKS)
@on_ranks()
def test_gather_puts_the_shards_in_rank_order(num_ranks: int) -> None:
    axis, found = world_axis(), []
    for in_place in (True, False):
        full = torch.zeros(axis.num_ranks * SHARD)
        shard = full[axis.rank * SHARD : (axis.rank + 1) * SHARD] if in_place else torch.zeros(SHARD)
        shard.fill_(axis.rank + 1.0)
        finish(axis.all_gather(full, shard))
        found.append(full.tolist())
    traffic = axis.traffic
    assert found == [[rank + 1.0 for rank in range(num_ranks) for _ in range(SHARD)]] * 2
    assert traffic == Traffic(gathers=2 * int(num_ranks > 1), gather_bytes=2 * 4 * SHARD * (num_ranks - 1))


def _exchange_and_sum(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Traffic]:
    """The local sum, what the back end's own reduction makes of the same values, and what was counted."""
    axis = world_axis()
    full = contribution(axis.rank, axis.num_ranks, dtype)
    received = torch.zeros_like(full)
    finish(axis.exchange(received, full))
    reduced = full.float()
    dist.all_reduce(reduced)
    own = reduced[axis.rank * SHARD : (axis.rank + 1) * SHARD]
    return sum_received(received, axis.num_ranks), own, axis.traffic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_exchange_and_sum_is_a_reduce_scatter(run_ranks: RunRanks, num_ranks: int, dtype: torch.dtype) -> None:
    sent = (num_ranks - 1) * SHARD * dtype.itemsize
    for rank, (ours, theirs, traffic) in enumerate(run_ranks(num_ranks, _exchange_and_sum, dtype)):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, expected_sum(num_ranks)[rank * SHARD : (rank + 1) * SHARD])
        assert traffic == Traffic(reductions=1, reduce_bytes=sent)


def _reduce_by_the_back_end() -> tuple[torch.Tensor, torch.Tensor, Traffic, Traffic]:
    axis, other = world_axis(), world_axis()
    full, shard = contribution(axis.rank, axis.num_ranks, torch.float32), torch.zeros(SHARD)
    if axis.num_ranks > 1:
        finish(axis.reduce_scatter(shard, full))
    finish(other.all_reduce(full))
    return shard, full, axis.traffic, other.traffic


@pytest.mark.parametrize("num_ranks", RANKS)
def test_native_reduce_scatter_counts_as_the_exchange_does_and_all_reduce_twice(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    is_sent, sent = int(num_ranks > 1), 4 * SHARD * (num_ranks - 1)
    for rank, (shard, full, scattered, reduced) in enumerate(run_ranks(num_ranks, _reduce_by_the_back_end)):
        assert torch.equal(full, expected_sum(num_ranks))
        assert not is_sent or torch.equal(shard, full[rank * SHARD : (rank + 1) * SHARD])
        assert scattered == Traffic(reductions=is_sent, reduce_bytes=sent)
        assert reduced == Traffic(reductions=is_sent, reduce_bytes=2 * sent)


@on_ranks(2)
def test_gloo_exchanges_pairwise_and_a_single_rank_does_not() -> None:
    assert (world_axis().exchanges_pairwise, Axis(None, 0, 1).exchanges_pairwise) == (True, False)
