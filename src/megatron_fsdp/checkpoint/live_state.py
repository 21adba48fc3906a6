"""The state of a training job as nested dicts, under the names that checkpoints use.

model.module.<parameter or buffer>                     DTensors and tensors, the live ones
optimizer.state.module.<parameter>.<slot>              live DTensors and tensors
optimizer.param_groups                                 options of the groups, with the names of their parameters
rng_state.(<stage>, <tensor rank>).<data rank>.states  random states
iteration                                              steps done
<anything else>                                        what the caller adds: a schedule, a data position, an average
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint import optimizer_state, rng
from megatron_fsdp.checkpoint.naming import PREFIX, groups_of_all, own_name, place_of
from megatron_fsdp.checkpoint.optimizer_state import as_extra
from megatron_fsdp.errors import ConfigurationError

MODEL, OPTIMIZER, ITERATION = "model", "optimizer", "iteration"
RESERVED = frozenset({MODEL, OPTIMIZER, ITERATION, rng.SECTION})


class Stateful(Protocol):
    """The interface of objects that can be put into a checkpoint next to model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors in it are loaded in place."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


Extras = Mapping[str, Stateful]


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    iteration: int,
    extra: Extras | None = None,
    with_rng: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Collect everything that belongs in a checkpoint; only random states are copied.

    Args:
        model: Sharded or not.
        optimizer: Of its parameters; None: not saved.
        iteration: Steps done.
        extra: More to save, by name.
        with_rng: Whether to save the random states of this rank.
        group: The ranks that save.

    Raises:
        ConfigurationError: A name of `extra` is taken or has a dot, or the optimizer is not that of the model.
    """
    check_names(extra)
    state: dict[str, Any] = {MODEL: model_section(model), ITERATION: iteration}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer_state.collect(optimizer, model)
    if with_rng:
        state |= rng.collect(rng.logical_rank_of(model, group), device_of(model))
    state |= {name: as_extra(value).state_dict() for name, value in (extra or {}).items()}
    return state


def join_stages(state: dict[str, Any], model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Let the state of a pipeline stage name the parameter groups of all stages; collective over the pipeline.

    Args:
        state: As of `collect`; changed in place.
        model: Whose state it is.
        group: The ranks that save.
    """
    place = place_of(model)
    if place is not None and OPTIMIZER in state:
        section = state[OPTIMIZER]
        section[optimizer_state.GROUPS] = groups_of_all(section[optimizer_state.GROUPS], place, group)


def model_section(model: nn.Module) -> dict[str, Any]:
    """Return the model's state, with one `module.` before each name, whether a wrapper adds it or not."""
    return {f"{PREFIX}{own_name(model, key)}": value for key, value in model.state_dict().items()}


def check_names(extra: Extras | None) -> None:
    """Refuse names of extras that would be mistaken for others.

    Raises:
        ConfigurationError: A name is reserved, empty or has a dot.
    """
    for name in extra or {}:
        if name in RESERVED or not name or "." in name:
            raise ConfigurationError(
                f"extra has {name!r}; give names without dots other than {', '.join(sorted(RESERVED))}"
            )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))
