"""One optimizer on shards: the way in which it is stepped, its parameters, and the engines of their models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from megatron_fsdp.engine.engine import Engine, live_engine
from megatron_fsdp.errors import ConfigurationError


class Step:
    """Base class of the ways to step one optimizer: runs the step of the optimizer's class on a proxy."""

    def proxy(self, optimizer: Optimizer) -> Optimizer:
        """Return the proxy on which the code of the optimizer's class runs one step."""
        return optimizer

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure of the step."""
        return closure

    def finish(self, optimizer: Optimizer) -> None:
        """Collect the results of the step, at once after it."""

    def begin(self, optimizer: Optimizer) -> None:
        """Note that a step begins, before any of its hooks, one of which may fail on this rank alone."""

    def fail(self, error: Exception) -> None:
        """Raise a RankError on all ranks, if others wait for this one, whose step has failed; collective then."""

    def hand_over(self) -> None:
        """Move remaining new state from the proxy to the optimizer, also after a step that failed."""


class ExchangingStep(Step):
    """A step with an exchange between ranks, who first agree that none has failed."""

    def __init__(self) -> None:
        self._begun: weakref.ref[Optimizer] | None = None  # until ranks have agreed for the first time in its step

    def begin(self, optimizer: Optimizer) -> None:
        """Note that other ranks will wait for this one."""
        self._begun = weakref.ref(optimizer)

    def fail(self, error: Exception) -> None:
        """Raise a RankError on all ranks, if they have not agreed in this step yet."""
        optimizer = None if self._begun is None else self._begun()
        if optimizer is not None:
            self.agree(optimizer, error)

    def agree(self, optimizer: Optimizer, error: Exception | None) -> None:
        """Raise the error of any rank on all ranks of the exchange; collective."""
        raise NotImplementedError


def params_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def without_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the part of an optimizer's state that belongs to no parameter, such as a count of steps, by text key."""
    return {key: value for key, value in state.items() if isinstance(key, str)}


def engine_of(param: Tensor) -> Engine:
    """Return the engine of the model of a sharded parameter.

    Raises:
        ScheduleError: The model has been deleted.
    """
    return live_engine(param._fsdp_engine)  # type: ignore[attr-defined]


class Engines:
    """The engines of the models whose parameters one optimizer updates, mostly one; held weakly.

    Iterating raises a ConfigurationError where one of them has been deleted.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._references = [weakref.ref(engine) for engine in engines]

    def __iter__(self) -> Iterator[Engine]:
        engines = [engine for reference in self._references if (engine := reference()) is not None]
        if len(engines) < len(self._references):
            raise ConfigurationError(
                "the model whose parameters this optimizer updates has been deleted; build a new optimizer for a new "
                "model"
            )
        return iter(engines)
