"""Initial values for a model that was built on the meta device, module by module, straight into its shards.

Modules are visited as their constructors ran: children before the module that holds them, in the order of registration.
Each is given full tensors, its own methods fill them, every rank keeps its pieces, and the full tensors are freed. A
random number is drawn on every rank for every element, so weights depend on the seed and not on the ranks.
docs/initialisation.md tells the rules from the user's side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.runtime.blank import Blank, blank_parameter, blank_tensor, hollow_parameter, own_part
from megatron_fsdp.runtime.blueprint import MODEL_METHOD, Blueprint, Site, meta_tensors, model_method, reset_methods
from megatron_fsdp.runtime.random_state import RandomState, random_state, set_random_state
from megatron_fsdp.unit.unit import Unit, set_parameter

ModelMethod = Callable[[nn.Module], object]


@dataclass
class _Scope:
    """Full tensors that exist now, of one unit or of what lies outside of units.

    Attributes:
        standing: Where full tensors stand: the site's module, and the sharded parameter to put back.
        live: Full tensors that will be stored, by name.
        scratch: Sites of tensors that are drawn into and dropped.
        buffers: Buffers that were made.
    """

    standing: dict[Site, tuple[nn.Module, nn.Parameter]] = field(default_factory=dict)
    live: dict[str, Blank] = field(default_factory=dict)
    scratch: set[Site] = field(default_factory=set)
    buffers: list[tuple[nn.Module, str, Blank]] = field(default_factory=list)


@dataclass(frozen=True)
class _Replay:
    """How to construct a unit a second time: the random state it began with and the modules it visited."""

    state: RandomState
    visited: tuple[int, ...]


def materialise(root: nn.Module, blueprint: Blueprint, units: Sequence[Unit], device: torch.device) -> None:
    """Initialise everything that was on the meta device; nothing is communicated.

    Args:
        root: The model, with sharded parameters in their places already.
        blueprint: The model as it was before.
        units: Root first.
        device: Where the shards live, and where full tensors are drawn.

    Raises:
        ConfigurationError: A method left something without a value, or wrote where it cannot be let.
    """
    unit_tops = [root.get_submodule(unit.name) for unit in units if unit.name and unit.is_module]
    store = {
        name: partial(group.store, index)
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


def draw_values(
    root: nn.Module,
    blueprint: Blueprint,
    unit_tops: Iterable[nn.Module],
    store: Mapping[str, Callable[[torch.Tensor], None]],
    device: torch.device,
    *,
    may_leave_buffers: bool = False,
) -> None:
    """Draw what the constructors and the initialisation of a model on the meta device would, a unit at a time.

    Buffers are made where they belong. Parameters are handed over and freed.

    Args:
        root: The model; its parameters are back in their places afterwards.
        blueprint: Of it.
        unit_tops: The modules of whose parameters all exist at a time.
        store: For each parameter that is to be initialised, by canonical name, what takes its values: full, or this
            rank's part where it is tensor-parallel.
        device: Where values are drawn.
        may_leave_buffers: Whether buffers may stay without values, which the caller has from elsewhere.

    Raises:
        ConfigurationError: A method left something without a value, or wrote where it cannot be let.
    """
    with torch.no_grad(), torch.device(device):
        _Walk(root, blueprint, unit_tops, store, device, may_leave_buffers).run()


class _Walk:
    """One pass over a model."""

    def __init__(
        self,
        root: nn.Module,
        blueprint: Blueprint,
        unit_tops: Iterable[nn.Module],
        store: Mapping[str, Callable[[torch.Tensor], None]],
        device: torch.device,
        may_leave_buffers: bool,
    ) -> None:
        self._may_leave_buffers = may_leave_buffers
        self._root = root
        self._blueprint = blueprint
        self._device = device
        self._unit_tops = {id(module) for module in unit_tops}
        self._store = store
        self._visited: dict[tuple[str, int], None] = {}
        self._replays: dict[int, _Replay] = {}
        self._buffers: dict[int, tuple[torch.Tensor, Blank]] = {}
        self._ties_are_shared = False
        self._stored: set[str] = set()

    def run(self) -> None:
        self._construct(self._root, _Scope(), held=False, model=None)

    # ---- as constructors do -------------------------------------------------------------------------------------

    def _construct(self, module: nn.Module, scope: _Scope, held: bool, model: ModelMethod | None) -> None:
        """Draw what the constructors of `module` and of all below it draw.

        Args:
            module: Where to begin.
            scope: Where full tensors are kept.
            held: Whether a module around this one still needs to see its tensors.
            model: The method of the nearest model around this module.
        """
        if not self._enters("construct", module):
            return
        resets, own = reset_methods(module), model_method(module)
        for child in module.children():
            inner_held = held or bool(resets) or own is not None
            if id(child) in self._unit_tops:
                self._construct_unit(child, own or model)
            else:
                self._construct(child, scope, inner_held, own or model)
        self._call(module, resets, scope)
        if own is not None:
            self._ties_are_shared = not callable(getattr(module, "tie_weights", None))
            self._initialise(module, own, scope)
            self._ties_are_shared = False
        if not held:
            self._release(scope)

    def _construct_unit(self, unit: nn.Module, model: ModelMethod | None) -> None:
        """Construct a unit and store it; or, where a model will initialise it again, see to it that it can be repeated.

        The model does that after all constructors, and its random numbers come after theirs.
        """
        scope = _Scope()
        if model is None or model_method(unit) is not None:
            self._construct(unit, scope, held=False, model=model)
            return
        state, before = random_state(self._device), len(self._visited)
        self._construct(unit, scope, held=True, model=model)
        self._put_back(scope)
        self._replays[id(unit)] = _Replay(state, tuple(key for _, key in list(self._visited)[before:]))

    # ---- as a model does after its constructor ------------------------------------------------------------------

    def _initialise(self, module: nn.Module, model: ModelMethod, scope: _Scope, is_model: bool = True) -> None:
        """Let a model initialise each module below it, and itself last."""
        if not is_model and model_method(module) is not None:
            return  # a model of its own, which has done so
        if not self._enters("initialise", module, again=self._ties_are_shared):
            return  # `nn.Module.apply` comes to a module again for each place that it has; transformers does not
        is_unit = not is_model and id(module) in self._unit_tops
        inner = _Scope() if is_unit else scope
        if is_unit:
            self._reconstruct(module, inner, model)
        for child in module.children():
            self._initialise(child, model, inner, is_model=False)
        self._call(module, (partial(model, module),), inner)
        if is_unit:
            self._release(inner)

    def _reconstruct(self, unit: nn.Module, scope: _Scope, model: ModelMethod) -> None:
        """Bring back what the constructors of a unit drew."""
        replay = self._replays.pop(id(unit), None)
        if replay is None:
            return
        shared, self._ties_are_shared = self._ties_are_shared, False
        now = random_state(self._device)
        set_random_state(self._device, replay.state)
        for key in replay.visited:
            self._visited.pop(("construct", key), None)
        self._construct(unit, scope, held=True, model=model)
        set_random_state(self._device, now)
        self._ties_are_shared = shared

    # ---- one call -----------------------------------------------------------------------------------------------

    def _call(self, module: nn.Module, methods: Sequence[Callable[[], object]], scope: _Scope) -> None:
        """Call methods of a module while full tensors stand in it and below it, as far as its unit goes."""
        if not methods:
            return
        for part in self._within(module):
            self._fill(part, scope)
        hollows = self._hollow_out(module)
        try:
            for method in methods:
                method()
        finally:
            for part, attribute, sharded, _ in hollows:
                set_parameter(part, attribute, sharded)
        written = [
            self._blueprint.names[id(part), attribute]
            for part, attribute, _, hollow in hollows
            if hollow.tensor._version != hollow.version
        ]
        if written:
            raise ConfigurationError(
                f"initialising {self._blueprint.label(module)} writes parameters of units below it (such as "
                f"{written[0]}), but units are initialised one at a time; let each module initialise what it holds "
                "itself, or build the model outside of the meta device, or give fsdp_unit_modules=[] for one unit"
            )

    def _within(self, module: nn.Module) -> Iterator[nn.Module]:
        """A module and those below it that are in the same unit."""
        yield module
        for child in module.children():
            if id(child) not in self._unit_tops:
                yield from self._within(child)

    def _fill(self, module: nn.Module, scope: _Scope) -> None:
        for attribute, param in module._parameters.items():
            if param is not None:
                self._fill_parameter(module, attribute, param, scope)
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                _, blank = self._buffers.setdefault(id(buffer), (buffer, blank_tensor(buffer, self._device)))
                module._buffers[attribute] = blank.tensor
                scope.buffers.append((module, attribute, blank))

    def _fill_parameter(self, module: nn.Module, attribute: str, param: nn.Parameter, scope: _Scope) -> None:
        """Put a full tensor where a sharded parameter stands: to be stored, or where the value is not wanted, scratch.

        A real parameter keeps its value. A tied one keeps what its first module draws, as where a constructor sets
        `head.weight = embedding.weight`; a model's own method that runs after that writes into the one tensor.
        """
        site = (id(module), attribute)
        if site in scope.standing and not (site in scope.scratch and self._ties_are_shared):
            return
        name = self._blueprint.names[site]
        if param.is_meta and name not in self._blueprint.on_meta:
            return  # nobody wants its values, and on the meta device nothing is drawn
        shape = self._blueprint.shapes[name]
        is_wanted = name in self._blueprint.on_meta and (site in self._blueprint.first_sites or self._ties_are_shared)
        blank = scope.live.get(name) if is_wanted else None
        if blank is None:
            blank = blank_parameter(shape, self._device)
        if is_wanted:
            scope.live[name] = blank
            scope.scratch.discard(site)
        else:
            scope.scratch.add(site)
        scope.standing.setdefault(site, (module, param))
        assert isinstance(blank.tensor, nn.Parameter)
        set_parameter(module, attribute, blank.tensor)

    def _hollow_out(self, module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, Blank]]:
        """Put tensors without memory where parameters of units below a module stand, to notice who writes there."""
        inside = {id(part) for part in self._within(module)}
        hollows = []
        for part in module.modules():
            if id(part) in inside:
                continue
            for attribute, param in part._parameters.items():
                if param is not None:
                    hollow = hollow_parameter(self._blueprint.shapes[self._blueprint.names[id(part), attribute]])
                    assert isinstance(hollow.tensor, nn.Parameter)
                    hollows.append((part, attribute, param, hollow))
                    set_parameter(part, attribute, hollow.tensor)
        return hollows

    # ---- keeping ------------------------------------------------------------------------------------------------

    def _put_back(self, scope: _Scope) -> None:
        for (_, attribute), (module, sharded) in scope.standing.items():
            set_parameter(module, attribute, sharded)
        scope.standing.clear()
        scope.scratch.clear()

    def _release(self, scope: _Scope) -> None:
        """Store what was drawn and free it."""
        self._put_back(scope)
        for name in self._stored & scope.live.keys():
            if scope.live[name].is_untouched:  # made for a second unit that holds it, and has its value from the first
                del scope.live[name]
        unset = [name for name, blank in scope.live.items() if blank.is_unset]
        unset += [
            f"buffer {attribute} of {self._blueprint.label(module)}"
            for module, attribute, blank in scope.buffers
            if not self._may_leave_buffers and module._buffers.get(attribute) is blank.tensor and blank.is_unset
        ]
        if unset:
            raise ConfigurationError(
                f"{len(unset)} tensors got no value, or NaN, from the methods that initialise their modules: "
                f"{', '.join(unset)}; let reset_parameters() (or reset_buffers(), or {MODEL_METHOD}(module) of the "
                "model) set every element, or put real tensors there before sharding"
            )
        for name, blank in scope.live.items():
            original = self._blueprint.shapes[name]
            assert isinstance(blank.tensor, nn.Parameter)
            self._store[name](own_part(blank.tensor, original))
            self._stored.add(name)
        scope.live.clear()
        scope.buffers.clear()

    def _enters(self, phase: str, module: nn.Module, again: bool = False) -> bool:
        """Whether there is something to do that was not done, or may be done again."""
        key = (phase, id(module))
        if (key in self._visited and not again) or id(module) not in self._blueprint.unfinished:
            return False
        self._visited[key] = None
        return True
