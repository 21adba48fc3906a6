"""Predictions beside published runs: one set of assumptions, and how far it is off."""

import pytest

pytest.importorskip("transformers")

from megatron_fsdp.plan.machine import GIB
from megatron_fsdp.plan.published import Comparison, compare_published

MOST_ERROR = 0.15


@pytest.fixture(scope="module")
def found() -> tuple[Comparison, ...]:
    return compare_published()


def test_speeds_are_within_15_percent_of_what_was_measured(found: tuple[Comparison, ...]) -> None:
    wrong = {each.run.name: each.error for each in found if abs(each.error) > MOST_ERROR}
    assert wrong == {}
    assert sum(abs(each.error) for each in found) / len(found) < 0.08


def test_what_ran_fits(found: tuple[Comparison, ...]) -> None:
    assert [each.run.name for each in found if not each.plan.fits] == []


def test_peaks_are_within_16_percent_of_what_was_measured(found: tuple[Comparison, ...]) -> None:
    measured = [each for each in found if each.run.memory_gib is not None]
    assert len(measured) == 3
    for each in measured:
        assert each.plan.memory.peak_bytes / GIB == pytest.approx(each.run.memory_gib, rel=0.16), each.run.name
