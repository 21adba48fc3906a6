"""Optimizer state by the names of parameters, independent of their order, grouping and the number of ranks.

torch keys optimizer state by the position of parameters in the groups. A checkpoint stores it under names:
`optimizer.state.<parameter>.<slot>`, as torch's `get_state_dict` and Megatron's fsdp_dtensor do too, and the options of
the groups once, with the names of their parameters: `optimizer.param_groups`.

Other formats are loaded too: state by position, `optimizer.state.<number>.<slot>`, as a plain `optimizer.state_dict()`
gives it; param_groups flattened; options in `optimizer.param_to_group_meta.<parameter>.<option>`.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint import naming
from megatron_fsdp.checkpoint.match import Leaves, Match, filled, path_of
from megatron_fsdp.checkpoint.naming import OPTIMIZER, PREFIX, KeyPath, original_name, saved_name
from megatron_fsdp.errors import CheckpointError, ConfigurationError

GROUPS = "param_groups"
STATE = "state"
KIND = "class"
_STATE, _META, _GROUPS = f"{OPTIMIZER}.{STATE}.", f"{OPTIMIZER}.param_to_group_meta.", f"{OPTIMIZER}.{GROUPS}"
_KIND = f"{OPTIMIZER}.{KIND}"


def named_parameters_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the checkpoint names of the parameters of each group, in order, without a prefix."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = []
    for position, group in enumerate(optimizer.param_groups):
        unknown = [index for index, param in enumerate(group["params"]) if id(param) not in names]
        if unknown:
            raise ConfigurationError(
                f"parameter {unknown[0]} of param_groups[{position}] is not a parameter of the model, so its state has "
                "no name in a checkpoint; give the model that the optimizer was built on"
            )
        found.append([original_name(model, saved_name(model, names[id(param)])) for param in group["params"]])
    return found


def collect(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Collect the optimizer's section of a checkpoint; tensors are the live ones."""
    own = named_parameters_of(optimizer, model)
    names = naming.listed_names(optimizer, model, own)
    _require_no_local_parts(optimizer)
    by_index = optimizer.state_dict()  # with the hooks that describe the chunks of its tensors
    flat = list(chain.from_iterable(names))
    params = (param for group in optimizer.param_groups for param in group["params"])
    blank = {name for name, param in zip(chain(*own), params, strict=True) if not optimizer.state.get(param)}
    named = (saved_name(model, name) for name, _ in model.named_parameters())
    repeated = {original_name(model, name) for name in named if naming.is_repeated(model, name)}
    state = {
        PREFIX + flat[index]: slots
        for index, slots in by_index[STATE].items()
        if isinstance(index, int) and slots and flat[index] not in repeated | blank
    }
    shared = {key: value for key, value in by_index[STATE].items() if isinstance(key, str)}  # of no parameter
    if odd := next((key for key in shared if key.isdecimal() or key.startswith(PREFIX)), None):
        raise ConfigurationError(
            f"{kind_of(optimizer)} keeps state of no parameter under {odd!r}, which in a checkpoint is the name of a "
            "parameter; rename it"
        )
    state |= shared
    options = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [PREFIX + name for name in names[position] if name not in repeated],
        }
        for position, group in enumerate(by_index[GROUPS])
    ]
    rest = {key: value for key, value in by_index.items() if key not in (STATE, GROUPS)}
    return {STATE: state, GROUPS: options, KIND: kind_of(optimizer), **rest}


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of the optimizer, or of the one that it wraps."""
    return type(_inner(optimizer)).__name__


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return inner


def _require_no_local_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raise for state that is this rank's shard as a plain tensor: one rank's would be saved for all."""
    for param, slots in optimizer.state.items():
        if not isinstance(param, DTensor) or param._local_tensor.shape == param.shape:
            continue
        for slot, value in slots.items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_plain and value.dim() and value.shape == param._local_tensor.shape:
                raise ConfigurationError(
                    f"state {slot!r} of a parameter of shape {tuple(param.shape)} is a plain tensor of this rank's "
                    f"part, {tuple(value.shape)}, which a checkpoint cannot tell from that of other ranks; keep it as "
                    "the parameter is, as torch.zeros_like(param) makes it"
                )


def blank_slot(param: torch.Tensor, slot: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialised state tensor, sharded like its parameter if it has that shape; "step" never is."""
    if isinstance(param, DTensor) and slot != "step" and tuple(shape) == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    device = torch.device("cpu") if slot == "step" else param.device
    return torch.empty(tuple(shape), dtype=dtype, device=device)


# ---- loading -------------------------------------------------------------------------------------------------------


class OptimizerMatch:
    """The state of an optimizer after loading; missing tensors are made.

    `leaves` and `options` (of its group) are by parameter, and `shared` is state without a parameter; the state of
    those in `kept` stays, since the checkpoint has none that fits; `rest` are the keys of other stored entries.
    """

    def __init__(self, match: Match, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.leaves: dict[str, Leaves] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.kept: set[str] = set()
        self.shared: Leaves = {}
        self.rest: dict[str, str] = {}
        self._match, self._folder, self._optimizer, self._model = match, match.folder, optimizer, model
        self._names = named_parameters_of(optimizer, model)
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self._params: dict[str, torch.Tensor] = dict(zip(chain.from_iterable(self._names), params, strict=True))
        own_names = {id(param): naming.own_name(model, name) for name, param in model.named_parameters()}
        self._own_names = {name: own_names[id(param)] for name, param in self._params.items()}
        live: Mapping[Any, Any] = optimizer.state
        flat, paths = naming.flatten({key: value for key, value in live.items() if isinstance(key, str)})
        self._live_shared: dict[KeyPath, Any] = {paths[key]: value for key, value in flat.items()}
        self._keys = match.keys_below(f"{OPTIMIZER}.")
        self._listed = list(chain.from_iterable(naming.listed_names(optimizer, model, self._names)))  # of all experts
        self._of_all = naming.place_of(model).names
        self._known = {*self._listed, *self._of_all}
        self._kind = self._folder.read_object(_KIND) if _KIND in self._folder.objects else None
        if self._keys:
            slots = {name: by_slot for name, by_slot in self._slots().items() if name in self._params}
            for name, by_slot in slots.items():
                self._match_state(name, by_slot)
            self._read_options()
            self._skip_incomplete_state(slots)
            if slots:
                self._note_missing(slots.keys())
                missing = self._live_shared.keys() - self.shared.keys()
                match.missing += sorted(f"{_STATE}{'.'.join(path)}" for path in missing)
            if self._kind not in (None, kind_of(optimizer)):
                difference = f"state of {self._kind!s:.100}, and the optimizer is {kind_of(optimizer)}"
                match.unexpected.append(f"{_KIND} ({difference})")
            for key in self._keys:
                is_other = key != _GROUPS and not key.startswith((_STATE, _META, f"{_GROUPS}.", _KIND))
                if is_other and key in self._folder.objects:
                    self.rest[key.removeprefix(f"{OPTIMIZER}.")] = match.want_object(key)
        else:
            match.missing.append(OPTIMIZER)
            self.kept = set(self._params)
        self._group_options = [self._options_of(*group) for group in enumerate(self._names)]

    def load(self, objects: Mapping[str, Any]) -> None:
        """Load state and options by the `load_state_dict` of the optimizer's class, with its hooks.

        Ranks agree on the whole load, so they do not ask each other inside of it.
        """
        optimizer, state = self._optimizer, dict[Any, Any]()
        positions = {name: position for position, name in enumerate(self._params)}
        wanted_by = {
            name: wanted for names, wanted in zip(self._names, self._group_options, strict=True) for name in names
        }
        for name, leaves in self.leaves.items():
            slots = filled(leaves, objects)
            step = self.options.get(name, {}).get("step")  # where Megatron keeps the step counter
            if ("step",) not in slots and "step" not in wanted_by[name] and isinstance(step, int | float):
                slots["step",] = torch.tensor(float(step))
            state[positions[name]] = naming.unflatten(slots)
        shared = self._live_shared | filled(self.shared, objects)
        state = {**naming.unflatten(shared), **state}
        for name in self.kept:
            if found := optimizer.state.get(self._params[name]):
                state[positions[name]] = dict(found)
        groups = [
            {**group, **wanted, "params": [positions[name] for name in names]}
            for group, wanted, names in zip(optimizer.param_groups, self._group_options, self._names, strict=True)
        ]
        rest = {name: objects[key] for name, key in self.rest.items()}
        inner = _inner(optimizer)
        type(inner).load_state_dict(inner, {STATE: state, GROUPS: groups, **rest})
        getattr(inner, "_misses_no_state", lambda: None)()  # also of frozen parameters, for which it asks

    # ---- state ----

    def _slots(self) -> dict[str, dict[KeyPath, str]]:
        """Return the key of each slot, by parameter and path of the slot."""
        found: dict[str, dict[KeyPath, str]] = {}
        shared = self._match_shared()
        self._keys = [key for key in self._keys if key not in shared]
        keys = self._below(_STATE, self._known)
        by_position = self._by_position(any(name for name, *_ in keys))
        for name, slot, key in keys:
            if name is None:
                head, _, slot = key.removeprefix(_STATE).partition(".")
                name = by_position.get(head)
            if name is None:
                self._match.unexpected.append(key)
                continue
            path = path_of(self._folder, key)
            has_path = len(path) > 3 and ".".join(path[3:]) == slot  # how state nests, and which names have dots
            found.setdefault(name, {})[path[3:] if has_path else tuple(slot.split("."))] = key
        return found

    def _match_shared(self) -> list[str]:
        """Match state without a parameter: single values, and names that no parameter has; return its keys."""
        heads = {path[0] for path in self._live_shared}
        paths = {key: path_of(self._folder, key)[2:] for key in self._keys if key.startswith(_STATE)}
        is_ours = self._kind is not None  # then names of parameters begin so
        found = {
            key: path
            for key, path in paths.items()
            if len(path) == 1 or path[0] in heads or (is_ours and not path[0].startswith(PREFIX))
        }
        for key, path in found.items():
            if key in self._folder.objects:
                self.shared[path] = self._match.want_object(key)
                continue
            here, entry = self._live_shared.get(path), self._folder.tensors[key]
            target = here if isinstance(here, torch.Tensor) else torch.empty(entry.shape, dtype=entry.dtype)
            if self._match.want_tensor(key, target):
                self.shared[path] = target
        return list(found)

    def _below(self, prefix: str, known: set[str]) -> list[tuple[str | None, str, str]]:
        """Split the keys below a prefix, under any wrappers: the parameter, the rest, and the whole key."""
        rests = [key.removeprefix(prefix) for key in self._keys if key.startswith(prefix)]
        bare, _ = naming.unwrapped(rests, lambda rest: _split(rest, known)[0] is not None, self._match.prefixes)
        return [(*_split(rest, known), prefix + stored) for rest, stored in bare.items()]

    def _by_position(self, has_names: bool) -> dict[str, str]:
        """Return names by position; names in a Sequential are numbers too, and a stage knows only its own."""
        return {} if self._of_all or has_names else {str(at): name for at, name in enumerate(self._listed)}

    def _match_state(self, name: str, by_slot: Mapping[KeyPath, str]) -> None:
        """Match the state of one parameter; live tensors are loaded in place."""
        match, tensors, param = self._match, self._folder.tensors, self._params[name]
        own = self._own_names[name]
        view = naming.saved_view(self._model, own, param.detach())
        saved = tensors.get(match.model_keys.get(name, ""))
        if saved is not None and saved.shape != tuple(view.shape):  # of another shape, its state is of no use
            keys = [key for key in by_slot.values() if key in tensors and tensors[key].shape == saved.shape]
            match.reshaped.update(dict.fromkeys(keys, (saved.shape, tuple(view.shape))))
            self.kept.add(name)
            return
        leaves, paths = naming.flatten(self._optimizer.state.get(param, {}))
        live = {paths[key]: value for key, value in leaves.items()}
        for slot, key in by_slot.items():
            if key in self._folder.objects:
                self.leaves.setdefault(name, {})[slot] = match.want_object(key)
                continue
            target = live.get(slot)
            if isinstance(target, torch.Tensor):
                target = naming.saved_view(self._model, own, target)
            else:
                target = blank_slot(view, slot[-1], tensors[key].shape, tensors[key].dtype)
            if match.want_tensor(key, target):
                self.leaves.setdefault(name, {})[slot] = target
        match.missing += [f"{_STATE}{PREFIX}{name}.{'.'.join(slot)}" for slot in live if slot not in by_slot]

    def _skip_incomplete_state(self, slots: Mapping[str, Mapping[KeyPath, str]]) -> None:
        """Record slots that the optimizer's steps need and the checkpoint lacks; such state is not loaded."""
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            for name in names:
                options = self.options.get(name, {})
                stored = {path[0] for path in slots.get(name, ())} | ({"step"} & options.keys())
                needed = _slots_of_a_step(self._optimizer, {**group, **options}, self._params[name]) if stored else ()
                if lacking := [slot for slot in needed if slot not in stored]:
                    missing = (f"{_STATE}{PREFIX}{name}.{slot}" for slot in lacking)
                    self._match.missing += [key for key in missing if key not in self._match.missing]
                    self.leaves.pop(name, None)
                    self.kept.add(name)

    def _note_missing(self, with_state: Collection[str]) -> None:
        """Record missing state and options; a parameter saved without state lacks none."""
        without = [name for name in self._params if name not in with_state]
        missing = [name for name in without if name not in self.options]
        self._match.missing += [f"{_STATE}{PREFIX}{name}" for name in missing]
        self.kept.update(missing)
        if count := len(without) - len(missing):
            self._match.notes.append(
                f"{count} parameters had no optimizer state when they were saved, and have none now"
            )
        if not self.options:
            self._match.notes.append("the checkpoint has no options of the optimizer (lr, ...): they stay as they are")

    # ---- options, which are small and needed before anything is changed ----

    def _read_options(self) -> None:
        """Read the options of each parameter's group."""
        groups, stored = self._stored_groups(), dict[str, dict[str, Any]]()
        for group in groups if isinstance(groups, list) else [] if groups is None else [None]:
            if not isinstance(group, dict) or not isinstance(group.get("params"), list):
                raise CheckpointError(
                    f"{self._folder.path}: the stored param_groups are not a list of dicts with the names of parameters"
                )
            options = {key: value for key, value in group.items() if key != "params"}
            stored.update({str(name): options for name in group["params"]})
        names, _ = naming.unwrapped(stored, self._known.__contains__, self._match.prefixes)
        by_position = self._by_position(bool(self._known & names.keys()))
        self.options = {by_position.get(name, name): stored[full] for name, full in names.items()}
        halved = {name.removesuffix("_w") for name in self._known if name.endswith("_w")} - self._known
        fits = self._known | halved
        for name, option, key in self._below(_META, fits):
            if name is None:
                self._match.unexpected.append(key)
            elif name not in halved:  # Megatron asks for options under the name of both halves; here each has its own
                self.options.setdefault(name, {})[option] = self._match.read_object(key)

    def _stored_groups(self) -> Any:
        """Read the list of groups: one object, or an entry per option, as torch's planner stores lists of dicts."""
        if _GROUPS in self._folder.objects:
            return self._match.read_object(_GROUPS)
        nested: dict[str, Any] = {}
        for key in self._keys:
            if key.startswith(f"{_GROUPS}.") and key in self._folder.objects:
                set_element(nested, self._folder.paths.get(key, tuple(key.split("."))), self._match.read_object(key))
        return nested.get(OPTIMIZER, {}).get(GROUPS)

    def _options_of(self, position: int, names: Sequence[str]) -> dict[str, Any]:
        """Return the stored options that a live group takes over, which have to be equal for all its parameters.

        An option that the group lacks is taken over for the optimizer's own class only: some count steps there.
        """
        wanted: dict[str, Any] = {}
        group = self._optimizer.param_groups[position]
        is_own = bool(self.options) and self._kind == kind_of(self._optimizer)
        stored = chain.from_iterable(self.options.get(name, ()) for name in names) if is_own else ()
        for key in {*group, *stored} - {"params"}:
            found = {name: self.options[name][key] for name in names if key in self.options.get(name, ())}
            if not found:
                continue
            first, value = next(iter(found.items()))
            other = next((name for name, its_value in found.items() if not naming.alike(its_value, value)), None)
            if other is not None:
                raise CheckpointError(
                    f"{self._folder.path}: param_groups[{position}] holds {first} and {other}, which had different "
                    f"{key} when they were saved ({value!r} and {found[other]!r}); group parameters as they were then"
                )
            wanted[key] = tuple(value) if isinstance(group.get(key), tuple) and isinstance(value, list) else value
        return wanted


def _slots_of_a_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor
) -> Collection[str]:
    """Name the state that the first step of one of torch's optimizers makes for a parameter; of others none.

    `_init_group` makes it; it is called on an object of the class that has a tiny parameter and its own state.
    """
    kind = type(optimizer)
    if not (kind.step.__module__.startswith("torch.optim.") and hasattr(kind, "_init_group")):
        return ()
    tiny = torch.zeros((1,) * param.dim(), dtype=param.dtype)
    tiny.grad = torch.zeros_like(tiny)
    probe: Any = object.__new__(kind)
    probe.__dict__ = {**optimizer.__dict__, STATE: defaultdict(dict)}
    # Each class collects its state in its own number of lists, which are thrown away.
    num_lists = len(inspect.signature(probe._init_group).parameters) - 1
    # These ask for a device that the tiny parameter does not have.
    switches = {name: False for name in ("fused", "capturable") if name in group}
    try:
        probe._init_group({**group, **switches, "params": [tiny]}, *([] for _ in range(num_lists)))
    except Exception:  # noqa: BLE001  # a stored option may be anything; loading it reports the fault
        return ()
    return tuple(probe.state[tiny])


def _split(rest: str, known: set[str]) -> tuple[str | None, str]:
    """Split a key into the parameter (the longest known name) and the rest."""
    parts = rest.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        if name in known:
            return name, ".".join(parts[cut:])
    return None, rest


class _OptimizerByPosition:
    """Presents an optimizer's state under text keys, and makes tensors that a fresh one lacks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        found = self._optimizer.state_dict()
        return {**found, STATE: {str(position): slots for position, slots in found[STATE].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = state_dict.get(STATE, {})
        by_position = {int(key) if key.isdecimal() else key: slots for key, slots in state.items()}
        type(self._optimizer).load_state_dict(self._optimizer, {**state_dict, STATE: by_position})

    def blank(self, path: Sequence[str], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Make a tensor to load into, sharded as its parameter; None for state of no parameter."""
        params = list(chain.from_iterable(group["params"] for group in self._optimizer.param_groups))
        if len(path) < 3 or path[0] != STATE or not path[1].isdecimal() or int(path[1]) >= len(params):
            return None
        return blank_slot(params[int(path[1])].detach(), path[-1], shape, dtype)


def as_extra(value: Any) -> Any:
    """Wrap an optimizer so that it can be an extra of a checkpoint; return other objects unchanged."""
    return _OptimizerByPosition(value) if isinstance(value, torch.optim.Optimizer) else value
