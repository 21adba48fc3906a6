"""The table in docs/precision.md is what the ways to accumulate cost on any number of ranks."""

import pytest

from tests.conftest import RunRanks
from tests.support.source_tree import ROOT
from tools.accumulation_costs import measured_table


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_published_costs_are_those_measured(run_ranks: RunRanks, num_ranks: int) -> None:
    first, *others = run_ranks(num_ranks, measured_table)
    assert others == [first] * (num_ranks - 1)
    assert first in (ROOT / "docs" / "precision.md").read_text(encoding="utf-8"), first
