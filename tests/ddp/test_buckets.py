"""Buckets: how parameters are divided, and the order in which buckets are gathered and reduced."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.ddp.buckets import BucketScheduler, GatherMode, cut_buckets, plan_buckets, plan_readers
from megatron_fsdp.engine.schedule import Operation, ScheduleConfig
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.sharding.units import GroupKey, ParameterInfo


def info(name: str, numel: int, dtype: torch.dtype = torch.float32, **other: bool) -> ParameterInfo:
    return ParameterInfo(name, (numel,), GroupKey(dtype, other.pop("requires_grad", True), **other))


def cut(parameters: list[ParameterInfo], numel: int | None, *alone: str) -> list[str]:
    return [" ".join(names) for names in cut_buckets(parameters, numel, alone)]


FOUR = [info("a", 10), info("b", 20), info("c", 30), info("d", 5)]


def test_buckets_are_closed_by_the_parameter_with_which_they_reach_their_size() -> None:
    expected = {
        1: ["a", "b", "c", "d"],
        5: ["a", "b", "c", "d"],
        6: ["a", "b", "c d"],  # a bucket is filled from the last parameter on, and closed when it is full
        36: ["a", "b c d"],
        55: ["a", "b c d"],
        56: ["a b c d"],
        None: ["a b c d"],
    }
    assert {numel: cut(FOUR, numel) for numel in expected} == expected


def test_kinds_have_buckets_of_their_own_in_the_order_of_their_first_parameters() -> None:
    mixed = [
        info("a", 4),
        info("b", 4, torch.bfloat16),
        info("c", 4),
        info("frozen", 100, requires_grad=False),
        info("expert", 4, sharding="experts"),
        ParameterInfo("sums", (4,), GroupKey(torch.float32, True, False, sums_in_fp32=True)),
        info("d", 4, torch.bfloat16),
        ParameterInfo("scalar", (), GroupKey(torch.float32, True, False, is_scalar=True)),
        info("e", 4),
    ]
    assert cut(mixed, None) == ["a c e", "b d", "expert", "sums", "scalar"]
    assert cut(mixed, 8) == ["a", "b d", "c e", "expert", "sums", "scalar"]


def test_the_plan_keeps_what_is_frozen_in_the_root_and_gives_buckets_to_who_wants_one() -> None:
    plan = plan_buckets([info("x", 3, requires_grad=False), *FOUR], "Net", [("tied", "a")], 1_000)
    root, bucket = plan.units
    assert (root.name, root.parameters, root.class_name, root.modules) == ("", ("x",), "Net", ("",))
    assert (bucket.name, bucket.parameters, bucket.modules) == ("bucket 1", ("a", "b", "c", "d"), ())
    assert plan.aliases == (("tied", "a"),)
    assert "1,000" in plan.source
    assert "one bucket per kind" in plan_buckets(FOUR, "Net", [], None).source
    assert cut(FOUR, None, "b") == ["a c d", "b"]
    assert cut(FOUR, 40, "c") == ["a b d", "c"]
    assert cut(FOUR, 6, "d") == ["a", "b", "c", "d"]


_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
_PARAMETERS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), _DTYPES, st.booleans(), st.booleans()), max_size=20
).map(
    lambda drawn: [
        ParameterInfo(f"p{i}", tuple(shape), GroupKey(dtype, trains, expert, is_scalar=not shape))
        for i, (shape, dtype, trains, expert) in enumerate(drawn)
    ]
)


@given(_PARAMETERS, st.none() | st.integers(1, 300), st.sets(st.integers(0, 19), max_size=3))
def test_every_cut_is_a_partition_in_backward_order(
    parameters: list[ParameterInfo], numel: int | None, chosen: set[int]
) -> None:
    alone = {f"p{i}" for i in chosen}
    by_name = {found.name: found for found in parameters}
    place = {found.name: i for i, found in enumerate(parameters)}
    buckets = cut_buckets(parameters, numel, alone)
    assert sorted(name for bucket in buckets for name in bucket) == sorted(
        found.name for found in parameters if found.key.requires_grad
    )
    firsts = [place[bucket[0]] for bucket in buckets]
    assert firsts == sorted(firsts)
    open_kinds = []
    for bucket in buckets:
        members = [by_name[name] for name in bucket]
        assert list(bucket) == sorted(bucket, key=place.__getitem__)
        assert len({member.key for member in members}) == 1
        if alone & set(bucket):
            assert len(bucket) == 1
            continue
        total = sum(member.numel for member in members)
        if numel is None or total < numel:
            open_kinds.append(members[0].key)
        else:
            assert total - members[0].numel < numel  # nothing too much: the first one closed it
    assert len(open_kinds) == len(set(open_kinds))  # of each kind at most one bucket is not full


def readers(called: set[str], **owned: set[int]) -> dict[str, set[int]]:
    """Owners by name, with `_` for a dot and `model` for the root."""
    pairs = [("" if name == "model" else name.replace("_", "."), frozenset(found)) for name, found in owned.items()]
    return {name: set(found) for name, found in plan_readers(pairs, called.__contains__).items()}


def test_a_module_reads_its_own_parameters_and_those_of_modules_below_that_are_not_called() -> None:
    assert readers({"a", "b"}, model={1}, a={2}, b={2, 3}) == {"": {1}, "a": {2}, "b": {2, 3}}
    found = readers({"layer", "layer.attention"}, layer={1}, layer_attention={2}, layer_attention_out={3})
    assert found == {"layer": {1}, "layer.attention": {2, 3}, "layer.attention.out": {3}}
    assert readers(set(), a_b_c={4}) == {"": {4}, "a": {4}, "a.b": {4}, "a.b.c": {4}}
    assert readers({"a", "a.b"}, model=set(), a=set(), a_b={1}) == {"a.b": {1}}


BUCKETS = 4


def make(
    mode: GatherMode = GatherMode.AT_ONCE, early: bool = True, gathers: bool = True, counts: tuple[int, ...] = ()
) -> BucketScheduler:
    counts = counts or (0, 1, 2, 1, 1)
    config = ScheduleConfig(
        trainable=tuple(count > 0 for count in counts), gathers=gathers, shares_slots=False, reduces_early=early
    )
    return BucketScheduler(config, counts, mode)


def text(operations: Iterable[Operation]) -> str:
    return " ".join(str(operation) for operation in operations)


@given(st.sampled_from(GatherMode), st.lists(st.sets(st.integers(0, BUCKETS)), max_size=8))
def test_whatever_is_read_gathers_run_in_one_order_and_before_they_are_needed(
    mode: GatherMode, reads: list[set[int]]
) -> None:
    scheduler = make(mode)
    started = list(scheduler.forward_opens())
    for units in reads:
        started += scheduler.weights_read(units)
        waited = {operation.unit for operation in started if operation.action.value == "wait"}
        assert units <= waited
    started += scheduler.everything()
    gathers = [operation.unit for operation in started if operation.action.value == "unshard"]
    assert gathers == list(range(BUCKETS + 1))


# ---- gradients -------------------------------------------------------------------------------------------------------


def backward(scheduler: BucketScheduler, *arrivals: tuple[int, int]) -> list[str]:
    """One backward; what each gradient (bucket, parameter) sets off, and then the end."""
    scheduler.forward_begins(0)
    weights_version, _ = scheduler.forward_ends(0, needs_backward=True)
    found = [text(scheduler.backward_begins(0, weights_version))]
    filling: set[int] = set()
    for bucket, parameter in arrivals:
        if bucket not in filling:
            scheduler.gradient_arrives(bucket)
            filling.add(bucket)
        operations = scheduler.gradient_counted(bucket, parameter)
        filling -= {operation.unit for operation in operations}
        found.append(text(operations))
    return [*found, text(scheduler.backward_ends())]


IN_ORDER = ((4, 0), (3, 0), (2, 1), (2, 0), (1, 0))
AT_THE_END = "reduce4 reduce3 reduce2 reduce1 finalise"


def test_a_bucket_waits_for_its_gradients_and_for_buckets_behind_it() -> None:
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    found = backward(scheduler, (1, 0), (2, 0), (3, 0), (2, 1), (4, 0))
    assert found[1:] == ["", "", "", "", "reduce4 reduce3 reduce2 reduce1", "finalise"]
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    found = backward(scheduler, (4, 0), (3, 0), (2, 1), (1, 0))
    assert found[1:] == ["reduce4", "reduce3", "", "", "reduce2 reduce1 finalise"]
    assert backward(scheduler)[-1] == AT_THE_END  # also where none comes at all


def test_gradients_that_come_several_times_are_counted_and_awaited() -> None:
    scheduler = make()
    often = ((4, 0), (3, 0), (3, 0), (3, 0), (2, 0), (2, 1), (1, 0))
    backward(scheduler, *often)
    assert backward(scheduler, *often)[1:] == ["reduce4", "", "", "reduce3", "", "reduce2", "reduce1", "finalise"]
    assert backward(scheduler, *IN_ORDER)[-1] == "reduce3 reduce2 reduce1 finalise"


def test_more_gradients_than_ever_before_are_refused_and_learnt_after_a_reset() -> None:
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    with pytest.raises(ScheduleError, match=r"a gradient arrived after its bucket was reduced.*use_reentrant=False"):
        backward(scheduler, (4, 0), (4, 0))
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    scheduler.forward_begins(0)
    scheduler.backward_begins(0, scheduler.forward_ends(0, needs_backward=True)[0])
    scheduler.gradient_arrives(4)
    scheduler.gradient_counted(4, 0)
    scheduler.reset()
    assert backward(scheduler, *IN_ORDER)[-1] == AT_THE_END
    assert backward(scheduler, *IN_ORDER)[1] == "reduce4"


@given(st.lists(st.tuples(st.randoms(use_true_random=False), st.sets(st.sampled_from(IN_ORDER))), max_size=6))
def test_whatever_comes_buckets_are_reduced_once_from_the_last_to_the_first(
    steps: list[tuple[random.Random, set[tuple[int, int]]]],
) -> None:
    scheduler = make()
    for rng, missing in steps:
        arrivals = [arrival for arrival in IN_ORDER if arrival not in missing]
        rng.shuffle(arrivals)
        assert " ".join(filter(None, backward(scheduler, *arrivals))) == AT_THE_END
