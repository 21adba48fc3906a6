"""The models whose parameters an optimizer updates."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_fsdp.megatron_fsdp import MegatronFSDP


def model_of(param: Tensor) -> MegatronFSDP:
    """Return the model of a sharded parameter."""
    model: MegatronFSDP = param._megatron_fsdp_model.self_reference()  # type: ignore[attr-defined]
    return model


def engine_of(param: Tensor) -> Engine:
    """Return the engine of the model of a sharded parameter."""
    return model_of(param)._engine


class Models:
    """The models whose parameters one optimizer updates, mostly one; held weakly.

    Iterating raises a ConfigurationError where one of them has been deleted.
    """

    def __init__(self, models: Sequence[MegatronFSDP]) -> None:
        self._references = [weakref.ref(model) for model in models]

    def __iter__(self) -> Iterator[MegatronFSDP]:
        models = [model for reference in self._references if (model := reference()) is not None]
        if len(models) < len(self._references):
            raise ConfigurationError(
                "the model whose parameters this optimizer updates has been deleted; build a new optimizer for a new "
                "model"
            )
        return iter(models)

    @property
    def engines(self) -> list[Engine]:
        """Their engines."""
        return [model._engine for model in self]
