"""Predictions beside published runs: one set of assumptions, and how far it is off."""

import pytest

pytest.importorskip("transformers")

from megatron_fsdp.plan.machine import GIB
from tools.published_runs import compare_published


def test_predictions_are_near_what_was_measured_and_what_ran_fits() -> None:
    """Speeds within 15 %, 8 % in the mean; peaks within 16 %."""
    found = compare_published()
    assert {each.run.name: each.error for each in found if abs(each.error) > 0.15} == {}
    assert sum(abs(each.error) for each in found) / len(found) < 0.08
    assert [each.run.name for each in found if not each.plan.fits] == []
    measured = [each for each in found if each.run.memory_gib is not None]
    assert len(measured) == 3
    for each in measured:
        assert each.plan.memory.peak_bytes / GIB == pytest.approx(each.run.memory_gib, rel=0.16), each.run.name
