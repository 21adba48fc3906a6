"""Initial values for a model that was built on the meta device, module by module, straight into its shards.

Modules are visited as their constructors ran: children before the module that holds them, in the order of
registration. Each is given full tensors, its own methods fill them, every rank keeps its shards, and the full tensors
are freed. Every rank draws a random number for every element, so weights depend on the seed and not on the ranks.
docs/sharded_models.md tells the rules from the user's side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_fsdp.comm.fingerprint import RandomState, random_state, set_random_state
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.unit import Unit, set_parameter
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.units import parameter_owners


@dataclass(frozen=True)
class Uninitialized:
    """A tensor without an initial value yet, filled with a marker that no initialisation leaves."""

    tensor: torch.Tensor  # NaN where the dtype has it, else the dtype's extreme value
    version: int  # of the tensor when it was made

    @property
    def is_unset(self) -> bool:
        """True if an element never got a value; for integers, if none did."""
        tensor = self.tensor.detach()
        if tensor.is_meta or not tensor.numel():
            return tensor.is_meta
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            real = torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
            wide = real.to(torch.float32) if real.dtype.itemsize == 1 else real
            return bool(wide.amin().isnan())  # a minimum with NaN is NaN, and allocates nothing
        return tensor._version == self.version and bool((tensor == _marker(tensor.dtype)).all())


def uninitialized_tensor(like: torch.Tensor, device: torch.device) -> Uninitialized:
    """Make an uninitialized tensor of the (global) shape and dtype of `like`."""
    tensor = torch.full(like.shape, _marker(like.dtype), dtype=like.dtype, device=device)
    return Uninitialized(tensor, tensor._version)


def uninitialized_parameter(like: nn.Parameter, device: torch.device) -> Uninitialized:
    """Make an uninitialized parameter of the (global) shape, dtype, requires_grad and attributes of `like`."""
    param = nn.Parameter(uninitialized_tensor(like, device).tensor, requires_grad=like.requires_grad)
    param.__dict__.update(like.__dict__)
    return Uninitialized(param, param._version)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate every parameter and buffer on the meta device; tied ones stay tied, DTensors get local parts.

    Parameters get no values; buffers get NaN, so that a forgotten one shows.
    """
    made: dict[int, torch.Tensor] = {}
    for owner in model.modules():
        for name, param in owner._parameters.items():
            if param is not None and local_tensor(param).is_meta:
                if id(param) not in made:
                    with torch.no_grad():
                        empty = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
                    empty.__dict__.update(param.__dict__)
                    made[id(param)] = empty
                owner._parameters[name] = made[id(param)]  # type: ignore[assignment]
        for name, buffer in owner._buffers.items():
            if buffer is not None and local_tensor(buffer).is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = uninitialized_tensor(buffer, device).tensor
                owner._buffers[name] = made[id(buffer)]


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """Make a parameter of the same (global) shape without memory, whose version counter counts writes."""
    empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=param.requires_grad)


def own_part(full: torch.Tensor, original: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a full tensor before data-parallel sharding: all of it, or its tensor-parallel part.

    Full tensors, in the global shape, are drawn whole on every rank and cut here as `original` is, the parameter that
    the model had, so that weights do not depend on the tensor-parallel size. No communication.
    """
    if not isinstance(original, DTensor):
        return full.detach()
    return distribute_tensor(full.detach(), original.device_mesh, original.placements, src_data_rank=None).to_local()


def _marker(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    info = torch.iinfo(dtype)
    return info.min or info.max


Owner = tuple[int, str]
"""The id of a module and the name of its attribute."""


@dataclass(frozen=True)
class Blueprint:
    """A model as it was before sharding; holds no memory of its parameters."""

    # by canonical name, on the meta device: the original itself, or a copy of a real one
    shapes: Mapping[str, nn.Parameter]
    on_meta: frozenset[str]  # names of the parameters that have to be initialised
    names: Mapping[Owner, str]  # canonical name at each owner of a parameter; a tied one has several
    first_owners: frozenset[Owner]  # the first owner of each parameter in registration order
    unfinished: frozenset[int]  # ids of modules with something on the meta device in them or below them
    module_names: Mapping[int, str]  # fully qualified, by id

    def label(self, module: nn.Module) -> str:
        """Return the name and class of a module for messages."""
        return f"{self.module_names[id(module)] or '(root)'} ({type(module).__name__})"


def draw_blueprint(module: nn.Module, wanted: Collection[str] | None = None) -> Blueprint:
    """Record the tensors on the meta device; of parameters those `wanted`, by canonical name (None: all)."""
    params = dict(module.named_parameters())
    found = parameter_owners(module)
    owners = {name: [(id(owner), attribute) for owner, attribute in found[id(param)]] for name, param in params.items()}
    on_meta = frozenset(name for name, param in params.items() if param.is_meta and (wanted is None or name in wanted))
    given_up = {id(params[name]) for name in params.keys() - on_meta}
    return Blueprint(
        {name: param if param.is_meta else _on_meta(param) for name, param in params.items()},
        on_meta,
        {owner: name for name, of_param in owners.items() for owner in of_param},
        frozenset(of_param[0] for of_param in owners.values()),
        frozenset(id(inner) for inner in module.modules() if any(has_meta(b, given_up) for b in inner.modules())),
        {id(inner): name for name, inner in module.named_modules()},
    )


def has_meta(module: nn.Module, but: Collection[int] = ()) -> bool:
    """Return True if a module itself holds a tensor without memory, besides those with ids in `but`."""
    return next(meta_tensors(module, but), None) is not None


def meta_tensors(module: nn.Module, but: Collection[int] = ()) -> Iterator[str]:
    """Iterate over the names of parameters, buffers and plain tensors without memory that a module itself holds."""
    for name, value in chain(module._parameters.items(), module._buffers.items(), vars(module).items()):
        if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in but:
            yield name


def reset_methods(module: nn.Module) -> tuple[Callable[[], object], ...]:
    """Return the methods that initialise a module's own tensors, in the order in which to call them."""
    parameters = _method(module, "reset_parameters") or _method(module, "_reset_parameters")
    return tuple(method for method in (parameters, _method(module, "reset_buffers")) if method is not None)


def model_method(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """Return the method by which a model initialises each module below it, as those of transformers do."""
    return _method(module, "_init_weights", module)


def check_can_initialise(module: nn.Module) -> None:
    """Raise if a model has modules without a method that initialises them, and name them all; nothing is changed."""
    covered = {id(below) for inner in module.modules() if model_method(inner) is not None for below in inner.modules()}
    elsewhere = {
        (id(owner), attribute)  # of a parameter that is registered elsewhere first, and gets its value there
        for owners in parameter_owners(module).values()
        for owner, attribute in owners[1:]
    }
    helpless = [
        f"{name or '(root)'} ({type(inner).__name__}: {', '.join(own)})"
        for name, inner in module.named_modules()
        if id(inner) not in covered
        and not reset_methods(inner)
        and (own := [attribute for attribute in meta_tensors(inner) if (id(inner), attribute) not in elsewhere])
    ]
    if helpless:
        raise ConfigurationError(
            f"{len(helpless)} modules hold tensors on the meta device and have no method that initialises them: "
            f"{'; '.join(helpless)}; give each a reset_parameters() that sets all it holds (reset_buffers() for "
            f"buffers), or the model an _init_weights(module), or build these modules outside of the meta device"
        )


def _method(module: nn.Module, name: str, *arguments: object) -> Callable[..., object] | None:
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        return None
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):  # needs other arguments, or has no signature
        return None
    return method


def materialise(root: nn.Module, blueprint: Blueprint, units: Sequence[Unit], device: torch.device) -> None:
    """Initialise all tensors that were on the meta device; raise as `draw_values`; no communication."""
    unit_tops = [root.get_submodule(path) for unit in units for path in unit.modules if path]
    store = {
        name: partial(group.weights.store, index)
        for unit in units
        for group in unit.groups
        for index, name in enumerate(group.names)
    }
    draw_values(root, blueprint, unit_tops, store, device)
    left = [f"{name} of {blueprint.label(module)}" for module in root.modules() for name in meta_tensors(module)]
    if left:
        raise ConfigurationError(
            f"{len(left)} tensors are still on the meta device after initialisation: {', '.join(left)}; "
            "let reset_parameters() or reset_buffers() of the module set them"
        )
    for unit in units:
        for group in unit.groups:
            group.note_installed()


Store = Mapping[str, Callable[[torch.Tensor], None]]
"""By canonical name, for each parameter that is to be initialised, a function of its values."""


def draw_values(
    root: nn.Module,
    blueprint: Blueprint,
    unit_tops: Iterable[nn.Module],
    store: Store,
    device: torch.device,
    *,
    may_leave_buffers: bool = False,
) -> None:
    """Draw the values that a model's constructors and initialisation would have drawn, a unit at a time.

    Buffers are made in place. Parameters are passed to `store` and freed.

    `unit_tops` are the modules of whose parameters all exist at a time. `store` gets the values, full, or this rank's
    part where a parameter is tensor-parallel. `may_leave_buffers`: the caller has values for buffers from elsewhere.

    Raises:
        ConfigurationError: A method left something without a value, or wrote where it must not.
    """
    with torch.no_grad(), torch.device(device):
        walk = _Walk(blueprint, frozenset(map(id, unit_tops)), store, device, may_leave_buffers)
        walk.construct(root, _Scope(), held=False, model=None)


ModelMethod = Callable[[nn.Module], object]


@dataclass
class _Scope:
    """The full tensors that exist now, of one unit or of the modules outside of units."""

    # the owners that hold full tensors: the module, and the sharded parameter to put back
    standing: dict[Owner, tuple[nn.Module, nn.Parameter]] = field(default_factory=dict)
    live: dict[str, Uninitialized] = field(default_factory=dict)  # full tensors that will be stored, by name
    scratch: set[Owner] = field(default_factory=set)  # owners of tensors that are drawn into and dropped
    buffers: list[tuple[nn.Module, str, Uninitialized]] = field(default_factory=list)  # those that were made


@dataclass
class _Walk:
    """One pass over a model; the first fields are as in `draw_values`."""

    blueprint: Blueprint
    unit_tops: frozenset[int]  # ids of modules
    store: Store
    device: torch.device
    may_leave_buffers: bool
    constructed: set[int] = field(default_factory=set)  # ids of modules
    initialised: set[int] = field(default_factory=set)
    # by the id of a unit that is constructed a second time: the random state before, and the modules it constructed
    replays: dict[int, tuple[RandomState, set[int]]] = field(default_factory=dict)
    buffers: dict[int, tuple[torch.Tensor, Uninitialized]] = field(default_factory=dict)  # old and new, by old id
    stored: set[str] = field(default_factory=set)
    ties_are_shared: bool = False

    # ---- as constructors do -------------------------------------------------------------------------------------

    def construct(self, module: nn.Module, scope: _Scope, held: bool, model: ModelMethod | None) -> None:
        """Draw the values of the constructors of `module` and of all modules below it."""
        if id(module) in self.constructed or id(module) not in self.blueprint.unfinished:
            return
        self.constructed.add(id(module))
        resets, own = reset_methods(module), model_method(module)
        for child in module.children():
            inner_held = held or bool(resets) or own is not None
            if id(child) in self.unit_tops:
                self._construct_unit(child, own or model)
            else:
                self.construct(child, scope, inner_held, own or model)
        self._call(module, resets, scope)
        if own is not None:
            self.ties_are_shared = not callable(getattr(module, "tie_weights", None))
            self._initialise(module, own, scope)
            self.ties_are_shared = False
        if not held:
            self._release(scope)

    def _construct_unit(self, unit: nn.Module, model: ModelMethod | None) -> None:
        """Construct a unit and store it; or, where a model will initialise it again, make it repeatable.

        The model does that after all constructors, and its random numbers come after theirs.
        """
        scope = _Scope()
        if model is None or model_method(unit) is not None:
            self.construct(unit, scope, held=False, model=model)
            return
        state, before = random_state(self.device), set(self.constructed)
        self.construct(unit, scope, held=True, model=model)
        self._put_back(scope)
        self.replays[id(unit)] = state, self.constructed - before

    # ---- as a model does after its constructor ------------------------------------------------------------------

    def _initialise(self, module: nn.Module, model: ModelMethod, scope: _Scope, is_model: bool = True) -> None:
        """Initialise each module below a model, and the model itself last, with its own method."""
        if not is_model and model_method(module) is not None:
            return  # a model of its own, which has initialised itself
        if id(module) not in self.blueprint.unfinished or (id(module) in self.initialised and not self.ties_are_shared):
            return  # `nn.Module.apply` visits a module once for each of its places; transformers only once
        self.initialised.add(id(module))
        is_unit = not is_model and id(module) in self.unit_tops
        inner = _Scope() if is_unit else scope
        if is_unit and id(module) in self.replays:
            self._reconstruct(module, inner, model)
        for child in module.children():
            self._initialise(child, model, inner, is_model=False)
        self._call(module, (partial(model, module),), inner)
        if is_unit:
            self._release(inner)

    def _reconstruct(self, unit: nn.Module, scope: _Scope, model: ModelMethod) -> None:
        """Draw the values of a unit's constructors again."""
        state, constructed = self.replays.pop(id(unit))
        shared, self.ties_are_shared = self.ties_are_shared, False
        now = random_state(self.device)
        set_random_state(self.device, state)
        self.constructed -= constructed
        self.construct(unit, scope, held=True, model=model)
        set_random_state(self.device, now)
        self.ties_are_shared = shared

    # ---- one call -----------------------------------------------------------------------------------------------

    def _call(self, module: nn.Module, methods: Sequence[Callable[[], object]], scope: _Scope) -> None:
        """Call methods of a module while full tensors are in it and below it, as far as its unit goes."""
        if not methods:
            return
        for inner in self._within(module):
            self._fill(inner, scope)
        shields = self._shield_inner_units(module)
        try:
            for method in methods:
                method()
        finally:
            for inner, attribute, sharded, _ in shields:
                set_parameter(inner, attribute, sharded)
        written = [
            self.blueprint.names[id(inner), attribute] for inner, attribute, _, shield in shields if shield._version
        ]
        if written:
            raise ConfigurationError(
                f"initialising {self.blueprint.label(module)} writes parameters of units below it (such as "
                f"{written[0]}), but units are initialised one at a time; let each module initialise what it holds "
                "itself, or build the model outside of the meta device, or give fsdp_unit_modules=[] for one unit"
            )

    def _within(self, module: nn.Module) -> Iterator[nn.Module]:
        """Iterate over a module and those below it that are in the same unit."""
        yield module
        for child in module.children():
            if id(child) not in self.unit_tops:
                yield from self._within(child)

    def _fill(self, module: nn.Module, scope: _Scope) -> None:
        for attribute, param in module._parameters.items():
            if param is not None:
                self._fill_parameter(module, attribute, param, scope)
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                _, made = self.buffers.setdefault(id(buffer), (buffer, uninitialized_tensor(buffer, self.device)))
                module._buffers[attribute] = made.tensor
                scope.buffers.append((module, attribute, made))

    def _fill_parameter(self, module: nn.Module, attribute: str, param: nn.Parameter, scope: _Scope) -> None:
        """Swap a full tensor in for a sharded parameter: to be stored, or as scratch if its value is not needed.

        A real parameter keeps its value. A tied one keeps what its first module draws, as where a constructor sets
        `head.weight = embedding.weight`; a model's own method that runs after that writes into the one tensor.
        """
        owner = (id(module), attribute)
        if owner in scope.standing and not (owner in scope.scratch and self.ties_are_shared):
            return
        name = self.blueprint.names[owner]
        if param.is_meta and name not in self.blueprint.on_meta:
            return  # its values are not needed, and on the meta device nothing is drawn
        shape = self.blueprint.shapes[name]
        is_wanted = name in self.blueprint.on_meta and (owner in self.blueprint.first_owners or self.ties_are_shared)
        made = scope.live.get(name) if is_wanted else None
        if made is None:
            made = uninitialized_parameter(shape, self.device)
        if is_wanted:
            scope.live[name] = made
            scope.scratch.discard(owner)
        else:
            scope.scratch.add(owner)
        scope.standing.setdefault(owner, (module, param))
        assert isinstance(made.tensor, nn.Parameter)
        set_parameter(module, attribute, made.tensor)

    def _shield_inner_units(self, module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        """Swap parameters without memory in for those of units below a module, to notice writes there."""
        inside = {id(inner) for inner in self._within(module)}
        shields = []
        for inner in module.modules():
            if id(inner) in inside:
                continue
            for attribute, param in inner._parameters.items():
                if param is not None:
                    shield = _on_meta(self.blueprint.shapes[self.blueprint.names[id(inner), attribute]])
                    shields.append((inner, attribute, param, shield))
                    set_parameter(inner, attribute, shield)
        return shields

    # ---- keeping ------------------------------------------------------------------------------------------------

    def _put_back(self, scope: _Scope) -> None:
        for (_, attribute), (module, sharded) in scope.standing.items():
            set_parameter(module, attribute, sharded)
        scope.standing.clear()
        scope.scratch.clear()

    def _release(self, scope: _Scope) -> None:
        """Store the drawn values in the shards and free them."""
        self._put_back(scope)
        for name in self.stored & scope.live.keys():
            made = scope.live[name]
            if made.tensor._version == made.version and made.is_unset:
                del scope.live[name]  # made for a second unit that holds it; its value is from the first
        unset = [name for name, made in scope.live.items() if made.is_unset]
        unset += [
            f"buffer {attribute} of {self.blueprint.label(module)}"
            for module, attribute, made in scope.buffers
            if not self.may_leave_buffers and module._buffers.get(attribute) is made.tensor and made.is_unset
        ]
        if unset:
            raise ConfigurationError(
                f"{len(unset)} tensors got no value, or NaN, from the methods that initialise their modules: "
                f"{', '.join(unset)}; let reset_parameters() (or reset_buffers(), or _init_weights(module) of the "
                "model) set every element, or put real tensors there before sharding"
            )
        for name, made in scope.live.items():
            self.store[name](own_part(made.tensor, self.blueprint.shapes[name]))
            self.stored.add(name)
        scope.live.clear()
        scope.buffers.clear()
