"""Steps of optimizers that are not connected, and that all gradients passed by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_fsdp.notices import warn_caller
from megatron_fsdp.unit.param_group import ParameterGroup


class UnseenGradients:
    """Warns once where a step updated nothing because all gradients wait for their reduction."""

    def __init__(self) -> None:
        self._warned = False

    def look_at(self, optimizer: torch.optim.Optimizer, places: Mapping[int, tuple[ParameterGroup, int]]) -> None:
        """An optimizer that is not connected has stepped.

        Args:
            optimizer: The optimizer.
            places: Group and index of each sharded parameter by id.
        """
        if self._warned:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        gradients = [places[id(param)][0].gradients for param in params if id(param) in places]
        waits = any(found is not None and (found.has_deferred or found.has_pending) for found in gradients)
        if waits and all(param.grad is None for param in params):
            self._warned = True
            warn_caller(
                f"{type(optimizer).__name__} stepped while all gradients of its parameters wait for their reduction "
                "(no_sync, or sync_model_each_microbatch=False), so nothing was updated; connect it with "
                "fully_shard_optimizer or DistributedOptimizer, or call finish_grad_sync first"
            )
