"""Small objects are shown to all ranks in one collective, larger ones in two, whatever their sizes on other ranks."""

import pickle
import threading
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fsdp.comm import agreement
from megatron_fsdp.comm.agreement import SMALL_BYTES, gather_objects
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks

_OVERHEAD = 8  # bytes of the length, in front of each object


def exchanged(sizes: list[int]) -> tuple[list[int], list[bool], int]:
    """Lengths of what came, whether it is what was sent, and the collectives that it took."""
    assert dist.group.WORLD is not None
    calls, real = [], dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    contents = [bytes((rank + place) % 251 for place in range(size)) for rank, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted)
        found = gather_objects(contents[dist.get_rank()])
    return list(map(len, found)), [a == b for a, b in zip(found, contents, strict=True)], len(calls)


def fitting() -> int:
    """The longest bytes whose pickle is still sent at first."""
    return max(size for size in range(SMALL_BYTES) if len(pickle.dumps(bytes(size))) + _OVERHEAD <= SMALL_BYTES)


@pytest.mark.parametrize(
    ("sizes", "collectives"),
    [
        (lambda: [0, 700], 1),
        (lambda: [fitting(), fitting()], 1),
        (lambda: [fitting() + 1, 0], 2),
        (lambda: [70_000, 5000], 2),
    ],
    ids=["small", "just", "one-more", "both-large"],
)
def test_objects_of_all_sizes_arrive(run_ranks: RunRanks, sizes: Callable[[], list[int]], collectives: int) -> None:
    for lengths, right, calls in run_ranks(2, exchanged, sizes()):
        assert lengths == sizes()
        assert right == [True, True]
        assert calls == collectives


@on_ranks(3)
def test_ranks_may_send_objects_of_different_kinds() -> None:
    assert dist.group.WORLD is not None
    values = [None, ("text", b"bytes"), {"key": [1, 2]}]
    found = gather_objects(values[dist.get_rank()])
    assert found == [None, ("text", b"bytes"), {"key": [1, 2]}]


class Message(bytearray):
    """Notes the threads that free one."""

    freed_by: ClassVar[set[int]] = set()

    def __del__(self) -> None:
        self.freed_by.add(threading.get_ident())


@on_ranks(2)
def test_no_thread_of_the_back_end_frees_an_object_of_the_interpreter() -> None:
    """That thread is often the last to hold what was sent; gloo's did so in a fifth of all gathers."""
    with mock.patch.object(agreement, "bytearray", Message, create=True):
        for number in range(300):
            assert gather_objects(number) == [number, number]
    assert Message.freed_by == {threading.get_ident()}
