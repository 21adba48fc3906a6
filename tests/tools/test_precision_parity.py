"""The tool behind a part of docs/precision.md: what it measures on ranks, and what it makes of it."""

import pytest

from tests.conftest import RunRanks
from tools.precision_parity import POLICIES, RANKS, gaps, measure


@pytest.fixture(scope="module")
def losses(run_ranks: RunRanks) -> dict[str, list[float]]:
    first, second = run_ranks(RANKS, measure, 2)
    assert first == second
    return first


def test_runs_start_alike_and_part_only_where_something_is_rounded(losses: dict[str, list[float]]) -> None:
    assert list(losses) == [policy.name for policy in POLICIES]
    largest = {policy.name: max(gaps(losses, policy)) for policy in POLICIES}
    for policy in POLICIES:
        assert losses[policy.name][0] == losses[policy.reference][0], "the first forward has not met a gradient yet"
    for exact in ("fp32, again", "bf16, sent in bf16"):  # bfloat16 gradients lose nothing on the way
        assert largest[exact] == 0.0
    for rounded in ("fp32, sent in bf16", "fp32, sent in fp16", "bf16, all gradients bf16"):
        assert 0.0 <= largest[rounded] < 0.05
    assert 0.0 < largest["bf16 everywhere"] < 0.2
