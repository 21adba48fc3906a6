"""A short run of the parity fuzzer for models in buckets; `make fuzz ARGS=--buckets` does a long one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzzing.buckets import draw_bucket_case, play_buckets_on_rank
from tests.fuzzing.run import judge

CASES = 16


@pytest.mark.full(short=["6"])
@pytest.mark.parametrize("seed", [*range(CASES), 7100020])
def test_a_random_case_equals_one_process(run_ranks: Callable[..., list[Any]], seed: int) -> None:
    case = draw_bucket_case(seed)
    told = judge(case, run_ranks(case.mesh.num_ranks, play_buckets_on_rank, case))
    assert not told, f"{case}: {told[:5]}"


def test_cases_differ_in_what_matters() -> None:
    configs = [draw_bucket_case(seed).options["config"] for seed in range(CASES)]
    assert len({config["bucket_size"] for config in configs}) > 2
    assert {config["use_distributed_optimizer"] for config in configs} == {True, False}
    assert any(config.get("overlap_param_gather") for config in configs)
