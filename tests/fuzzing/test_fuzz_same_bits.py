"""A dozen random deterministic runs on each of a few numbers of ranks; `tools/fuzz.py --worlds` runs thousands."""

import pytest

from tests.conftest import RunRanks
from tests.fuzzing.same_bits import FAMILIES, draw_world, play_worlds

CASES = 12


@pytest.mark.full(short=["4"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6])
def test_random_runs_have_the_bits_of_one_process(run_ranks: RunRanks, num_ranks: int) -> None:
    assert run_ranks(num_ranks, play_worlds, 0, CASES) == [{}] * num_ranks


def test_a_seed_is_always_the_same_run() -> None:
    assert draw_world(7, 4) == draw_world(7, 4)
    drawn = [draw_world(seed, 4) for seed in range(5 * CASES)]
    assert {case.family for case in drawn} == set(FAMILIES)
    assert {case.strategy for case in drawn} == {0, 1, 2, 3}
    drawn = [draw_world(seed, ranks) for ranks in range(1, 7) for seed in range(CASES)]  # those of the test above
    assert len({case.policy.weight_format for case in drawn}) > 4
    assert len({case.mesh for case in drawn}) > 2
