"""Scripts, an optimizer and settings that several files of tests share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.sharded_run import Run, Setting

STRATEGIES = tuple(Setting(strategy) for strategy in range(4))
MAX_NORM = 0.05
"""A norm that every gradient exceeds."""

Test = Callable[..., None]


def each_half(settings: tuple[Any, ...], *scripts: Callable[[Run], None]) -> Callable[[Test], Test]:
    """Parametrize a test by `script`, where there are some, and by `settings`, the even and the odd ones.

    The short suite runs every script, and every setting, but not each with each.
    """

    def mark(test: Test) -> Test:
        test = pytest.mark.parametrize("settings", [settings[::2], settings[1::2]], ids=["even", "odd"])(test)
        if not scripts:
            return pytest.mark.full(short=["odd"])(test)
        return pytest.mark.full(cover=1)(pytest.mark.parametrize("script", scripts)(test))

    return mark


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


def clip_by_model(run: Run) -> None:
    """Three steps with the method; torch's function on one process."""
    _clip(run, by_model=run.sharded is not None)


def clip_by_torch(run: Run) -> None:
    """Three steps with torch's function on both sides."""
    _clip(run, by_model=False)


def _clip(run: Run, by_model: bool) -> None:
    for step in range(3):
        run.loss(step).backward()
        if by_model:
            assert run.sharded is not None
            norm = run.sharded.clip_grad_norm_(MAX_NORM)
        else:
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), MAX_NORM)
        run.note("norm", {"norm": norm.full_tensor() if isinstance(norm, DTensor) else norm})
        run.step()
