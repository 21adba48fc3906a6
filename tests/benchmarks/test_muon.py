"""The benchmark of Muon: a small run in which both Muons train alike."""

import pytest

from benchmarks.launching import measure_on_ranks
from benchmarks.muon import CONTENDERS, Request, measure


def test_both_muons_train_alike() -> None:
    request = Request(width=16, layers=2, tokens=8, steps=2, warmup=1)
    readings = measure_on_ranks(measure, request, 2)[0]
    assert list(readings) == list(CONTENDERS)
    ours, gathered, adamw = readings.values()
    assert ours.losses == pytest.approx(gathered.losses, rel=1e-4)
    assert ours.losses[0] == adamw.losses[0]
    assert ours.losses[-1] != adamw.losses[-1]
    assert all(0 < reading.optimizer_s < reading.step_s for reading in readings.values())
