"""Losses of a small transformer, written down once: every strategy and number of ranks must still give them.

The file guards against a change that moves reference and sharded run alike. Rewrite it, on purpose only, with
`json.dumps({"losses": reference(GOLDEN).losses}, indent=2)`.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import RunRanks
from tests.support.models import MODEL_CASES
from tests.support.sharded_run import Run, Scenario, Setting, reference, run_sharded

GOLDEN_FILE = Path(__file__).resolve().parents[1] / "golden" / "tiny_transformer.json"
STEPS = 5


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)


def five_steps(run: Run) -> None:
    for step in range(STEPS):
        run.loss(step).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


GOLDEN = Scenario(five_steps, MODEL_CASES["transformer"], adamw)


def golden_losses() -> list[float]:
    """The losses on file, in nats per token, one per step."""
    losses: list[float] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))["losses"]
    assert len(losses) == STEPS
    return losses


def test_one_process_gives_the_golden_losses() -> None:
    assert reference(GOLDEN).losses == pytest.approx(golden_losses(), rel=1e-6)


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_strategy_gives_the_golden_losses(run_ranks: RunRanks, num_ranks: int) -> None:
    jobs = [(GOLDEN, Setting(strategy)) for strategy in range(4)]
    for of_ranks in zip(*run_ranks(num_ranks, run_sharded, jobs), strict=True):
        losses = [sum(step) / num_ranks for step in zip(*(outcome.losses for outcome in of_ranks), strict=True)]
        assert losses == pytest.approx(golden_losses(), rel=1e-6)
