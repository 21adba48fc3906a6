"""Small objects are shown to all ranks in one collective, larger ones in two, whatever their sizes on other ranks."""

import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.comm import agreement
from megatron_fsdp.comm.agreement import (
    SMALL_BYTES,
    all_agree,
    ask,
    decided_by_first,
    first_problem,
    gather_objects,
    raise_together,
)
from megatron_fsdp.errors import CheckpointError, ConfigurationError, MegatronFSDPError, RankError, explains_restarts
from tests.support.on_ranks import of_ranks, on_ranks, same_on_ranks

_OVERHEAD = 8  # bytes of the length, in front of each object


def fitting() -> int:
    """The longest bytes whose pickle is still sent at first."""
    return max(size for size in range(SMALL_BYTES) if len(pickle.dumps([bytes(size)])) + _OVERHEAD <= SMALL_BYTES)


@pytest.mark.parametrize(
    ("sizes", "collectives"),
    [
        ([0, 700], 1),
        ([fitting(), fitting()], 1),
        ([fitting() + 1, 0], 2),
        ([70_000, 5000], 2),
    ],
    ids=["small", "just", "one-more", "both-large"],
)
@on_ranks(2)
def test_objects_of_all_sizes_arrive(sizes: list[int], collectives: int) -> None:
    contents = [bytes((rank + place) % 251 for place in range(size)) for rank, size in enumerate(sizes)]
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
        assert gather_objects(contents[dist.get_rank()]) == contents
    assert calls.call_count == collectives


@on_ranks(3)
def test_ranks_may_send_objects_of_different_kinds() -> None:
    assert dist.group.WORLD is not None
    values = [None, ("text", b"bytes"), {"key": [1, 2]}]
    found = gather_objects(values[dist.get_rank()])
    assert found == [None, ("text", b"bytes"), {"key": [1, 2]}]


@on_ranks(2)
def test_a_rank_in_another_call_is_told_by_the_bytes_that_it_sent() -> None:
    foreign = torch.full((SMALL_BYTES,), 255, dtype=torch.uint8)
    if dist.get_rank() == 1:
        dist.all_gather([torch.empty_like(foreign) for _ in range(2)], foreign)
        return
    with pytest.raises(RankError, match=r"rank 1 of a group .* in another call.*`mfsdp hang FOLDER` show where"):
        gather_objects("mine")


@on_ranks(2)
def test_what_is_sent_holds_no_object_of_the_interpreter() -> None:
    """A thread of the back end, often the last to hold what was sent, would free it."""

    class Message(bytearray):
        """A bytearray that weak references may refer to."""

    made: list[ref[Message]] = []

    def make(text: bytes) -> Message:
        made.append(ref(message := Message(text)))
        return message

    def gather(*given: Any, **named: Any) -> None:
        assert [each() for each in made] == [None]
        all_gather(*given, **named)

    all_gather: Any = dist.all_gather
    with mock.patch.object(agreement, "bytearray", make, create=True), mock.patch.object(dist, "all_gather", gather):
        assert gather_objects(dist.get_rank()) == [0, 1]
    assert len(made) == 1


# ---- what ranks report -----------------------------------------------------------------------------------------------


def grid() -> list[dist.ProcessGroup | None]:
    """The row and the column of this rank in a 2 x 2 grid; rows are ranks 0 and 1, 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
    return [mesh.get_group("row"), mesh.get_group("column")]


def told(error: Exception | None, *more: Any, **options: Any) -> str:
    """What `raise_together` raises, the same on all ranks; it names the type."""
    with pytest.raises(Exception) as raised:
        raise_together(error, "the work", *more, **options)
    return same_on_ranks(f"{type(raised.value).__name__}: {raised.value}")


@on_ranks(4)
def test_an_error_of_one_rank_reaches_the_ranks_of_all_groups() -> None:
    rank, groups = dist.get_rank(), grid()
    for failing in range(4):
        met = {"mine": ConfigurationError("no"), "foreign": KeyError("k")}
        mine = {kind: error if rank == failing else None for kind, error in met.items()}
        foreign = f"the work failed (rank {failing}: KeyError: 'k')"
        said = f"ConfigurationError: the work failed (rank {failing}: ConfigurationError: no)"
        assert told(mine["mine"], groups) == said
        assert told(mine["foreign"], groups) == f"RankError: {foreign}"
        assert told(mine["foreign"], groups, raises=CheckpointError) == f"CheckpointError: {foreign}"
    raise_together(None, "the work", groups, {"size": "3"})
    assert gather_objects(rank) == [0, 1, 2, 3]  # all took part in the same collectives


@on_ranks(4)
def test_what_only_the_ranks_of_one_group_met_is_told_alike_on_all() -> None:
    rank, groups = dist.get_rank(), grid()
    for failing in ((0, 1), (2, 3), (1, 2, 3)):
        for error in (ConfigurationError("no"), KeyError("k")):
            kind = "ConfigurationError" if isinstance(error, ConfigurationError) else "RankError"
            met = "; ".join(f"rank {each}: {type(error).__name__}: {error}" for each in failing)
            assert told(error if rank in failing else None, groups) == f"{kind}: the work failed ({met})"
    facts = {"size": str(rank if rank > 1 else 0)}
    assert told(None, groups, facts) == (
        "ConfigurationError: ranks differ: size is 2 on rank 2, 3 on rank 3; give the same on every rank"
    )


@on_ranks(4)
def test_what_all_ranks_met_is_raised_as_it_is() -> None:
    class OddError(Exception):  # cannot be sent
        def __init__(self, _one: int, _two: int) -> None:
            super().__init__("odd")

    class OurOddError(OddError, ConfigurationError):
        """One that cannot be made of its text either."""

    groups = grid()
    for error in (ConfigurationError("no"), RankError("no"), KeyError("k"), OddError(1, 2), OurOddError(1, 2)):
        error.__cause__ = cause = ValueError("why")
        with pytest.raises(type(error)) as raised:
            raise_together(error, "the work", groups)
        assert raised.value is error
        assert error.__cause__ is cause
    assert told(KeyError("k"), raises=CheckpointError) == (
        "CheckpointError: the work failed (" + "; ".join(f"rank {rank}: KeyError: 'k'" for rank in range(4)) + ")"
    )


@on_ranks(3)
def test_facts_that_differ_are_told_by_name_before_errors() -> None:
    rank = dist.get_rank()
    error = ConfigurationError("no") if rank == 1 else None
    facts = {"size": str(max(rank, 1)), "kind": "a"}
    assert told(error, facts=facts) == (
        "ConfigurationError: ranks differ: size is 1 on ranks 0, 1, 2 on rank 2; give the same on every rank"
    )
    swapped = dict(reversed(facts.items())) if rank == 2 else facts
    assert told(None, facts=swapped | {"size": "1"}) == (
        "ConfigurationError: ranks differ: the order, from size on ranks 0, 1, kind on rank 2; give the same on every "
        "rank"
    )
    many = {name: str(rank if name != "e" else 0) for name in "abcdefg"}
    assert "; c is 0 on rank 0, 1 on rank 1, 2 on rank 2; 3 more differ; give" in told(None, facts=many)


def tell_facts_until(error: Exception | None) -> None:
    """Tell one fact and, without an error, another one that is different on each rank."""
    with all_agree("the block") as facts:
        facts["first"] = "same"
        if error is not None:
            raise error
        facts["second"] = str(dist.get_rank())


@on_ranks(3)
def test_a_rank_that_fails_before_it_has_told_all_facts_is_named() -> None:
    with pytest.raises(ConfigurationError) as raised:
        tell_facts_until(ConfigurationError("no") if dist.get_rank() == 1 else None)
    assert same_on_ranks(str(raised.value)) == "the block failed (rank 1: ConfigurationError: no)"
    with pytest.raises(
        ConfigurationError, match="ranks differ: second is 0 on rank 0, 1 on rank 1, 2 on rank 2; give "
    ):
        tell_facts_until(None)


@on_ranks(4)
def test_a_judge_sees_the_reports_of_each_group_and_the_first_verdict_holds() -> None:
    rank, groups = dist.get_rank(), grid()
    assert ask([(groups[0], rank), (groups[1], -rank)], lambda _: None) == [
        [rank // 2 * 2, rank // 2 * 2 + 1],
        [-(rank % 2), -(rank % 2) - 2],
    ]
    assert ask([(None, "alone")], lambda _: None) == [["alone"]]
    odd = (CheckpointError, "rank 1 is odd")
    with pytest.raises(CheckpointError, match=odd[1]):
        ask([(group, rank) for group in groups], lambda found: odd if 1 in found else None)
    with pytest.raises(ValueError, match="of rank 2"):
        ask([(dist.group.WORLD, (ValueError, f"of rank {rank}") if rank > 1 else None)], first_problem)


# ---- blocks that a rank leaves early ---------------------------------------------------------------------------------


def fails_alone(error: BaseException, question: Callable[[], Any] = lambda: None) -> None:
    """Fail on rank 1, and ask a question on the others."""
    if dist.get_rank() == 1:
        raise error
    question()


QUESTIONS: dict[str, Callable[[], Any]] = {
    "raise_together": lambda: raise_together(None, "more work", facts={"size": "3"}),
    "ask": lambda: ask([(dist.group.WORLD, 3)], lambda _: None),
    "gather_objects": lambda: gather_objects(3),
    "decided_by_first": lambda: decided_by_first(lambda: 3, "deciding"),
    "a block": lambda: all_agree("more work").__enter__(),
}


@on_ranks(3)
def test_who_leaves_a_block_early_is_heard_at_the_next_question_whatever_it_is() -> None:
    for question in QUESTIONS.values():
        for error in (KeyError("k"), ConfigurationError("no")):
            with pytest.raises(MegatronFSDPError) as raised, all_agree("the work"):
                fails_alone(error, question)
            kind = "ConfigurationError" if isinstance(error, ConfigurationError) else "RankError"
            told = same_on_ranks(f"{type(raised.value).__name__}: {raised.value}")
            assert told == f"{kind}: the work failed (rank 1: {type(error).__name__}: {error})"
    assert gather_objects(3) == [3, 3, 3]


@on_ranks(4)
def test_an_error_that_one_group_has_raised_is_told_to_the_others() -> None:
    row, column = grid()
    error = ConfigurationError("no") if dist.get_rank() < 2 else None
    with pytest.raises(ConfigurationError) as raised, all_agree("more", [row, column]):
        raise_together(error, "inner", [row])
    met = "; ".join(f"rank {rank}: ConfigurationError: no" for rank in (0, 1))
    assert str(raised.value) == f"more failed ({met})"


@on_ranks(2)
def test_an_error_that_all_have_raised_passes_the_blocks_around_it() -> None:
    for kind in (ConfigurationError, KeyboardInterrupt):
        with pytest.raises(kind), all_agree("more"), all_agree("the work"):
            raise_together(kind("no"), "inner")
    assert gather_objects(3) == [3, 3]


@on_ranks(2)
def test_what_ends_a_process_is_raised_as_it_is_and_told_to_the_others() -> None:
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises((type(error), RankError)) as raised, all_agree("the work"):
            fails_alone(error)
        assert isinstance(raised.value, RankError) if dist.get_rank() != 1 else raised.value is error
        told = of_ranks(str(raised.value))[0]
        assert told.startswith(f"the work failed (rank 1: {type(error).__name__}")


@pytest.mark.parametrize(("restarts", "is_set"), [("0", False), ("2", False), ("2", True)])
def test_ranks_that_were_started_again_and_do_not_meet_hear_the_cure(
    monkeypatch: pytest.MonkeyPatch, restarts: str, is_set: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    if is_set:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with pytest.raises(RuntimeError, match="refused") as raised, explains_restarts():
        raise RuntimeError("Connection refused")
    notes = getattr(raised.value, "__notes__", [])
    assert ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note for note in notes] == [True] * (
        restarts == "2" and not is_set
    )
