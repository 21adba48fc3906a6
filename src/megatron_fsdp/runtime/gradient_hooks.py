"""Hooks that the user registered on sharded parameters, run once their gradient is reduced.

Autograd reaches the full parameters that compute uses, not the sharded ones that the user holds. So what was registered
on these is called here, at each gradient sync, when all gradients are in their places:

- `register_hook` first: called with the gradient; what it returns replaces it;
- `register_post_accumulate_grad_hook` then: called with the parameter; it may step an optimizer and clear the gradient.

Both see what the parameter shows after the sync, with earlier backwards that were not cleared, deferred ones included.
They run in the order of units, on every rank for the same parameters, and for those only that got a gradient.
A gradient that autograd brings to a sharded parameter by itself (a penalty on `model.parameters()`) calls the hooks
right there, as for any tensor, and its share is part of what they see at the sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.unit.grad_slot import GradAttribute, get_grad, plain_attributes, set_grad
from megatron_fsdp.unit.param_group import ParameterGroup

_BACKWARD_HOOKS = attrgetter("_backward_hooks")
_ACCUMULATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def run_gradient_hooks(renewed: Iterable[tuple[ParameterGroup, Sequence[bool]]]) -> None:
    """Call the hooks of every parameter with a new gradient.

    Args:
        renewed: The groups whose gradients were reduced since the last sync, each with a flag per parameter: whether
            any rank had a gradient for it.

    Raises:
        ConfigurationError: What a hook returned cannot take the place of the gradient, or nobody takes it.
    """
    for group, used in renewed:
        if not _any_has_hooks(group):
            continue
        for index, param in enumerate(group.sharded):
            if _has_hooks(param, group.own_hooks) and used[index] and get_grad(param, group.grad_attribute) is not None:
                _run(group, index, param)


def _any_has_hooks(group: ParameterGroup) -> bool:
    with plain_attributes():
        keys = chain.from_iterable(filter(None, map(_BACKWARD_HOOKS, group.sharded)))
        return not group.own_hooks.issuperset(keys) or any(map(_ACCUMULATE_HOOKS, group.sharded))


def _has_hooks(param: nn.Parameter, own_hooks: set[int]) -> bool:
    return bool(param._post_accumulate_grad_hooks) or not own_hooks.issuperset(param._backward_hooks or ())


def _run(group: ParameterGroup, index: int, param: nn.Parameter) -> None:
    attribute = group.grad_attribute
    with torch.no_grad():
        for key, hook in list((param._backward_hooks or {}).items()):
            if key in group.own_hooks:
                continue
            grad = get_grad(param, attribute)
            answer = None if grad is None else hook(grad)
            if answer is not None:
                _replace(param, attribute, answer, group.names[index])
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            answer = hook(param)
            if answer is not None:
                raise ConfigurationError(
                    f"a post-accumulate-grad hook of {group.names[index]} returned a {type(answer).__name__}, which "
                    "would be lost; change the gradient in place and return None"
                )


def _replace(param: nn.Parameter, attribute: GradAttribute, answer: object, name: str) -> None:
    grad = get_grad(param, attribute)
    assert isinstance(grad, DTensor)
    fits = isinstance(answer, DTensor) and (answer.shape, answer.dtype) == (grad.shape, grad.dtype)
    if not (fits and isinstance(answer, DTensor) and answer.to_local().shape == grad.to_local().shape):
        found = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else "no tensor"
        raise ConfigurationError(
            f"a gradient hook of {name} returned a {type(answer).__name__} ({found}) where the gradient is a DTensor "
            f"({grad.dtype} {tuple(grad.shape)}); return None, or a DTensor of the same shape, dtype and sharding"
        )
    set_grad(param, attribute, answer)
