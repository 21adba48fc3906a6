"""A short run of the parity fuzzer; `make fuzz` does a long one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzzing.case import draw_case
from tests.fuzzing.run import OneProcess, differences, play, play_on_rank

CASES = 24


@pytest.mark.full(short=["8", "3", "19"])
@pytest.mark.parametrize("seed", range(CASES))
def test_a_random_case_equals_one_process(run_ranks: Callable[..., list[Any]], seed: int) -> None:
    case = draw_case(seed)
    expected = play(OneProcess(case))
    for rank, found in enumerate(run_ranks(case.mesh.num_ranks, play_on_rank, case)):
        told = differences(expected, found, case.precision.tolerance)
        assert not told, f"rank {rank}: {case}: {told[:5]}"


def test_a_seed_is_always_the_same_case() -> None:
    assert draw_case(7) == draw_case(7)
    assert len({draw_case(seed).mesh for seed in range(50)}) > 5
