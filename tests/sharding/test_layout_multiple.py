"""Layouts whose whole buffer is a multiple of a given number of elements (large messages of a power of two)."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.layout import Granularity, GranularityKind, Layout, plan_layout
from tests.sharding.test_layout_properties import Problem, checked, inner_edges, problems

NCCL_MULTIPLE = 2**16
LOOSE = st.sampled_from([Granularity.ROWS, Granularity.ELEMENTS])

multiples = st.one_of(st.sampled_from([1, 2, 3, 12, 64, 1000, NCCL_MULTIPLE]), st.integers(1, 300))


def smallest_numel(problem: Problem, numel_multiple: int) -> int:
    """What aligned tensors need in equal aligned shards, rounded up to the multiple."""
    alignment_numel = problem["alignment_numel"]
    common = math.lcm(problem["num_shards"] * alignment_numel, numel_multiple)
    units = sum(-(-math.prod(shape) // alignment_numel) for shape in problem["shapes"])
    return -(-units * alignment_numel // common) * common


@checked
@given(problems(), multiples)
def test_the_buffer_is_a_multiple_and_every_contract_is_kept(problem: Problem, numel_multiple: int) -> None:
    layout = plan_layout(**problem, numel_multiple=numel_multiple)
    alignment_numel = problem["alignment_numel"]
    assert layout.numel % numel_multiple == 0
    assert all(start % alignment_numel == 0 for start in (layout.shard_numel, *layout.offsets))
    for index, granularity in enumerate(problem["granularity"]):
        kept = layout.granules[index] == granularity.granule_numel(layout.shapes[index])
        assert kept or (granularity.kind is GranularityKind.ROWS and layout.granules[index] == 1)
        assert all(edge % layout.granules[index] == 0 for edge in inner_edges(layout, index))


@checked
@given(problems(LOOSE), multiples)
def test_padding_stays_within_the_bound(problem: Problem, numel_multiple: int) -> None:
    layout = plan_layout(**problem, numel_multiple=numel_multiple)
    alignment_numel = problem["alignment_numel"]
    count = sum(math.prod(shape) > 0 for shape in layout.shapes)
    common = math.lcm(layout.num_shards * alignment_numel, numel_multiple)
    unavoidable = count * (alignment_numel - 1) + common - alignment_numel
    assert layout.padding_numel <= max(problem["max_waste"] * layout.payload_numel, unavoidable)
    assert layout.numel >= smallest_numel(problem, numel_multiple)


@checked
@given(problems(LOOSE), multiples)
def test_no_waste_allowed_gives_the_smallest_multiple(problem: Problem, numel_multiple: int) -> None:
    tight = {**problem, "max_waste": 0}
    layout = plan_layout(**tight, numel_multiple=numel_multiple)
    assert layout.numel == smallest_numel(problem, numel_multiple)
    assert layout.numel >= plan_layout(**tight).numel


@checked
@given(problems(), st.data())
def test_a_multiple_that_shards_are_anyway_changes_nothing(problem: Problem, data: st.DataObject) -> None:
    common = problem["num_shards"] * problem["alignment_numel"]
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    assert plan_layout(**problem, numel_multiple=data.draw(st.sampled_from(divisors))) == plan_layout(**problem)


@checked
@given(problems(st.just(Granularity.TENSOR)), multiples)
@example({"shapes": [(9, 9)], "num_shards": 7, "alignment_numel": 4, "granularity": [Granularity.TENSOR]}, 2**16)
def test_whole_tensors_stay_whole(problem: Problem, numel_multiple: int) -> None:
    layout = plan_layout(**problem, numel_multiple=numel_multiple)
    assert all(inner_edges(layout, index) == [] for index in range(len(layout.shapes)))
    assert layout.numel % numel_multiple == 0


BLOCK = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2


@pytest.mark.parametrize(("num_shards", "common"), [(1, 2**16), (3, 3 * 2**16), (7, 7 * 2**16), (8, 2**16)])
def test_a_real_layer_is_at_most_one_multiple_or_a_percent_longer(num_shards: int, common: int) -> None:
    layout = plan_layout(BLOCK, num_shards, alignment_numel=8, numel_multiple=NCCL_MULTIPLE)
    assert layout.numel % NCCL_MULTIPLE == 0
    assert layout.padding_numel < max(common, 0.01 * layout.payload_numel)


def whole_rows(layout: Layout) -> list[int]:
    return [index for index in range(len(layout.shapes)) if layout.is_row_sharded(index)]


def test_rows_stay_whole_where_the_multiple_allows_it() -> None:
    # On 21 ranks shards are multiples of 2**16. With rows of 11,008 they would be of 43 times that, 17 % too long, so
    # that the one tensor with such rows gives them up.
    on_16, on_21 = (plan_layout(BLOCK, ranks, alignment_numel=8, numel_multiple=NCCL_MULTIPLE) for ranks in (16, 21))
    assert whole_rows(on_16) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert whole_rows(on_21) == [0, 1, 2, 3, 4, 5, 7, 8]


def test_huge_rows_are_cut_where_whole_ones_would_cost_too_much() -> None:
    shapes = [(3, 100_000), (64,)]
    layout = plan_layout(shapes, 7, numel_multiple=NCCL_MULTIPLE)
    assert layout.granules == (1, 1)
    assert layout.numel == 7 * NCCL_MULTIPLE  # 300,064 elements: one multiple in each shard, since 7 is odd
    strict = plan_layout(shapes, 7, granularity=Granularity.blocks(1), numel_multiple=NCCL_MULTIPLE)
    assert strict.numel == 28 * NCCL_MULTIPLE  # with two or three in each, a second edge would cut a row
    assert strict.is_row_sharded(0)


def test_a_multiple_may_cost_whole_rows_in_place_of_elements() -> None:
    # Whole rows may cost 2 %: 3 shards of 34 rows. No multiple of 1,005 but 1,005 itself costs so little.
    assert plan_layout([(100, 10)], 3, max_waste=0.02).numel == 1020
    layout = plan_layout([(100, 10)], 3, max_waste=0.02, numel_multiple=1005)
    assert (layout.numel, layout.granules) == (1005, (1,))


@pytest.mark.parametrize("shapes", [[], [(0, 3)]])
def test_a_group_without_elements_stays_empty(shapes: list[tuple[int, ...]]) -> None:
    assert plan_layout(shapes, 3, alignment_numel=8, numel_multiple=NCCL_MULTIPLE).numel == 0


def test_one_element_takes_one_multiple() -> None:
    layout = plan_layout([(1,)], 8, alignment_numel=4, numel_multiple=NCCL_MULTIPLE)
    assert (layout.numel, layout.shard_numel) == (2**16, 2**13)


@pytest.mark.parametrize("value", [0, -4])
def test_multiples_below_one_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^numel_multiple is {value}; pass 1 \(any length\) or more.$"):
        plan_layout([(4,)], 2, numel_multiple=value)
