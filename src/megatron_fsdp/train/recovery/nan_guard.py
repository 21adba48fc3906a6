"""Steps whose loss or gradient is not finite: skipped and counted, and the end of the run where they go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.launch.failures import NonFiniteStepError

_SHOWN = 5


class NanGuard:
    """Counts steps in a row that cannot be taken. Every rank judges the same numbers."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        """Allow `limit` of them in a row; `say` shows each to the user."""
        self._limit = limit
        self._say = say
        self._in_a_row = 0

    def judge(self, step: int, loss: float, grad_norm: float, trained: Trained) -> None:
        """Take note of a step; one that overflowed through the scale of the loss alone is no failure. Collective.

        Args:
            step: Its number, from 1.
            loss: The same on all ranks.
            grad_norm: Likewise.
            trained: Still has the step's gradients.

        Raises:
            NonFiniteStepError: It was one too many; on every rank.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return
        if trained.scale is not None and trained.scale.has_overflowed(loss, grad_norm):
            scale = f"{trained.scale.value:,.0f}"
            self._say(f"step {step}: gradients overflow float16 at loss scale {scale}: skipped, halved")
            return
        self._in_a_row += 1
        what = f"step {step} has loss {loss} and gradient norm {grad_norm}{where_told(trained.model)}"
        if self._in_a_row > self._limit:
            raise NonFiniteStepError(
                f"{what}: {self._in_a_row} steps in a row could not be taken, and --max-nan-steps is {self._limit}; "
                "lower --lr, look at the data of these steps, or go on from an earlier checkpoint"
            )
        self._say(f"{what}: skipped, {self._in_a_row} of at most {self._limit} in a row")


def where_told(model: nn.Module) -> str:
    """Which parameters have gradients that are not finite, and on which ranks; the same on every rank, collective."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(gather_objects(list(names_of_bad_gradients(model)))):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    if not ranks:
        return ""
    named = [f"{name} (rank {', '.join(map(str, having))})" for name, having in list(ranks.items())[:_SHOWN]]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"; not finite are the gradients of {', '.join(named)}{more}"


def names_of_bad_gradients(model: nn.Module) -> Iterator[str]:
    """Yield the parameters whose gradient, as far as this rank holds it, is not finite."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if isinstance(local, Tensor) and local.numel() and not bool(local.isfinite().all()):
            yield name
