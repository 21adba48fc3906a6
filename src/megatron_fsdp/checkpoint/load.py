"""Load a checkpoint into a live model, optimizer and whatever else was saved with them, on any ranks.

Keys are matched with live tensors and objects completely, before anything is read. Optimizer state is found whichever
of the usual ways it is stored in:

    by name        optimizer.state.<parameter>.<slot>, as here, by torch's `get_state_dict`, in Megatron's fsdp_dtensor
    by position    optimizer.state.<number>.<slot>, as a plain `optimizer.state_dict()` gives it

Options stand in `optimizer.param_groups` (one list, or flattened), or in
`optimizer.param_to_group_meta.<parameter>.<option>`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint import naming, optimizer_state, rng
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import ITERATION, MODEL, OPTIMIZER, PREFIX, RNG, Extras, KeyPath, Stateful
from megatron_fsdp.checkpoint.optimizer_state import GROUPS, KIND, META, STATE
from megatron_fsdp.checkpoint.report import LoadReport, report_of_all, together
from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.checkpoint.verify import require_sound
from megatron_fsdp.comm.agreement import rank_of, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

_STATE, _META, _GROUPS = f"{OPTIMIZER}.{STATE}.", f"{OPTIMIZER}.{META}.", f"{OPTIMIZER}.{GROUPS}"
_KIND = f"{OPTIMIZER}.{KIND}"


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    root: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    extra: Extras | None = None,
    with_rng: bool = True,
    strict: bool = True,
    verify: bool | None = None,
    view: Callable[[CheckpointFolder], CheckpointFolder] | None = None,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load one checkpoint; collective.

    Names, shapes and files are compared first, on every rank, and nothing is touched unless all ranks can go on. Any
    number of ranks, strategy and mesh may have written it.

    Args:
        model: Sharded or not; its tensors are written in place.
        optimizer: None: the optimizer's part is left out. A fresh one gets its state, without a step being made.
        root: Folder of the run (then the latest is loaded), or of one checkpoint of torch.distributed.checkpoint.
        iteration: Which one of the run; None: the latest.
        extra: More to load, by the names under which it was saved.
        with_rng: Whether to bring back the random states (`rng.py` has the rule for other numbers of ranks).
        strict: Refuse a checkpoint that lacks something, has something more, or has other shapes; False loads what
            fits and reports the rest.
        verify: Compare everything with the manifest first; ranks share the work, which takes about as long as reading.
            None: where there is one, and without the sections that are not loaded.
        view: From the opened folder to one that shows its content under the names of the model; None: as it is.
        group: The ranks; None: all.

    Returns:
        What was loaded and what was not.

    Raises:
        CheckpointError: The checkpoint is no checkpoint, incomplete, damaged or (with `strict`) another model's; the
            same on every rank. Nothing was changed, unless the message says otherwise.
        ConfigurationError: The arguments do not belong together, or ranks give different ones.
    """
    folder = CheckpointStore(root, group=group).resolve(iteration)
    doing = f"loading {folder}"
    notes: list[str] = []

    def prepare() -> tuple[Match, LoadReport, dict[str, Any], Callable[[], None]]:
        stored = CheckpointFolder(folder)
        match = _matched(stored if view is None else view(stored), model, optimizer, extra or {})
        report = match.report()
        if strict:
            report.require_complete(str(folder))
        if verify or (verify is None and stored.manifest is not None):
            unread = {*({OPTIMIZER} if optimizer is None else ()), *(() if with_rng else {RNG})}
            without = () if verify else unread
            notes.append(require_sound(stored, rank_of(group), world_size_of(group), without))
        objects = {key: match.folder.read_object(key) for key in match.objects}
        if not with_rng:
            return match, report, objects, lambda: None
        restore_rng, told = _random_states(match.folder, model, group)
        notes.append(f"random states: {told}")
        return match, report, objects, restore_rng

    def install() -> None:
        install_weights = getattr(model, "install_optimized_model_weights", None)
        if install_weights is not None:
            install_weights()
        for part in match.parts:
            part.install(objects)
        restore_rng()

    compares = "where there is a manifest" if verify is None else str(bool(verify))
    asked = {"iteration": repr(iteration), "strict": str(bool(strict)), "verify": compares}
    asked |= facts_of(optimizer, extra, with_rng)
    match, report, objects, restore_rng = together(doing, prepare, group, asked)
    together(doing, lambda: _telling("a part of it is in memory now: load a whole one", lambda: _read(match)), group)
    together(doing, lambda: _telling("its weights are in memory now: load a whole one", install), group)
    report = replace(report, notes=(*report.notes, *notes))
    return report if naming.place_of(model).size == 1 else report_of_all(report, group)


def facts_of(optimizer: torch.optim.Optimizer | None, extra: Extras | None, with_rng: bool) -> dict[str, str]:
    """Return the arguments that must be equal on all ranks when they save or load, in words; raises nothing."""
    count = len(extra) if isinstance(extra, Mapping) else 0  # names may be those of a rank, numbers of them not
    return {
        "optimizer": "None" if optimizer is None else "given",
        "extra": f"{count} names" if count else "empty",
        "with_rng": str(bool(with_rng)),
    }


def _matched(
    folder: CheckpointFolder, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Extras
) -> Match:
    """Match everything that was asked for with what is stored."""
    naming.check_names(extra)
    if not getattr(model, "is_param_fsdp_distributed", True):
        raise ConfigurationError(
            "the model shows full parameters at the moment, whose values are dropped afterwards; load outside of "
            "full_parameters_context(), forward and backward"
        )
    match = Match(folder)
    states = match_model(match, model)
    match.parts += [] if optimizer is None else [OptimizerMatch(match, optimizer, model)]
    match.parts += states
    match.parts += [match_extra(match, (name,), optimizer_state.as_extra(target)) for name, target in extra.items()]
    asked = {MODEL, ITERATION, RNG, *([] if optimizer is None else [OPTIMIZER]), *extra}
    # No section has a dot in its name; a first part that has is a flat name.
    left = {path_of(folder, key)[0].partition(".")[0] for key in match.keys_below("")} - asked
    if left:
        match.notes.append(f"in the checkpoint and not asked for: {', '.join(sorted(left)[:12])}")
    cast = [key for key, target in match.tensors.items() if folder.tensors[key].dtype != target.dtype]
    if cast:
        told = f"{cast[0]} from {folder.tensors[cast[0]].dtype} to {match.tensors[cast[0]].dtype}"
        match.notes.append(f"{len(cast)} tensors were cast, as {told}")
    return match


def _telling(what_is_left: str, act: Callable[[], None]) -> None:
    """Add what could not be undone to an error of `act`."""
    try:
        act()
    except Exception as error:
        raise CheckpointError(f"{error} ({what_is_left})") from error


def _read(match: Match) -> None:
    """Read what this rank holds of each tensor, one stored chunk at a time; no communication.

    torch's reader is not used: it reads a chunk as often as parts of it are wanted, and believes what a file says of
    itself.
    """
    folder, targets = match.folder, match.tensors
    with torch.no_grad(), folder.kept_open():
        for key, target in targets.items():
            if isinstance(target, DTensor) and target.device_mesh.get_coordinate() is None:
                continue
            for chunk in _create_chunk_list(target):
                held = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                view = find_state_dict_object(targets, MetadataIndex(key, chunk.offsets)).detach()
                for shared, values in folder.parts(key, held):
                    view[shared.inside(held).indices].copy_(values)
                    del values  # before the next one is read


def _random_states(
    folder: CheckpointFolder, model: nn.Module, group: dist.ProcessGroup | None
) -> tuple[Callable[[], None], str]:
    """Read and test the random states to restore last, so that damage changes nothing."""
    keys = [key for key in folder.objects if key.startswith(f"{RNG}.")]
    if f"{RNG}.topology" not in keys or not any(key.endswith(".states") for key in keys):
        return lambda: None, "none that this library has saved, so the streams go on as they are"
    place = rng.logical_rank_of(model, group)
    same = folder.read_object(f"{RNG}.topology") == place.topology
    wanted = [key for key in keys if not same or key.endswith((".topology", f".{place.key}.states"))]
    return rng.prepare({key: folder.read_object(key) for key in wanted}, place, naming.device_of(model))


# ---- which key of the checkpoint belongs to what ---------------------------------------------------------------------


@dataclass
class Match:
    """What to read of a folder, where it goes, and what does not fit (as in `LoadReport`).

    `parts` are installed once everything is read. Tensors go to live ones, or to blank ones that are installed then.
    `model_keys` are by names without prefixes, of which the checkpoint's model has so many `module.`.
    """

    folder: CheckpointFolder
    parts: list[OptimizerMatch | ExtraMatch] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model_keys: dict[str, str] = field(default_factory=dict)
    prefixes: int = 1

    def keys_below(self, prefix: str) -> list[str]:
        """List the keys of tensors, then those of objects, that begin so."""
        return [key for key in [*self.folder.tensors, *self.folder.objects] if key.startswith(prefix)]

    def want_tensor(self, key: str, target: torch.Tensor) -> bool:
        """Request a tensor; record and return False if the checkpoint has another shape or an object there."""
        entry = self.folder.tensors.get(key)
        if entry is None:
            self.missing.append(key)
            self.notes.append(f"{key} is an object in the checkpoint and a tensor here")
            return False
        if entry.shape != tuple(target.shape):
            self.reshaped[key] = (entry.shape, tuple(target.shape))
            return False
        self.tensors[key] = target
        return True

    def report(self) -> LoadReport:
        """Return the report for the caller."""
        iteration = self.folder.read_object(ITERATION) if ITERATION in self.folder.objects else None
        return LoadReport(
            tuple(sorted([*self.tensors, *self.objects])),
            tuple(sorted(self.missing)),
            tuple(sorted(self.unexpected)),
            dict(sorted(self.reshaped.items())),
            tuple(self.notes),
            iteration if type(iteration) is int else None,
        )


def match_model(match: Match, model: nn.Module) -> list[ExtraMatch]:
    """Match every parameter and buffer of a model; return the `_extra_state` of its modules."""
    live = {key.removeprefix(PREFIX): value for key, value in naming.model_section(model).items()}
    keys = [key.removeprefix(f"{MODEL}.") for key in match.keys_below(f"{MODEL}.")]
    names, match.prefixes = naming.unwrapped(keys, live.__contains__)
    stored = match.model_keys = {name: f"{MODEL}.{full}" for name, full in names.items()}
    states: list[ExtraMatch] = []
    inside: set[str] = set()
    for name, value in live.items():
        key = next((stored[each] for each in naming.stored_names(model, name) if each in stored), None)
        if isinstance(value, torch.Tensor):
            if key is None:
                match.missing.append(f"{MODEL}.{PREFIX}{name}")
            else:
                match.want_tensor(key, value)
            continue
        below = [each for each in stored if each == name or each.startswith(f"{name}.")]
        inside.update(below)
        head = path_of(match.folder, stored[below[0]])[:2] if below else (MODEL, PREFIX + name)
        states.append(match_extra(match, head, _ModuleState(model, name, value)))
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of[id(param)].append(naming.saved_name(model, name))
    for tied in names_of.values():
        if any(name in stored for name in tied):  # one name of a tied parameter is enough
            spare = {f"{MODEL}.{PREFIX}{name}" for name in tied if name not in stored}
            match.missing = [key for key in match.missing if key not in spare]
    known = live.keys() | inside
    match.unexpected += [
        key for name, key in stored.items() if name not in known and not naming.is_elsewhere(model, name)
    ]
    return states


class _ModuleState:
    """The `_extra_state` of one module, under the protocol of the caller's own objects."""

    def __init__(self, model: nn.Module, name: str, value: Any) -> None:
        self._model, self._name, self._value = model, name, value

    def state_dict(self) -> Any:
        return self._value

    def load_state_dict(self, state_dict: Any) -> None:
        is_wrapped = hasattr(self._model, "install_optimized_model_weights")
        inner = cast(nn.Module, self._model.module) if is_wrapped else self._model
        inner.get_submodule(self._name.rpartition(".")[0]).set_extra_state(state_dict)


@dataclass(frozen=True)
class ExtraMatch:
    """The stored state of one of the caller's own objects: by path the tensors to read into, or keys of objects.

    The path of a state that is one object in all is ().
    """

    target: Stateful
    leaves: dict[KeyPath, torch.Tensor | str]

    def install(self, objects: Mapping[str, Any]) -> None:
        """Load the state once tensors and objects are read; without any, the object stays as it is."""
        found = {path: objects[leaf] if isinstance(leaf, str) else leaf for path, leaf in self.leaves.items()}
        if found:
            self.target.load_state_dict(found[()] if () in found else naming.unflatten(found))


def match_extra(match: Match, head: KeyPath, target: Stateful) -> ExtraMatch:
    """Match the state of one of the caller's own objects, or the extra state of a module.

    What only the checkpoint has, and plain tensors of another length, are read as they are: whether they fit is for the
    object's `load_state_dict` to say.
    """
    folder, name, cut = match.folder, ".".join(head), len(head)
    leaves, paths = naming.flatten(naming.unflatten({head: target.state_dict()}))
    live = {paths[key]: value for key, value in leaves.items()}
    keys = [key for key in match.keys_below(name) if key == name or key.startswith(f"{name}.")]
    order = {key: place for place, key in enumerate(folder.metadata.planner_data or ())}  # as dicts had their keys
    keys.sort(key=lambda key: order.get(key, len(order)))
    found = {path_of(folder, key): key for key in keys}
    if found:
        begun = {path[:end] for path in found for end in range(len(path) + 1)}
        match.missing += [
            ".".join(path)
            for path in live
            if path not in begun and not any(path[:end] in found for end in range(len(path)))
        ]
    else:
        match.missing.append(name)
    stored: dict[KeyPath, torch.Tensor | str] = {}
    for path, key in found.items():
        if key in folder.objects:
            stored[path[cut:]] = key
            match.objects.add(key)
            continue
        here, entry = live.get(path), folder.tensors[key]
        if not isinstance(here, DTensor) and not (isinstance(here, torch.Tensor) and tuple(here.shape) == entry.shape):
            make_blank = getattr(target, "blank", None)
            here = None if make_blank is None else make_blank(path[cut:], entry.shape, entry.dtype)
            here = torch.empty(entry.shape, dtype=entry.dtype) if here is None else here
        if match.want_tensor(key, here):
            stored[path[cut:]] = here
    return ExtraMatch(target, stored)


def path_of(folder: CheckpointFolder, key: str) -> tuple[str, ...]:
    """Return the path of a key in the nested state; where the checkpoint does not say, dots separate it."""
    found = folder.metadata.planner_data
    path = found.get(key) if isinstance(found, dict) else None
    if isinstance(path, tuple) and all(isinstance(part, str) for part in path):
        return path
    return tuple(key.split("."))


class OptimizerMatch:
    """The state that an optimizer will have once everything is read; state that it does not have yet is made.

    `leaves` and `options` (of its group) are by parameter; the state of those in `kept` stays, since the checkpoint has
    none that fits; `rest` are the keys of what else is stored.
    """

    def __init__(self, match: Match, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.leaves: dict[str, dict[KeyPath, torch.Tensor | str]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.kept: set[str] = set()
        self.rest: dict[str, str] = {}
        self._match, self._folder, self._optimizer, self._model = match, match.folder, optimizer, model
        self._names = optimizer_state.named_parameters_of(optimizer, model)
        self._keys = match.keys_below(f"{OPTIMIZER}.")
        if self._keys:
            self._match_all()
        else:
            match.missing.append(OPTIMIZER)
            self.kept = set(chain.from_iterable(self._names))
        try:
            self._merged = optimizer_state.merged_options(self._names, optimizer.param_groups, self.options)
        except ConfigurationError as error:
            raise CheckpointError(f"{match.folder.path}: {error}") from error

    def _match_all(self) -> None:
        model, listed = self._model, naming.listed_names(self._optimizer, self._model, self._names)
        self._listed = list(chain.from_iterable(listed))  # other experts, too
        self._of_all = naming.place_of(model).names
        self._known = {*self._listed, *self._of_all}
        params = {
            name: param
            for group, in_group in zip(self._names, self._optimizer.param_groups, strict=True)
            for name, param in zip(group, in_group["params"], strict=True)
        }
        slots = {name: by_slot for name, by_slot in self._slots().items() if name in params}
        own_names = {id(param): naming.own_name(model, name) for name, param in model.named_parameters()}
        for name, by_slot in slots.items():
            self._match_state(name, params[name], own_names[id(params[name])], by_slot)
        self._read_options()
        self._note_without_state(slots.keys(), list(params))
        self._match_rest(has_state=bool(slots))

    def install(self, objects: Mapping[str, Any]) -> None:
        """Load state and options once tensors and objects are read."""
        state = {}
        for name, leaves in self.leaves.items():
            slots = {path: objects[leaf] if isinstance(leaf, str) else leaf for path, leaf in leaves.items()}
            step = self.options.get(name, {}).get("step")  # where Megatron keeps the step counter
            if ("step",) not in slots and isinstance(step, int | float):
                slots["step",] = torch.tensor(float(step))
            state[name] = naming.unflatten(slots)
        rest = {name: objects[key] for name, key in self.rest.items()}
        optimizer_state.install(self._optimizer, self._names, state, self.kept, self._merged, rest)

    def _slots(self) -> dict[str, dict[KeyPath, str]]:
        """Return the key of each slot, by parameter and path of the slot."""
        found: dict[str, dict[KeyPath, str]] = {}
        by_rest = self._below(_STATE, self._known)
        by_position = self._by_position(any(_split(rest, self._known)[0] for rest in by_rest))
        for rest, stored in by_rest.items():
            key = _STATE + stored
            name, slot = _split(rest, self._known)
            if name is None:
                head, _, slot = stored.partition(".")
                name = by_position.get(head)
            if name is None:
                self._match.unexpected.append(key)
                continue
            path = path_of(self._folder, key)
            is_told = len(path) > 3 and ".".join(path[3:]) == slot  # how state nests, and which names have dots
            found.setdefault(name, {})[path[3:] if is_told else tuple(slot.split("."))] = key
        return found

    def _below(self, prefix: str, known: set[str]) -> dict[str, str]:
        """Return the rests of keys below a prefix, by themselves without the prefixes of wrappers."""
        rests = [key.removeprefix(prefix) for key in self._keys if key.startswith(prefix)]
        return naming.unwrapped(rests, lambda rest: _split(rest, known)[0] is not None, self._match.prefixes)[0]

    def _by_position(self, has_names: bool) -> dict[str, str]:
        """Return names by position; those of a Sequential are numbers too, and a stage knows only its own."""
        return {} if self._of_all or has_names else {str(at): name for at, name in enumerate(self._listed)}

    def _match_state(self, name: str, param: torch.Tensor, own: str, by_slot: Mapping[KeyPath, str]) -> None:
        """Match the state of one parameter; live tensors are loaded in place."""
        model = self._model
        view = naming.saved_view(model, own, param.detach())
        if self._is_reshaped(name, view, by_slot):
            self.kept.add(name)
            return
        leaves, paths = naming.flatten(self._optimizer.state.get(param, {}))
        live = {
            paths[key]: naming.saved_view(model, own, value) if isinstance(value, torch.Tensor) else value
            for key, value in leaves.items()
        }
        for slot, key in by_slot.items():
            if key in self._folder.objects:
                self.leaves.setdefault(name, {})[slot] = key
                self._match.objects.add(key)
                continue
            entry, here = self._folder.tensors[key], live.get(slot)
            target = (
                here
                if isinstance(here, torch.Tensor)
                else optimizer_state.blank_slot(view, slot[-1], entry.shape, entry.dtype)
            )
            if self._match.want_tensor(key, target):
                self.leaves.setdefault(name, {})[slot] = target
        self._match.missing += [f"{_STATE}{PREFIX}{name}.{'.'.join(slot)}" for slot in live if slot not in by_slot]

    def _is_reshaped(self, name: str, param: torch.Tensor, by_slot: Mapping[KeyPath, str]) -> bool:
        """Return whether the parameter had another shape when it was saved; then its state is of no use."""
        tensors = self._folder.tensors
        entry = tensors.get(self._match.model_keys.get(name, ""))
        if entry is None or entry.shape == tuple(param.shape):
            return False
        for key in by_slot.values():
            if key in tensors and tensors[key].shape == entry.shape:
                self._match.reshaped[key] = (entry.shape, tuple(param.shape))
        return True

    def _read_options(self) -> None:
        """Read the options, which are small and needed before anything is changed."""
        groups = self._groups()
        if groups is not None:
            try:
                stored = optimizer_state.options_by_name(groups)
            except ConfigurationError as error:
                raise CheckpointError(f"{self._folder.path}: {error}") from error
            names, _ = naming.unwrapped(stored, self._known.__contains__, self._match.prefixes)
            by_position = self._by_position(bool(self._known & names.keys()))
            self.options = {by_position.get(name, name): stored[full] for name, full in names.items()}
        halved = {name.removesuffix("_w") for name in self._known if name.endswith("_w")} - self._known
        fits = self._known | halved
        for rest, full in self._below(_META, fits).items():
            name, option = _split(rest, fits)
            key = _META + full
            if name is None:
                self._match.unexpected.append(key)
            elif name not in halved:  # Megatron asks for options under the name of both halves; here each has its own
                self._match.objects.add(key)
                self.options.setdefault(name, {})[option] = self._folder.read_object(key)

    def _groups(self) -> Any:
        """Read the list of groups: one object, or an entry per option, as torch's planner stores lists of dicts."""
        if _GROUPS in self._folder.objects:
            self._match.objects.add(_GROUPS)
            return self._folder.read_object(_GROUPS)
        nested: dict[str, Any] = {}
        paths = self._folder.metadata.planner_data or {}
        for key in self._keys:
            if key.startswith(f"{_GROUPS}.") and key in self._folder.objects:
                set_element(nested, paths.get(key, tuple(key.split("."))), self._folder.read_object(key))
                self._match.objects.add(key)
        return nested.get(OPTIMIZER, {}).get(GROUPS)

    def _note_without_state(self, with_state: Collection[str], names: Sequence[str]) -> None:
        """Record missing state, unless the parameter had no state when it was saved."""
        if not with_state:
            return
        without = [name for name in names if name not in with_state]
        missing = [name for name in without if name not in self.options]
        self._match.missing += [f"{_STATE}{PREFIX}{name}" for name in missing]
        self.kept.update(missing)
        if len(missing) < len(without):
            self._match.notes.append(
                f"{len(without) - len(missing)} parameters had no optimizer state when they were saved, and have none "
                "now"
            )

    def _match_rest(self, *, has_state: bool) -> None:
        if has_state and not self.options:
            self._match.notes.append("the checkpoint has no options of the optimizer (lr, ...): they stay as they are")
        kind = self._folder.read_object(_KIND) if _KIND in self._folder.objects else None
        own = optimizer_state.kind_of(self._optimizer)
        if kind not in (None, own):
            self._match.unexpected.append(f"{_KIND} (state of {kind!s:.100}, and the optimizer is {own})")
        prefixes = (_STATE, _META, f"{_GROUPS}.", _KIND)
        for key in self._keys:
            if key != _GROUPS and not key.startswith(prefixes) and key in self._folder.objects:
                self.rest[key.removeprefix(f"{OPTIMIZER}.")] = key
                self._match.objects.add(key)


def _split(rest: str, known: set[str]) -> tuple[str | None, str]:
    """Split a key into the parameter (the longest known name) and the rest."""
    parts = rest.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        if name in known:
            return name, ".".join(parts[cut:])
    return None, rest
