"""Hooks on modules and parameters: they report to the engine and do nothing else. All references to it are weak."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.runtime.compiled import is_compiled_in_place, surround, uncompiled
from megatron_fsdp.runtime.engine import Engine, ForwardCall, live_engine
from megatron_fsdp.runtime.schedule import ROOT
from megatron_fsdp.runtime.side_outputs import SideOutputs
from megatron_fsdp.unit.unit import Unit

_TRANSPARENT = (torch.Tensor, int, float, complex, str, bytes, type(None))
"""What cannot hide a tensor."""


def register_hooks(engine: Engine, modules: Mapping[int, nn.Module]) -> list[RemovableHandle]:
    """Register everything that one model needs.

    Args:
        engine: Whom to report to; the hooks hold it weakly.
        modules: The module of each unit.

    Returns:
        The handles, to remove the hooks again.
    """
    reference = weakref.ref(engine)
    handles: list[RemovableHandle] = []
    unit_modules = {id(module) for module in modules.values()}
    for index, module in modules.items():
        watch = None
        if index != ROOT and engine.units[index].lives_in_slots:
            watch = SideOutputs(module, unit_modules)
        before = partial(_before_forward, reference, index, watch)
        after = partial(_after_forward, reference, index, watch)
        if is_compiled_in_place(module):
            surround(module, before, after)
            continue
        handles.append(module.register_forward_pre_hook(uncompiled(before), prepend=True))
        handles.append(module.register_forward_hook(uncompiled(after), always_call=True))
    for inner in _outside_of_units(modules[ROOT], unit_modules):
        door = _Door(reference)
        handles.append(inner.register_forward_pre_hook(uncompiled(door.enter), prepend=True))
    for unit in engine.units:
        for position in range(len(unit.groups)):
            handles += engine.watch_gradients(unit.index, position)
    return handles


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings, registered pytree classes and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))
        elif isinstance(leaf, Mapping):
            yield from tensors_in(dict(leaf))


def _before_forward(
    reference: weakref.ref[Engine], index: int, watch: SideOutputs | None, _module: nn.Module, _args: Any
) -> None:
    if watch is not None:
        watch.begin()
    engine = live_engine(reference)
    if index not in engine.opened:
        engine.before_forward(index)


def _after_forward(
    reference: weakref.ref[Engine], index: int, watch: SideOutputs | None, _module: nn.Module, _args: Any, output: Any
) -> Any:
    engine = reference()
    left_behind = watch.end() if watch is not None else []
    if engine is None:
        return output  # reported before the forward; this is called although that raised
    if index in engine.opened:
        return output
    unit = engine.units[index]
    output = _copy_weights(unit, output)
    outputs: list[torch.Tensor] = []
    computes_gradients = torch.is_grad_enabled()
    if computes_gradients:
        found = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
        outputs = [tensor for tensor in (*found, *left_behind) if tensor.requires_grad]
    failed = output is None and sys.exc_info()[1] is not None  # hooks that are always called run while it is handled
    call = engine.after_forward(index, bool(outputs), failed)
    if computes_gradients and not outputs:
        _refuse_opaque(engine, index, output)
    for tensor in outputs:
        if tensor.is_leaf:
            continue  # nothing of this forward leads to it, and its hooks would outlive the call
        tensor.register_hook(partial(_before_backward, reference, call))
    return output


class _Door:
    """Lets a module inside of the model stand for the model where it is called on its own.

    Callers may come in below the root: peft's `generate` calls the model inside of its wrapper, people call a head or
    an embedding. Then the root's forward is this module's.

    Every call of every module pays for its hooks, so the one behind the forward is registered when it is first needed:
    by a hook in front of the forward, which is early enough.
    """

    def __init__(self, reference: weakref.ref[Engine]) -> None:
        self._reference = reference
        self._leaves = False  # the hook behind the forward is there
        self._opened: list[bool] = []  # one entry per call under way: whether it opened the root's forward

    def enter(self, module: nn.Module, args: Any) -> None:
        """The module is called."""
        scheduler = live_engine(self._reference).scheduler
        opens = not scheduler.in_forward and not scheduler.in_backward
        if opens:
            _before_forward(self._reference, ROOT, None, module, args)
            if not self._leaves:
                module.register_forward_hook(uncompiled(self._leave), always_call=True)
                self._leaves = True
        if self._leaves:
            self._opened.append(opens)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The module has run, or failed."""
        if self._opened and self._opened.pop():
            return _after_forward(self._reference, ROOT, None, module, args, output)
        return output


def _outside_of_units(module: nn.Module, unit_modules: set[int]) -> Iterator[nn.Module]:
    """Modules with parameters that are neither a unit nor inside of one, without the root; each once."""
    seen: set[int] = {id(module)}
    waiting = [module]
    while waiting:
        for child in waiting.pop().children():
            if id(child) not in unit_modules | seen and next(child.parameters(), None) is not None:
                seen.add(id(child))
                waiting.append(child)
                yield child


def _copy_weights(unit: Unit, output: Any) -> Any:
    """Copy results that are views of gathered weights, which will be overwritten before they are used."""
    if isinstance(output, torch.Tensor):
        return output.clone() if unit.holds(output) else output
    if not any(unit.holds(tensor) for tensor in tensors_in(output)):
        return output

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and unit.holds(leaf) else leaf

    copied = tree_map(copy, output)
    if any(unit.holds(tensor) for tensor in tensors_in(copied)):
        raise ScheduleError(
            f"unit {unit.label} returned its own weight inside a {type(output).__name__}, where it cannot be "
            "replaced by a copy; the weight will be released, so return weight.clone(), or use a tuple, list or dict"
        )
    return copied


def _refuse_opaque(engine: Engine, index: int, output: Any) -> None:
    """Refuse results that tensors cannot be found in: the beginning of the unit's backward would go unnoticed."""
    opaque = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, _TRANSPARENT)]
    opaque = [leaf for leaf in opaque if not dataclasses.is_dataclass(leaf) and not isinstance(leaf, Mapping)]
    if opaque and engine.units[index].lives_in_slots:
        raise ScheduleError(
            f"unit {engine.units[index].label} returned an object of type {type(opaque[0]).__name__}, in which no "
            "tensor can be found, so its weights could not be gathered for backward; return tuples, lists, dicts, "
            "dataclasses or classes registered with torch.utils._pytree"
        )


def _before_backward(reference: weakref.ref[Engine], call: ForwardCall, _grad: torch.Tensor) -> None:
    live_engine(reference).before_backward(call)
