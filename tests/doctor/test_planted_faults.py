"""Each planted fault is found, named, and put on the right tensor."""

from typing import Any

from megatron_fsdp.doctor import Difference, ParityReport, check_parity
from tests.conftest import RunRanks
from tests.doctor import faults, patients


def check(shard_fn: Any, options: dict[str, Any]) -> ParityReport:
    return check_parity(patients.build, patients.tokens, shard_fn=shard_fn, checkpoint=False, **options)


def first_difference(run_ranks: RunRanks, num_ranks: int, shard_fn: Any, **options: Any) -> Difference:
    reports = run_ranks(num_ranks, check, shard_fn, options)
    assert all(report == reports[0] for report in reports)
    return reports[0].differences[0]


def test_a_sum_over_ranks_is_named_by_their_number(run_ranks: RunRanks) -> None:
    found = first_difference(run_ranks, 3, faults.summed_not_averaged)
    assert (found.where, found.step, found.name, found.kind) == ("gradient", 1, "head.weight", "factor")
    assert found.ratio == 3.0
    assert "3 times what it should be (the number of ranks, 3: summed over ranks" in found.words
    assert len(found.also) == len(list(patients.build().parameters())) - 1
