"""A further optimizer among the extras of a checkpoint, such as that of a second model.

Its state is stored as torch keys it, by the position of a parameter, so it has to be built in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_fsdp.checkpoint.optimizer_state import STATE, blank_slot


class OptimizerByPosition:
    """Shows an optimizer's state under text keys, and makes the tensors that a fresh one does not have yet.

    Args:
        optimizer: Of parameters that the checkpoint's own model and optimizer know nothing of.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with positions as text."""
        found = self._optimizer.state_dict()
        return {**found, STATE: {str(position): slots for position, slots in found[STATE].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state over, by the optimizer's own method."""
        by_position = {int(position): slots for position, slots in state_dict.get(STATE, {}).items()}
        self._optimizer.load_state_dict({**state_dict, STATE: by_position})

    def blank(self, path: Sequence[str], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor to load into, cut as its parameter; None for what is no state of a parameter.

        Args:
            path: Inside the state dict.
            shape: Global.
            dtype: Of the elements.
        """
        params = list(itertools.chain.from_iterable(group["params"] for group in self._optimizer.param_groups))
        if len(path) < 3 or path[0] != STATE or not path[1].isdecimal() or int(path[1]) >= len(params):
            return None
        return blank_slot(params[int(path[1])].detach(), path[-1], shape, dtype)


def as_extra(value: Any) -> Any:
    """An object as it is put into a checkpoint."""
    return OptimizerByPosition(value) if isinstance(value, torch.optim.Optimizer) else value
