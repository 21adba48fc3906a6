"""Cutting parameters into buckets, and who reads them: pure."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.ddp.bucket_plan import cut_buckets, plan_buckets, plan_readers
from megatron_fsdp.sharding.units import GroupKey, ParameterInfo


def info(name: str, numel: int, dtype: torch.dtype = torch.float32, **other: bool) -> ParameterInfo:
    return ParameterInfo(
        name, (numel,), GroupKey(dtype, other.pop("requires_grad", True), **{"is_expert": False, **other})
    )


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
        info("expert", 4, is_expert=True),
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
        assert [place[name] for name in bucket] == sorted(place[name] for name in bucket)
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


# ---- who reads what --------------------------------------------------------------------------------------------------


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
