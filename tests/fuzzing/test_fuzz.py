"""A short run of each fuzzer; `tools/fuzz.py` does long ones."""

from pathlib import Path

import pytest

from tests.conftest import RunRanks
from tests.fuzzing.buckets import draw_bucket_case, play_buckets_on_rank
from tests.fuzzing.case import draw_case
from tests.fuzzing.checkpoints import draw_pair, load_on_rank, save_on_rank
from tests.fuzzing.run import judge, play_on_rank
from tests.support.dcp_contents import assert_same_contents, contents

FOUND = [5093, 9043, 7000161]
"""Seeds that once differed: slots of units inside others, and rounding in bfloat16."""


@pytest.mark.full(short=["5093"])
@pytest.mark.parametrize("seed", [*range(4), *FOUND])
def test_a_random_case_equals_one_process(run_ranks: RunRanks, seed: int) -> None:
    case = draw_case(seed)
    told = judge(case, run_ranks(case.mesh.num_ranks, play_on_rank, case))
    assert not told, f"{case}: {told[:5]}"


@pytest.mark.full(short=["6"])
@pytest.mark.parametrize("seed", [5, 6, 7100020])
def test_a_random_case_in_buckets_equals_one_process(run_ranks: RunRanks, seed: int) -> None:
    case = draw_bucket_case(seed)
    told = judge(case, run_ranks(case.mesh.num_ranks, play_buckets_on_rank, case))
    assert not told, f"{case}: {told[:5]}"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_is_resharded_bit_for_bit(run_ranks: RunRanks, tmp_path: Path, seed: int) -> None:
    saved, loaded = draw_pair(seed)
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    assert run_ranks(saved.mesh.num_ranks, save_on_rank, saved, source) == [[]] * saved.mesh.num_ranks
    assert run_ranks(loaded.mesh.num_ranks, load_on_rank, loaded, source, target) == [[]] * loaded.mesh.num_ranks
    assert_same_contents(contents(target), contents(source))
