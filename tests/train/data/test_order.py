import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.train.data.order import Permutation, SampleOrder


@given(count=st.integers(1, 600), key=st.binary(max_size=32))
def test_every_place_is_taken_once(count: int, key: bytes) -> None:
    permutation = Permutation(count, key)
    assert sorted(permutation(i) for i in range(count)) == list(range(count))


@given(count=st.integers(1, 10**15), index=st.integers(0, 10**15 - 1))
def test_places_of_huge_texts_are_in_range_and_differ(count: int, index: int) -> None:
    permutation = Permutation(count, b"k")
    places = {permutation((index + i) % count) for i in range(min(count, 5))}
    assert len(places) == min(count, 5)
    assert 0 <= min(places) <= max(places) < count


def test_the_permutation_is_this_one_on_every_machine() -> None:
    assert [Permutation(10, b"key")(i) for i in range(10)] == [0, 7, 8, 6, 5, 3, 1, 9, 4, 2]


def test_a_shuffle_leaves_about_one_place_as_it_is_and_spreads_neighbours() -> None:
    shuffles = [[Permutation(500, bytes([key]))(i) for i in range(500)] for key in range(40)]
    fixed = sum(place == i for shuffle in shuffles for i, place in enumerate(shuffle))
    assert 15 <= fixed <= 80  # one of 500 on average, in each of 40 shuffles
    firsts = Counter(shuffle[0] // 50 for shuffle in shuffles)
    assert max(firsts.values()) <= 12  # 4 of 40 in each tenth, on average
    steps = [abs(a - b) for shuffle in shuffles for a, b in itertools.pairwise(shuffle)]
    assert 150 < sum(steps) / len(steps) < 183  # a third of 500: neighbours have nothing to do with each other


@given(tokens=st.integers(2, 400), length=st.integers(1, 30), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_learns_every_token_once_but_a_rest(tokens: int, length: int, seed: int, epoch: int) -> None:
    length = min(length, tokens - 1)
    order = SampleOrder(tokens, length, seed)
    starts = sorted(order.start(epoch * order.samples + k) for k in range(order.samples))
    assert starts == list(range(starts[0], starts[0] + order.samples * length, length))  # targets side by side
    assert starts[0] >= 0
    assert starts[-1] + length + 1 <= tokens
    assert tokens - 1 - order.samples * length < length  # what is left out is less than a sample


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [SampleOrder(1001, 10, seed) for seed in (0, 1)]
    shuffles = [tuple(order.start(e * 100 + k) for k in range(100)) for order in orders for e in range(3)]
    assert len(set(shuffles)) == 6
    assert {frozenset(shuffle) for shuffle in shuffles} == {frozenset(range(0, 1000, 10))}


def test_the_rest_moves_so_that_no_token_is_always_left_out() -> None:
    order = SampleOrder(25, 10, 0)  # 2 samples, 4 targets over
    begins = {min(order.start(2 * epoch), order.start(2 * epoch + 1)) for epoch in range(40)}
    assert begins == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("tokens", [2, 3])
def test_the_shortest_text_has_one_sample(tokens: int) -> None:
    order = SampleOrder(tokens, tokens - 1, 5)
    assert [order.start(n) for n in range(4)] == [0, 0, 0, 0]
