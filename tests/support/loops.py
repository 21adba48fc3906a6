"""Training scripts and optimizers that several parallelisms share."""

import torch
from torch import nn

from tests.support.sharded_run import Run


def adamw_above_noise(model: nn.Module) -> torch.optim.Optimizer:
    """An eps above rounding noise: the exact gradient of the bias of keys is 0."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def three_microbatches(run: Run) -> None:
    """Two steps of three microbatches each, the first two of which are deferred."""
    for step in range(2):
        with run.no_sync():
            (run.loss(3 * step) / 3).backward()
            (run.loss(3 * step + 1) / 3).backward()
        (run.loss(3 * step + 2) / 3).backward()
        run.step()
