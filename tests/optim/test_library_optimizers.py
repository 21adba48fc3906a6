"""Unmodified optimizers of `pytorch_optimizer`, declared as stepping whole tensors: the bits of one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_fsdp import steps_whole_tensors
from tests.support.on_ranks import on_ranks
from tests.support.optimizer_twins import flat, matrices, three_steps

library = pytest.importorskip("pytorch_optimizer")


@pytest.mark.full(short=["SOAP-2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["SOAP", "Shampoo", "AdaFactor", "Muon"])
@on_ranks()
def test_optimizers_of_a_library_step_as_in_one_process(name: str) -> None:
    kind = steps_whole_tensors(getattr(library, name))

    def make(params: Sequence[Any]) -> torch.optim.Optimizer:
        return kind([{"params": params, "use_muon": True}] if name == "Muon" else params, lr=0.01)

    three_steps(matrices(), make, flat(3), without=2)
