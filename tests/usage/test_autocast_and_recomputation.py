"""Autocast in all its forms, and recomputation with nesting, keywords and dropout, equal one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import fully_shard_model
from tests.conftest import RunRanks
from tests.support.case import STRATEGIES, Run, Scenario, Setting, Tolerance, check_strategies, three_steps
from tests.support.on_ranks import on_ranks
from tests.support.zoo import Layer, Ordered, Recomputed, Where, make_batch, vector_case, vector_loss

SHARDED = (Setting(3), Setting(2))
BF16 = Tolerance(rtol=2e-2, atol=1e-3, of_largest=2e-2)
"""Gradients of bf16 products differ by a few of its roundings (2 ** -8) where a batch is cut in other places."""


def train_without_cache(run: Run) -> None:
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = run.loss(step)
        loss.backward()
        run.step()


def accumulate_inside_autocast(run: Run) -> None:
    """Both backwards inside of one context, so that the second forward finds the casts of the first."""
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            run.backward(2 * step, 2 * step + 1)
        run.step()


@pytest.mark.parametrize("script", [train_without_cache, accumulate_inside_autocast])
def test_training_under_autocast(run_ranks: RunRanks, script: Callable[[Run], None]) -> None:
    check_strategies(run_ranks, 2, Scenario(script, vector_case(Ordered)), STRATEGIES[1::2], BF16)


# ---- recomputation -------------------------------------------------------------------------------------------------


class NestedCheckpoints(Ordered):
    """All layers in one checkpoint, each layer in another inside of it, called with keywords."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self._stack, self.first(x), scale=0.5, use_reentrant=False))

    def _stack(self, x: Tensor, *, scale: float) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._one, layer, x=x, scale=scale, use_reentrant=False)
        return x

    def _one(self, layer: nn.Module, *, x: Tensor, scale: float) -> Tensor:
        return layer(x) * scale


def test_checkpoints_inside_checkpoints_with_keywords(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 2, Scenario(three_steps, vector_case(NestedCheckpoints)), SHARDED)


GATHERS: dict[Where | None, int] = {
    None: 7,  # the root and four units in forward; two units are still there in backward
    "units": 7,  # recomputation finds the unit gathered for its backward
    "inside": 7,
    "pairs": 7,  # a pair fills the two slots: recomputed together, then run backward
    "all": 11,  # four units are recomputed through two slots, and the first two of them come again for backward
}


@pytest.mark.unmerged
@pytest.mark.full(cover=1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", GATHERS)
@on_ranks(2)
def test_recomputation_gathers_as_often_as_it_must(where: Where | None, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = fully_shard_model(Ordered() if where is None else Recomputed(where, reentrant), fsdp_unit_modules=[Layer])
    for step in range(4):
        before = model.traffic()
        vector_loss(model, make_batch(2, torch.Generator().manual_seed(0))).backward()
        model.install_optimized_model_weights()
        assert step < 2 or model.traffic().since(before).gathers == GATHERS[where]
