"""When gradients are reduced, for every way of saying so."""

from contextlib import suppress

from megatron_fsdp.engine.schedule import Reach, SyncMode

# auto_sync, is_last_microbatch, defer_all -> syncs, reduces with whole pending gradients, ... with sharded ones
TABLE = [
    (True, None, False, True, True, True),
    (True, False, False, True, True, True),
    (False, None, False, False, False, True),
    (False, False, False, False, False, True),
    (False, True, False, True, True, True),
    (True, None, True, False, False, False),
    (False, True, True, False, False, False),
    (True, True, True, False, False, False),
]


def test_switches_decide_when_gradients_are_reduced() -> None:
    for auto_sync, last, defer_all, syncs, reduces_whole, reduces_shards in TABLE:
        mode = SyncMode(auto_sync, last, defer_all)
        assert mode.syncs is syncs
        assert (mode.reach(accumulates_shards=False) is not Reach.NOWHERE) is reduces_whole
        assert (mode.reach(accumulates_shards=True) is not Reach.NOWHERE) is reduces_shards
        assert (mode.reach(accumulates_shards=True) is Reach.EVERYWHERE) is syncs


def test_changes_last_for_a_block_and_what_is_not_named_stays() -> None:
    mode = SyncMode(auto_sync=False, is_last_microbatch=True)
    with mode.changed(defer_all=True):
        assert mode == SyncMode(auto_sync=False, is_last_microbatch=True, defer_all=True)
        with suppress(KeyError), mode.changed(auto_sync=True, is_last_microbatch=False, defer_all=False):
            assert mode == SyncMode(auto_sync=True, is_last_microbatch=False, defer_all=False)
            raise KeyError
        assert mode.defer_all
    assert mode == SyncMode(auto_sync=False, is_last_microbatch=True, defer_all=False)
