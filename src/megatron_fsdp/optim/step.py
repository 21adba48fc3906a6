"""How the code of an optimizer's class is run on shards: on an object that stands in for the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class Step:
    """The way in which one optimizer is stepped. By itself it does nothing around the step."""

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        """Return the object on which the code of the optimizer's class is to run one step."""
        return optimizer

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure of the step."""
        return closure

    def finish(self, optimizer: Optimizer) -> None:
        """Take what the step has made, at once after it."""

    def fail(self, error: Exception) -> None:
        """Take note that the step has failed on this rank; raise a RankError on all where they wait for each other."""

    def hand_over(self) -> None:
        """Give the optimizer what a step has made and not given back, also after one that failed."""


def params_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]
