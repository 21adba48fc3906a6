"""Ranks that meet in a store which has what ranks before them wrote."""

import threading
import time

import pytest
from torch.distributed import HashStore, Store

from megatron_fsdp.train.launch.meeting import store_of_this_start


def meet(shared: Store, late: dict[int, float], count: int = 3) -> list[Store]:
    """The stores of all ranks, some of which come later."""
    found: dict[int, Store] = {}

    def come(rank: int) -> None:
        time.sleep(late.get(rank, 0.0))
        found[rank] = store_of_this_start(shared, rank, count, timeout_s=60.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(count)]


@pytest.mark.full(short=["late0", "late3"])
@pytest.mark.parametrize("late", [{}, {1: 0.3}, {0: 0.3}, {2: 0.3, 1: 0.1}])
def test_ranks_have_a_store_of_their_own_though_others_were_there_before(late: dict[int, float]) -> None:
    shared = HashStore()
    before = meet(shared, {})
    before[1].set("address", "of a rank that is gone")
    now = meet(shared, late)
    assert [store.check(["address"]) for store in now] == [False] * 3
    now[1].set("address", "new")
    assert [store.get("address") for store in now] == [b"new"] * 3
    assert before[0].get("address") == b"of a rank that is gone"


def test_one_rank_meets_nobody() -> None:
    store_of_this_start(HashStore(), 0, 1, timeout_s=0.0).set("x", "y")


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "ranks 1, 2 did not come in time"), (1, "the first rank did not come")]
)
def test_who_does_not_come_is_said(rank: int, words: str) -> None:
    with pytest.raises(TimeoutError, match=words):
        store_of_this_start(HashStore(), rank, 3, timeout_s=0.1)
