"""Gradients by sharded parameters: `torch.autograd.grad(loss, weight)` and `loss.backward(inputs=[weight])`.

Autograd's graph holds the full parameters that modules compute with, the caller the sharded ones. So torch would find
that a sharded parameter was not used. Its function that starts a backward is wrapped, once and for good: where it is
asked for sharded parameters of a model, it is asked for the full ones, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.errors import ShardOperationError


def answer_for_sharded_parameters(engine: Engine) -> None:
    """Enable torch.autograd to differentiate by a model's sharded parameters, for as long as the model lives."""
    _engines().add(engine)


@functools.cache
def _engines() -> weakref.WeakSet[Engine]:
    """Patch torch's function that starts a backward, once, and return the engines whose parameters it looks up."""
    engines: weakref.WeakSet[Engine] = weakref.WeakSet()
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward  # private, but nothing public sees the inputs of a backward

    @functools.wraps(run)
    def run_backward(
        outputs: Any, grads: Any, retain_graph: Any, create_graph: Any, inputs: Any, *unused: Any, **how: Any
    ) -> Any:
        full = _full_parameters(engines, inputs) if UnevenDTensor in map(type, inputs) else {}
        if not full:
            return run(outputs, grads, retain_graph, create_graph, inputs, *unused, **how)
        asked = (*inputs, *full.values())
        if how["accumulate_grad"]:
            return run(outputs, grads, retain_graph, create_graph, asked, *unused, **how)
        found = run(outputs, grads, retain_graph, create_graph, asked, True, **how)
        own = dict(zip(full, found[len(inputs) :], strict=True))
        joined = tuple(map(functools.partial(_joined, own), range(len(inputs)), inputs, found))
        if not unused[0] and None in joined:
            raise RuntimeError(
                f"the differentiated tensor at index {joined.index(None)} was not used in the graph of this rank; pass "
                "allow_unused=True to get None for it"
            )
        return joined

    autograd._engine_run_backward = run_backward
    return engines


def _full_parameters(engines: weakref.WeakSet[Engine], inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the full parameters of sharded inputs that take gradients, by position."""
    found: dict[int, torch.Tensor] = {}
    for place, tensor in enumerate(inputs):
        for engine in engines:
            group, index = engine.group_and_index.get(id(tensor), (None, 0))
            if group is not None and group.full[index].requires_grad:
                found[place] = group.full[index]
    return found


def _joined(own: dict[int, torch.Tensor | None], place: int, param: Any, direct: torch.Tensor | None) -> Any:
    """Return the gradient of an input; for a sharded parameter that modules used, this rank's full one, in its dtype.

    Raises:
        ShardOperationError: It was used outside of a forward, too, whose gradient is that of all ranks and sharded.
    """
    grad = own.get(place)
    if grad is None:
        return direct
    if direct is not None:
        raise ShardOperationError(
            "torch.autograd.grad was asked for a sharded parameter that was used inside of the forward, whose gradient "
            "is this rank's, and outside of it, whose gradient is that of all ranks; ask for them one by one, or call "
            "backward(inputs=...) and read .grad, where they are added up"
        )
    return grad.to(param.dtype)
