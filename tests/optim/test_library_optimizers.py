"""Unmodified optimizers of `pytorch_optimizer`, declared as stepping whole tensors: the bits of one process."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp import steps_whole_tensors
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks
from tests.support.optimizer_reference import ReferencePair, flat, matrices, three_steps

library = pytest.importorskip("pytorch_optimizer")


def make(name: str, params: Sequence[Any]) -> torch.optim.Optimizer:
    kind = steps_whole_tensors(getattr(library, name))
    made: torch.optim.Optimizer = kind([{"params": params, "use_muon": True}] if name == "Muon" else params, lr=0.01)
    return made


@pytest.mark.full(short=["SOAP-1", "SOAP-2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["SOAP", "Shampoo", "AdaFactor", "Muon"])
@on_ranks()
def test_optimizers_of_a_library_step_as_in_one_process(name: str) -> None:
    three_steps(matrices(), partial(make, name), flat(3), without=2)


def after(name: str, steps: int) -> ReferencePair:
    pair = ReferencePair(matrices(), partial(make, name), flat(3))
    for step in range(steps):
        pair.step(step)
    return pair


def save(name: str, folder: Path) -> None:
    after(name, 2).save(folder)


def go_on(name: str, folder: Path) -> list[str]:
    return after(name, 0).goes_on(after(name, 2), folder / "ours")


@pytest.mark.full(short=["AdaFactor"])
@pytest.mark.parametrize("name", ["Shampoo", "AdaFactor"])
def test_they_go_on_with_another_number_of_ranks(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    run_ranks(2, save, name, tmp_path)
    assert run_ranks(3, go_on, name, tmp_path) == [[]] * 3
