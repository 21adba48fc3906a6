"""Taking part in a unit's communication without computing with it, for ranks that have no data for the unit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fsdp.engine.engine import Engine, ForwardCall
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.sharding.units import ROOT_UNIT


@dataclass(frozen=True)
class UnitCall:
    """A unit's module whose forward is replaced, and the units that this forward would call, in order."""

    unit: int
    module_index: int
    inner: tuple[UnitCall, ...] = ()


def unit_calls(module: nn.Module, number_of: Mapping[int, tuple[int, int]]) -> tuple[UnitCall, ...]:
    """Return the units of a module as its forward calls them, if modules run in the order of their registration."""
    inner = tuple(call for child in module.children() for call in unit_calls(child, number_of))
    own = number_of.get(id(module))
    return inner if own is None else (UnitCall(*own, inner),)


def calls_of(
    engine: Engine, root: nn.Module, module: nn.Module | None, order: Iterable[nn.Module] | None
) -> tuple[UnitCall, ...]:
    """Return the unit calls that `take_part` replaces.

    Args:
        engine: Engine of the model.
        root: The model.
        module: A part of it; None: all of it.
        order: Modules within it in the order that the forward calls them; None: the order of registration.

    Raises:
        ConfigurationError: A module is not part of the model.
    """
    number_of = {
        id(root.get_submodule(path)): (unit.index, module_index)
        for unit in engine.units
        for module_index, path in enumerate(unit.modules)
    }
    known = {id(part) for part in root.modules()}
    whole = root if module is None else module
    modules = None if order is None else tuple(order)
    for given in (whole, *(modules or ())):
        if id(given) not in known:
            raise ConfigurationError(
                f"take_part was given a {type(given).__name__} that is not part of the sharded model; pass a module "
                "of model.module, or None for all of it"
            )
    if modules is None:
        return unit_calls(whole, number_of)
    inner = tuple(call for inside in modules for call in unit_calls(inside, number_of))
    own = number_of.get(id(whole))
    return inner if own is None else (UnitCall(*own, inner),)


def take_part(engine: Engine, calls: Iterable[UnitCall], hidden: Tensor) -> Tensor:
    """Run the communication of some units' forwards now, and that of their backwards when `hidden`'s gradient comes.

    Returns:
        The same values; a new tensor where a backward is going to run.

    Raises:
        ScheduleError: `hidden` cannot carry a gradient.
    """
    if not hidden.is_floating_point():
        raise ScheduleError(
            f"take_part was given a tensor of {hidden.dtype}, which carries no gradient; pass a floating-point "
            "tensor that the loss depends on, or none and add the result to the loss"
        )
    for call in calls:
        hidden = _communicate_for(engine, call, hidden)
    return hidden


def _communicate_for(engine: Engine, call: UnitCall, hidden: Tensor) -> Tensor:
    try:
        engine.pre_forward(call.unit, call.module_index)
        for inner in call.inner:
            hidden = _communicate_for(engine, inner, hidden)
    except BaseException:
        engine.post_forward(call.unit, needs_backward=False, failed=True, module_index=call.module_index)
        raise
    trainable = engine.units[call.unit].is_trainable or (
        call.unit == ROOT_UNIT and any(u.is_trainable for u in engine.units)
    )
    needs_backward = torch.is_grad_enabled() and (hidden.requires_grad or trainable)
    reads_weights = not engine.units[call.unit].only_looks_up  # as on the ranks that look something up
    forward = engine.post_forward(
        call.unit, needs_backward, module_index=call.module_index, reads_weights=reads_weights
    )
    if not needs_backward:
        return hidden
    anchor = torch.empty(0, device=hidden.device, requires_grad=True)  # so there is a backward in any case
    passed: Tensor = _Passage.apply(hidden, anchor)  # type: ignore[no-untyped-call]
    passed.register_hook(partial(_announce, weakref.ref(engine), forward))
    return passed


def _announce(reference: weakref.ref[Engine], forward: ForwardCall, _grad: Tensor) -> None:
    engine = reference()
    if engine is not None:
        engine.pre_backward(forward)


class _Passage(torch.autograd.Function):
    """Identity, with a node in the graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor) -> Tensor:
        # Recomputation of a checkpointed function begins when a saved tensor is unpacked, as in a unit's backward.
        ctx.save_for_backward(anchor)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return grads[0], None
