"""Memory that is lent: slots keep theirs, buckets are few and come back."""

from collections.abc import Callable

import pytest
import torch

from megatron_fsdp.engine.memory import Block, BucketPool, CommunicationPool
from megatron_fsdp.sharding.memory_plan import Use

CPU = torch.device("cpu")
POOL = CommunicationPool(CPU)


def no_room() -> bool:
    return False


def test_buckets_that_came_back_are_lent_again_in_turn() -> None:
    """How many there are depends on how many were lent, and not on when they came back."""
    pool = BucketPool(POOL, Use.BUCKET, 2, [64], no_room)
    lent = []
    for _ in range(4):
        lent += [pool.borrow()]
        pool.give_back(lent[-1])
    assert lent[0] is not lent[1]
    assert (lent[2] is lent[0], lent[3] is lent[1]) == (True, True)
    assert pool.held_bytes == 128


def room_maker(pool_of: Callable[[], BucketPool], lent: list[Block], log: list[str]) -> Callable[[], bool]:
    """Gives the oldest lent block back, as the end of a reduction does."""

    def make_room() -> bool:
        log.append("asked")
        if not lent:
            return False
        pool_of().give_back(lent.pop(0))
        return True

    return make_room


def test_room_is_made_only_when_all_buckets_are_out() -> None:
    lent: list[Block] = []
    log: list[str] = []
    pool = BucketPool(POOL, Use.BUCKET, 2, [64], room_maker(lambda: pool, lent, log))
    lent += [pool.borrow(), pool.borrow()]
    assert log == []
    oldest = lent[0]
    assert pool.borrow() is oldest
    assert log == ["asked"]
    assert pool.held_bytes == 128


def test_a_pool_that_grew_lends_and_holds_no_more_than_before() -> None:
    lent: list[Block] = []
    pool = BucketPool(POOL, Use.BUCKET, 2, [64], room_maker(lambda: pool, lent, []))
    several = [pool.borrow() for _ in range(4)]  # filled at once, so nothing could be waited for
    for block in several:
        pool.give_back(block)
    pool.empty()
    for _ in range(6):
        lent += [pool.borrow()]
    assert len(lent) == 2
    assert pool.held_bytes == 128


def test_room_is_asked_for_until_a_bucket_of_this_pool_comes_back() -> None:
    """Reductions of other pools may be older than any of this one."""
    answers = [True, True]
    block: list[Block] = []

    def make_room() -> bool:
        answers.pop()
        if not answers:
            pool.give_back(block[0])
        return True

    pool = BucketPool(POOL, Use.BUCKET, 1, [64], make_room)
    block.append(pool.borrow())
    assert pool.borrow() is block[0]
    assert answers == []


def test_a_longer_bucket_than_usual_gives_its_memory_back() -> None:
    pool = BucketPool(POOL, Use.BUCKET, 2, [64, 96, 64, 32, 32, 96, 64], no_room)
    longer = pool.borrow(96)
    pool.give_back(longer)
    assert pool.held_bytes == 0
    usual, shorter = pool.borrow(64), pool.borrow(32)
    pool.give_back(usual)
    pool.give_back(shorter)
    assert pool.held_bytes == pool.peak_bytes == 64 + 32
    assert BucketPool(POOL, Use.BUCKET, 2, [], no_room).held_bytes == 0


@pytest.mark.parametrize("came_back", [0, 1])
def test_reclaiming_takes_every_bucket_back_once(came_back: int) -> None:
    pool = BucketPool(POOL, Use.BUCKET, 2, [64], no_room)
    lent = [pool.borrow(), pool.borrow()]
    for block in lent[:came_back]:
        pool.give_back(block)
    pool.reclaim()
    assert {id(pool.borrow()), id(pool.borrow())} == {id(block) for block in lent}
    assert pool.held_bytes == 128


# ---- blocks that come and go, numbers that change ------------------------------------------------------------------


def test_a_smaller_number_of_buckets_drops_those_that_are_free() -> None:
    pool = BucketPool(POOL, Use.BUCKET, 3, [64], no_room)
    for block in [pool.borrow() for _ in range(3)]:
        pool.give_back(block)
    pool.set_count(1)
    assert pool.held_bytes == 64
    pool.reclaim()
    assert pool.held_bytes == 64
