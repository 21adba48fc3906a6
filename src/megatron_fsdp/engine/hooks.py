"""Hooks on modules and their outputs, which find the tensors of a forward and backward and report to the engine.

`join` reports instead of them, on ranks that have no data for a unit. See Note [Weak references] in `engine.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine, ForwardCall, alive
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, ScheduleError, ShardOperationError
from megatron_fsdp.sharding.units import ROOT_UNIT

_NO_TRANSFORMS = nullcontext()
_TRANSPARENT = (torch.Tensor, int, float, complex, str, bytes, type(None))
"""Types that cannot contain a tensor."""


def unit_modules_of(engine: Engine) -> list[tuple[int, int, nn.Module]]:
    """List the modules of all units: the unit's index, the module's index in it, and the module."""
    return [
        (unit.index, module_index, module)
        for unit in engine.units
        for module_index, reference in enumerate(unit.modules.values())
        if (module := reference()) is not None
    ]


def register_hooks(engine: Engine, root: nn.Module | None) -> None:
    """Register all hooks of one model; `root`: its root, None where several modules have no unit above them."""
    reference = weakref.ref(engine)
    modules = unit_modules_of(engine)
    unit_modules = {id(module) for *_, module in modules}
    for unit_index, module_index, module in modules:
        watch = None
        # Weights that are whole between uses need no announced backward: autograd finds them anyway.
        if engine.units[unit_index].shards_compute_weights:
            watch = ForwardGraph(module if unit_index != ROOT_UNIT else None, unit_modules)
        entry = _UnitModule(unit_index, module_index, watch)
        before = partial(_pre_forward, reference, entry)
        after = partial(_post_forward, reference, entry)
        engine.units[unit_index].forward_hooks.append((before, after))
        if module._compiled_call_impl is not None:  # by `module.compile()`
            surround(module, before, after)
            label, call = engine.units[unit_index].label, module._compiled_call_impl
            engine.structure.compiled.append((label, weakref.ref(module), call))
            continue
        # First of all pre-hooks, so that the user's see full weights; and after exceptions too, to reshard.
        module.register_forward_pre_hook(uncompiled(before), prepend=True)
        module.register_forward_hook(uncompiled(after), always_call=True, with_kwargs=True)
    for inner in _outside_of_units(root, unit_modules) if root is not None else ():
        root_forward = _RootForward(reference)
        inner.register_forward_pre_hook(uncompiled(root_forward.enter), prepend=True)
    for unit in engine.units:
        # Gradients come by hooks of parameters, whatever way the module tree was called.
        for group_index in range(len(unit.groups)):
            engine.watch_gradients(unit.index, group_index)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over all tensors in nested tuples, lists, mappings, registered pytree classes and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))
        elif isinstance(leaf, Mapping):
            yield from tensors_in(dict(leaf))


def outside_of_transforms() -> AbstractContextManager[object]:
    """Return a context outside of the transforms of torch.func; a shared one where there are none, which is faster."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NO_TRANSFORMS
    return temporarily_clear_interpreter_stack()


class _UnitModule(NamedTuple):
    """A module of a unit: the unit, its index among the unit's modules, and the graph of its forward."""

    unit: int
    module_index: int = 0
    watch: ForwardGraph | None = None


def _pre_forward(reference: weakref.ref[Engine], entry: _UnitModule, _module: nn.Module, _args: Any) -> None:
    if entry.watch is not None:
        entry.watch.begin()
    engine = alive(reference)
    if entry.unit not in engine.units_in_full_context:
        with outside_of_transforms():
            engine.pre_forward(entry.unit, entry.module_index)


def _post_forward(
    reference: weakref.ref[Engine], entry: _UnitModule, _module: nn.Module, args: Any, kwargs: Any, output: Any
) -> Any:
    engine, unit_index = reference(), entry.unit
    # Before anything may return: `begin` and `end` come in pairs.
    auxiliary, has_graph = entry.watch.end() if entry.watch is not None else ([], False)
    if engine is None:
        return output  # the pre-hook has raised for it, and this hook is called even so
    if unit_index in engine.units_in_full_context:
        return output
    unit = engine.units[unit_index]
    output = _copy_weights(unit, output)
    # Hooks on outputs announce the backward. Auxiliary losses reach the total loss without being returned.
    outputs: list[torch.Tensor] = []
    computes_gradients = torch.is_grad_enabled()
    if computes_gradients:
        found: Iterable[torch.Tensor] = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
        outputs = [tensor for tensor in (*found, *auxiliary) if tensor.requires_grad]
        if has_graph and not outputs:
            # In attributes of returned objects, slots included.
            objects = (leaf for leaf in tree_leaves(output) if not isinstance(leaf, nn.Module))
            found = (tensor for each in objects for tensor in tensors_in(object.__getstate__(each)))
            outputs = [tensor for tensor in found if tensor.requires_grad]
    failed = output is None and sys.exc_info()[1] is not None  # always-called hooks run while the exception is handled
    with outside_of_transforms():
        call = engine.post_forward(unit_index, bool(outputs), failed, entry.module_index)
    # The backward of a plain lookup reads no weights.
    call.reads_weights = not unit.only_looks_up or any(type(out.grad_fn).__name__ != _LOOKUP for out in outputs)
    if has_graph and not outputs:
        _refuse_opaque(engine, unit_index, (args, kwargs), output)
    for tensor in outputs:
        if tensor.is_leaf:
            continue  # not computed by this forward, and its hooks would outlive the call
        tensor.register_hook(partial(_pre_backward, reference, call))
    return output


_LOOKUP = "EmbeddingBackward0"


class _RootForward:
    """Hooks that run the root's forward around a module inside of the model that is called on its own.

    Callers may enter below the root: peft's `generate` calls the model inside of its wrapper, people call a head or
    an embedding. Then the root's forward is this module's.

    Every call of every module pays for its hooks, so the hook after the forward is registered when it is first needed,
    by the hook before the forward.
    """

    def __init__(self, reference: weakref.ref[Engine]) -> None:
        self._reference = reference
        self._leaves = False  # the hook after the forward is registered
        self._opened: list[bool] = []  # one entry per running call: whether it opened the root's forward

    def enter(self, module: nn.Module, args: Any) -> None:
        """Begin the root's forward, unless it runs."""
        scheduler = alive(self._reference).scheduler
        # In backward it is a recomputation, inside of the forward that the root has begun long before.
        opens = not scheduler.in_forward and not scheduler.in_backward
        if opens:
            _pre_forward(self._reference, _UnitModule(ROOT_UNIT), module, args)
            if not self._leaves:
                module.register_forward_hook(uncompiled(self._leave), always_call=True, with_kwargs=True)
                self._leaves = True
        if self._leaves:
            self._opened.append(opens)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """End the root's forward, if this call began it."""
        if self._opened and self._opened.pop():
            return _post_forward(self._reference, _UnitModule(ROOT_UNIT), module, args, kwargs, output)
        return output


def _outside_of_units(module: nn.Module, unit_modules: set[int]) -> Iterator[nn.Module]:
    """Iterate over modules with parameters that are neither a unit nor inside of one, without the root; each once.

    Parametrizations are left out: they run when an attribute is read, and not in a forward.
    """
    seen: set[int] = {id(module)}
    waiting = [module]
    while waiting:
        for child in waiting.pop().children():
            if isinstance(child, ParametrizationList):
                continue
            if id(child) not in unit_modules | seen and next(child.parameters(), None) is not None:
                seen.add(id(child))
                waiting.append(child)
                yield child


def _copy_weights(unit: Unit, output: Any) -> Any:
    """Clone results that are views of gathered weights, which are overwritten before the caller uses them."""
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
            "replaced by a copy; the weight will be resharded, so return weight.clone(), or use a tuple, list or dict"
        )
    return copied


def _refuse_opaque(engine: Engine, unit_index: int, inputs: Any, output: Any) -> None:
    """Raise if no tensor is found in a unit's results: no hook could announce its backward.

    Where neither a weight nor an input takes a gradient, nodes of the graph are those of functions without backward.
    """
    trained = engine.units if unit_index == ROOT_UNIT else engine.units[unit_index : unit_index + 1]
    if not any(unit.is_trainable for unit in trained) and not any(each.requires_grad for each in tensors_in(inputs)):
        return
    opaque = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, _TRANSPARENT)]
    opaque = [leaf for leaf in opaque if not dataclasses.is_dataclass(leaf) and not isinstance(leaf, Mapping)]
    if opaque:
        raise ScheduleError(
            f"unit {engine.units[unit_index].label} returned an object of type {type(opaque[0]).__name__}, in which no "
            "tensor can be found, so its weights could not be gathered for backward; return tuples, lists, dicts, "
            "dataclasses or classes registered with torch.utils._pytree"
        )


def _pre_backward(reference: weakref.ref[Engine], call: ForwardCall, _grad: torch.Tensor) -> None:
    with outside_of_transforms():
        alive(reference).pre_backward(call)


_OF_TORCH = frozenset(nn.Module().__dict__) - {"_buffers"}
"""Attributes of every module, which hold no results."""

_PLAIN = frozenset({int, float, bool, str, type(None)})
"""Types of most other attributes; modules have hundreds of them, which are asked in each forward."""


class ForwardGraph:
    """Autograd graph of a unit's forward, and its tensors that are no results.

    These are left in attributes of the unit's modules, such as a loss of its own. Attributes and buffers are searched,
    and one level into lists, tuples and dicts. Elsewhere (a global list, an object of another class) nothing is found,
    and autograd refuses the overwritten weights. Without a module, nothing is searched; `others` has the ids of all
    units' modules, which search their own.
    """

    def __init__(self, module: nn.Module | None, others: Collection[int]) -> None:
        # weak, since hooks of these modules refer to this
        owners = () if module is None else _own_modules(module, others)
        self._owners = tuple((weakref.ref(owner), _plain_attributes(owner)) for owner in owners)
        self._starts: list[int] = []

    def begin(self) -> None:
        """Note the state of autograd before a forward of the unit."""
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def end(self) -> tuple[list[Tensor], bool]:
        """Return tensors with grad history stored in module attributes, and True if the forward made a graph."""
        start = self._starts.pop() if self._starts else None
        # autograd numbers its nodes; where none is new, no backward can come, whatever the forward returns
        if start is None or not torch.is_grad_enabled() or torch._C._autograd._get_sequence_nr() == start:
            return [], False
        left = [
            value
            for reference, plain in self._owners
            if (owner := reference()) is not None and (len(owner.__dict__) != plain or owner._forward_hooks)
            for name, held in owner.__dict__.items()
            if name not in _OF_TORCH and type(held) not in _PLAIN
            for value in _tensors_of(held)
            # Older ones are of earlier forwards, and have their hooks.
            if value.grad_fn is not None and value.grad_fn._sequence_nr() >= start
        ]
        return left, True


def _plain_attributes(module: nn.Module) -> int:
    """Return the number of attributes of a layer of torch that has none but its own, which hold no results; else -1."""
    declared = _declared_by_torch(type(module))  # type: ignore[arg-type]  # mypy takes classes of modules for unhashable
    return len(module.__dict__) if module.__dict__.keys() <= declared else -1


@functools.cache
def _declared_by_torch(kind: type[nn.Module]) -> set[str]:
    """Return the attributes that a layer of torch declares; none for other classes."""
    if not kind.__module__.startswith("torch.nn.modules."):
        return set()
    own = (name for base in kind.__mro__ for name in inspect.get_annotations(base))
    return {"_buffers", REGISTRY_KEY, STATE_KEY, *_OF_TORCH, *own}  # the keys are of torch's `fully_shard` and its kind


def _own_modules(module: nn.Module, others: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from _own_modules(child, others)


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [item for item in value if isinstance(item, Tensor)]


# `torch.compile`: units are compiled, their hooks are not.
#
# Hooks swap parameters and communicate, which no graph can hold, so the compiler is kept out of them. A unit that was
# compiled in place before sharding is called inside its hooks instead of with them, so that its graph is whole (also
# with `fullgraph=True`). Models in an `OptimizedModule` of `torch.compile` are taken out of it and compiled in place,
# with the same options, so that names of parameters stay what they are (`compiled_in_place` of `wrap/shard_unit.py`).

_REASON = (
    "the hooks of a sharded unit communicate; compile units before fully_shard (fullgraph=True then holds for the "
    "whole unit), or without fullgraph=True"
)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a function and all that it calls."""
    return torch.compiler.disable(function, reason=_REASON)


def surround(module: nn.Module, before: Callable[..., None], after: Callable[..., Any]) -> None:
    """Call hooks around a module that was compiled in place."""
    compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
    before, after = uncompiled(before), uncompiled(after)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            before(None, args)
            output = compiled(*args, **kwargs)
        except BaseException:
            # As a hook registered with `always_call=True`: after an exception the unit has to be resharded, too.
            after(None, args, kwargs, None)
            raise
        return after(None, args, kwargs, output)

    module._compiled_call_impl = torch.compiler.disable(call, recursive=False)


# Joining a unit's communication without computing with it, for ranks that have no data for the unit.


@dataclass(frozen=True)
class UnitCall:
    """A unit's module whose forward is replaced, and the units that this forward would call, in order."""

    unit: int
    module_index: int
    inner: tuple[UnitCall, ...] = ()


def unit_calls(
    module: nn.Module, number_of: Mapping[int, tuple[int, int]], order: Iterable[nn.Module] | None = None
) -> tuple[UnitCall, ...]:
    """Return a module's unit calls, in the given order of its modules or that of registration."""
    inside = module.children() if order is None else order
    inner = tuple(call for child in inside for call in unit_calls(child, number_of))
    own = number_of.get(id(module))
    return inner if own is None else (UnitCall(*own, inner),)


def calls_of(
    engine: Engine, root: nn.Module, module: nn.Module | None, order: Iterable[nn.Module] | None
) -> tuple[UnitCall, ...]:
    """Return the unit calls that `join` replaces: those of a module of the model `root`; None: of all of it.

    `order` lists modules within it as the forward calls them; None: in the order of registration.
    """
    number_of = {id(inner): (unit_index, module_index) for unit_index, module_index, inner in unit_modules_of(engine)}
    known = {id(inner) for inner in root.modules()}
    whole = root if module is None else module
    modules = None if order is None else tuple(order)
    for given in (whole, *(modules or ())):
        if id(given) not in known:
            raise ConfigurationError(
                f"join was given a {type(given).__name__} that is not part of the sharded model; pass a module "
                "of model.module, or None for all of it"
            )
    return unit_calls(whole, number_of, modules)


def join(engine: Engine, calls: Iterable[UnitCall], hidden: Tensor) -> Tensor:
    """Run the communication of some units' forwards now, and that of their backwards when `hidden`'s gradient comes.

    Returns the same values; a new tensor where a backward is going to run, for which `hidden` has to carry a gradient.
    """
    if not hidden.is_floating_point():
        raise ScheduleError(
            f"join was given a tensor of {hidden.dtype}, which carries no gradient; pass a floating-point "
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
    forward = engine.post_forward(call.unit, needs_backward, module_index=call.module_index)
    forward.reads_weights = not engine.units[call.unit].only_looks_up  # as on the ranks that look something up
    return announcing_backward(engine, forward, hidden) if needs_backward else hidden


def announcing_backward(engine: Engine, forward: ForwardCall, hidden: Tensor) -> Tensor:
    """Return a tensor of the same values, whose gradient announces the backward of a forward."""
    anchor = torch.empty(0, device=hidden.device, requires_grad=True)  # so there is a backward in any case
    passed: Tensor = _Passage.apply(hidden, anchor)  # type: ignore[no-untyped-call]
    passed.register_hook(partial(_pre_backward, weakref.ref(engine), forward))
    return passed


class _Passage(torch.autograd.Function):
    """Identity whose backward node triggers the communication of units that this rank skips."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor) -> Tensor:
        # Recomputation of a checkpointed function begins when a saved tensor is unpacked, as in a unit's backward.
        ctx.save_for_backward(anchor)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # As the unit's own backward: recomputation, with the collectives in it, begins here.
        _ = ctx.saved_tensors
        return grads[0], None


# Gradients by sharded parameters: `torch.autograd.grad(loss, weight)` and `loss.backward(inputs=[weight])`.
#
# Autograd's graph holds the full parameters that modules compute with, the caller the sharded ones. So torch would find
# that a sharded parameter was not used. Its function that starts a backward is wrapped, once and for good: where it is
# asked for sharded parameters of a model, it is asked for the full ones, too.


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
        joined = tuple(map(partial(_joined, own), range(len(inputs)), inputs, found))
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
