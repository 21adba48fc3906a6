"""A store that ranks have for one start of theirs alone, in one that torchrun keeps over restarts.

torchrun's agent shares the store of its rendezvous with the ranks, and that one has the addresses of ranks that are
gone: a rank that reads before its peer has written anew connects to nobody. Nothing that torchrun tells the ranks
differs from start to start on all machines alike (an agent that comes back counts anew), so they agree on a name.
"""

from __future__ import annotations

import time
import uuid

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, and not in its list of names

_POLL_S = 0.05
_FOLDER = "megatron_fsdp/meeting"


def store_of_this_start(store: Store, rank: int, count: int, timeout_s: float) -> Store:
    """Agree on a name, and return the part of the store under it; every rank calls this.

    Each rank writes a name of its own, which none before it had, and waits for the answer to it. The first rank answers
    names until each rank has confirmed that it was the right one.

    Args:
        store: All ranks have it, and ranks before them may have had it.
        rank: This one, from 0.
        count: Number of ranks.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        TimeoutError: They did not come.
    """
    until = time.monotonic() + timeout_s
    if rank == 0:
        token = uuid.uuid4().hex
        missing = set(range(1, count))
        while missing:
            for other in sorted(missing):
                _answer(store, other, token)
            missing = {other for other in missing if not store.check([f"{_FOLDER}/{token}/{other}"])}
            if missing:
                _pause(until, f"ranks {', '.join(map(str, sorted(missing)))} did not come")
    else:
        own = uuid.uuid4().hex
        store.set(f"{_FOLDER}/{rank}", own)
        while not store.check([f"{_FOLDER}/{own}"]):
            _pause(until, "the first rank did not come")
        token = store.get(f"{_FOLDER}/{own}").decode()
        store.set(f"{_FOLDER}/{token}/{rank}", "here")
    return PrefixStore(f"{_FOLDER}/{token}", store)


def _answer(store: Store, other: int, token: str) -> None:
    """Tell the rank that wrote last under this number, if any has."""
    if store.check([f"{_FOLDER}/{other}"]):
        store.set(f"{_FOLDER}/{store.get(f'{_FOLDER}/{other}').decode()}", token)


def _pause(until: float, problem: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"{problem} in time: look at what they say, or raise --distributed-timeout-minutes")
    time.sleep(_POLL_S)
