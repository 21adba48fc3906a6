"""Steps of optimizers that are not connected: a model watches them, checks them, and spares them the costs of DTensors.

Every model is watched for from `watch_optimizers` on, by torch's global hooks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from megatron_fsdp.engine.engine import Engine, Pass
from megatron_fsdp.engine.param_group import REPLACED
from megatron_fsdp.errors import ConfigurationError, Remedies, warn_caller
from megatron_fsdp.optim.local_step import LocalStep, LocalView, params_of
from megatron_fsdp.optim.state_dict import cut_state


def watch_optimizers(engine: Engine) -> None:
    """Check each step of optimizers that are not connected, and report it to an engine, for as long as it lives."""
    watched_engines()[engine] = OptimizerCheck(engine.remedies)


@functools.cache
def watched_engines() -> weakref.WeakKeyDictionary[Engine, OptimizerCheck]:
    """Register torch's global hooks, once, and return the engines that they report to, with the checks of each.

    The hooks stay: a model may be collected while torch iterates over its hooks, which must not change then.
    """
    watchers: weakref.WeakKeyDictionary[Engine, OptimizerCheck] = weakref.WeakKeyDictionary()
    seen: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()
    adopted: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(optimizer: Optimizer, *_unused: Any) -> None:
        for engine in tuple(watchers):
            hands_out = engine.open_iteration or engine.units_in_full_context  # tensors that would miss the step
            if hands_out and (optimizer in engine.connected or engine.is_stepped_by(optimizer)):
                engine.refuse_shown_copies("an optimizer stepped")
            if optimizer not in engine.connected and engine.is_stepped_by(optimizer):
                engine.on_pass(Pass.NONE)  # a connected one meets ranks that may skip units when it synchronises
        if seen.get(optimizer) is not optimizer.state:  # torch sets another one when it loads
            cut_state(optimizer)
            seen[optimizer] = optimizer.state
        if optimizer in adopted or isinstance(optimizer, LocalView):
            return
        known = [engine.group_and_index for engine in watchers if optimizer not in engine.connected]
        if not all(params.keys().isdisjoint(map(id, params_of(optimizer))) for params in known):
            refuse_local_blocks(optimizer)
            adopted.add(optimizer)
            _adopt(optimizer, watchers)

    def after_step(optimizer: Optimizer, *_unused: Any) -> None:
        if isinstance(optimizer, LocalView):
            return  # a part of a step in backward
        for engine, check in tuple(watchers.items()):
            if optimizer not in engine.connected:  # else its own hooks install the weights
                check.check_parameters(optimizer)
                check.warn_of_unreduced(optimizer, engine)
                engine.stepped |= engine.is_stepped_by(optimizer)  # custom kernels raise no version counters

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    return watchers


def _adopt(optimizer: Optimizer, engines: Iterable[Engine]) -> None:
    """Spare an optimizer that is not connected the costs of DTensors: dispatch in steps, and gradients that are None.

    Its steps run on local tensors (`local_step.py`), where they are of a known kind; `zero_grad` frees main gradients.
    """
    step = LocalStep()

    def before(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_connected = any(stepped in engine.connected for engine in tuple(engines))  # meanwhile
        if is_connected or not args or args[0] is not stepped:
            return None
        return (step.proxy(stepped), *args[1:]), kwargs

    optimizer.register_step_pre_hook(before)
    first = optimizer.register_step_post_hook(lambda stepped, *_: step.finish(stepped))
    optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
    if "zero_grad" in vars(optimizer):
        return  # connected, or the program's own; then the next forward frees gradients
    owner, original = weakref.ref(optimizer), type(optimizer).zero_grad

    @functools.wraps(original)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        if (alive := owner()) is not None:
            original(alive, *args, **kwargs)
            for engine in tuple(engines):
                engine.free_cleared_gradients()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def refuse_local_blocks(optimizer: Optimizer) -> None:
    """Raise for a class of torchao or bitsandbytes, whose kernels take no shards and whose state cannot be resharded.

    They keep a scale for each block of a rank's part, which other numbers of ranks cut elsewhere.
    """
    library = type(optimizer).__module__.partition(".")[0]
    if library in ("torchao", "bitsandbytes"):
        raise ConfigurationError(
            f"{type(optimizer).__name__} of {library} steps plain tensors with kernels of its own, and its state for "
            "blocks of a rank's part fits no other number of ranks; use megatron_fsdp.AdamW8bit, which keeps as few "
            "bytes, or torch.optim.AdamW"
        )


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
        held = [(where, param) for where, param in held_parameters(optimizer) if hasattr(param, REPLACED)]
        if not held:
            self._right.add(optimizer)
        for where, param in held:
            if param.grad is None and param.requires_grad:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds {getattr(param, REPLACED)} in {where} as it was before the "
                    f"model was sharded, where no gradient comes, so its steps train nothing; build the optimizer on "
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
