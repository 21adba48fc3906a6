"""One optimizer on shards: the way in which it is stepped, its parameters, and checks of those that it holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron_fsdp.engine.engine import Engine, alive
from megatron_fsdp.errors import ConfigurationError, Remedies, warn_caller


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

    def fail(self, error: BaseException) -> None:
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

    def fail(self, error: BaseException) -> None:
        """Raise a RankError on all ranks, if they have not agreed in this step yet."""
        optimizer = None if self._begun is None else self._begun()
        if optimizer is not None:
            self.agree(optimizer, error)

    def agree(self, optimizer: Optimizer, error: BaseException | None) -> None:
        """Raise the error of any rank on all ranks of the exchange; collective."""
        raise NotImplementedError


def params_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def without_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the part of an optimizer's state that belongs to no parameter, such as a count of steps, by text key."""
    return {key: value for key, value in state.items() if isinstance(key, str)}


def engine_of(param: Tensor) -> Engine:
    """Return the engine of the model of a sharded parameter; raise a ScheduleError if the model was deleted."""
    return alive(param._fsdp_engine)  # type: ignore[attr-defined]


_REPLACED = "_fsdp_replaced"  # on a parameter that sharding has taken out of a module: its name


def mark_replaced(name: str, param: nn.Parameter) -> None:
    """Mark an original parameter that sharding took out of a module; it gets no gradient any more."""
    setattr(param, _REPLACED, name)


def replaced_name(param: Tensor) -> str | None:
    """Return the name of a parameter that sharding took out of a module; None for any other."""
    name: str | None = getattr(param, _REPLACED, None)
    return name


class OptimizerCheck:
    """Checks of the optimizers that step beside one model: for those whose steps train nothing."""

    def __init__(self, remedies: Remedies) -> None:
        self._remedies = remedies
        self._right: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_warned = False

    def check_parameters(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer holds parameters from before the sharding. One with none is not searched again.

        One with a gradient is in use elsewhere, by another module that shares it and was not sharded, say.
        """
        if optimizer in self._right:
            return
        held = [(where, param) for where, param in held_parameters(optimizer) if replaced_name(param) is not None]
        if not held:
            self._right.add(optimizer)
        for where, param in held:
            if param.grad is None and param.requires_grad:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds {replaced_name(param)} in {where} as it was before the model "
                    f"was sharded, where no gradient comes, so its steps train nothing; build the optimizer on "
                    "model.parameters() after the model is sharded"  # whichever model finds it
                )

    def warn_of_unreduced(self, optimizer: Optimizer, engine: Engine) -> None:
        """Warn, once, if an unconnected optimizer has stepped before any gradient of its parameters was reduced."""
        if self._has_warned:
            return
        params = params_of(optimizer)
        known = engine.group_and_index
        gradients = [known[id(param)][0].gradients for param in params if id(param) in known]
        waits = any(
            found is not None and (found.has_unreduced_gradient or found.has_partly_reduced) for found in gradients
        )
        if waits and all(param.grad is None for param in params):
            self._has_warned = True
            warn_caller(
                f"{type(optimizer).__name__} stepped while all gradients of its parameters wait for their reduction "
                f"{self._remedies.sync}"
            )


def check_keeps_no_copies(optimizer: Optimizer, known: Mapping[int, str]) -> None:
    """Raise if an optimizer keeps parameters outside of its groups, where sharding cannot replace them."""
    for where, param in held_parameters(optimizer):
        if where != _IN_GROUPS and id(param) in known:
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps {known[id(param)]} in {where}, where sharding cannot replace it, so "
                "its steps would train nothing; shard the model by fully_shard_model, build the optimizer on its "
                "parameters, and hand it to fully_shard_optimizer"
            )


def held_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors in an optimizer's groups and in its other lists, with the place of each."""
    lists = [group["params"] for group in optimizer.param_groups]
    yield from ((_IN_GROUPS, param) for params in lists for param in params)
    for name, value in vars(optimizer).items():
        is_listed = name in _GROUPS_AND_STATE or any(value is params for params in lists)
        if not is_listed and isinstance(value, list | tuple | set | dict):
            leaves = [*tree_leaves(value), *(value if isinstance(value, dict | set) else ())]
            yield from ((f"its attribute {name}", leaf) for leaf in leaves if isinstance(leaf, Tensor))


_IN_GROUPS = "its param_groups"
_GROUPS_AND_STATE = ("param_groups", "state", "defaults")
