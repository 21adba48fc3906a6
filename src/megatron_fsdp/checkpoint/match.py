"""The match between keys of a checkpoint and live tensors and objects; only small objects are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint import naming
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import ITERATION, MODEL, PREFIX, KeyPath
from megatron_fsdp.checkpoint.report import Findings, LoadReport

Leaves = dict[KeyPath, torch.Tensor | str]
"""By path, tensors to read into, or keys of objects; the path of a state that is one object in all is ()."""


def filled(leaves: Leaves, objects: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Return the values by path, once tensors and objects are read."""
    return {path: objects[leaf] if isinstance(leaf, str) else leaf for path, leaf in leaves.items()}


Loader = Callable[[Mapping[str, Any]], None]
"""Loads the matched state after everything is read, given the objects by their keys."""


@dataclass(kw_only=True)
class Match(Findings):
    """The entries of a folder to read, their destinations, and the misfits (as in `LoadReport`).

    Tensors go to live ones, or to blank ones that are loaded from once everything is read. `model_keys` are by names
    without prefixes, of which the checkpoint's model has so many `module.`.
    """

    folder: CheckpointFolder
    loaders: list[Loader] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    model_keys: dict[str, str] = field(default_factory=dict)
    prefixes: int = 1

    def keys_below(self, prefix: str) -> list[str]:
        """List the keys with a prefix: tensors, then objects."""
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
        if entry.dtype.is_complex and not target.dtype.is_complex:
            self.missing.append(key)
            self.notes.append(f"{key} is complex in the checkpoint and real here")
            return False
        self.tensors[key] = target
        return True

    def want_object(self, key: str) -> str:
        """Request an object; return its key, a placeholder until it is read."""
        self.objects.add(key)
        return key

    def read_object(self, key: str) -> Any:
        """Read an object that is needed for matching."""
        return self.folder.read_object(self.want_object(key))

    def report(self) -> LoadReport:
        """Return the report for the caller."""
        iteration = self.folder.read_object(ITERATION) if ITERATION in self.folder.objects else None
        return self.reported([*self.tensors, *self.objects], iteration if type(iteration) is int else None)


def match_model(match: Match, model: nn.Module) -> list[Loader]:
    """Match every parameter and buffer of a model; return the `_extra_state` of its modules."""
    live = {key.removeprefix(PREFIX): value for key, value in naming.model_section(model).items()}
    keys = [key.removeprefix(f"{MODEL}.") for key in match.keys_below(f"{MODEL}.")]
    names, match.prefixes = naming.unwrapped(keys, live.__contains__)
    stored = match.model_keys = {name: f"{MODEL}.{full}" for name, full in names.items()}
    states: list[Loader] = []
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
        states.append(match_extra(match, head, value, partial(_set_extra_state, model, name)))
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


def _set_extra_state(model: nn.Module, name: str, state: Any) -> None:
    is_wrapped = hasattr(model, "install_optimized_model_weights")
    inner = cast(nn.Module, model.module) if is_wrapped else model
    inner.get_submodule(name.rpartition(".")[0]).set_extra_state(state)


def match_extra(
    match: Match, head: KeyPath, state: Any, load: Callable[[Any], Any], blank: Callable[..., Any] | None = None
) -> Loader:
    """Match the state of one of the caller's own objects, or the extra state of a module; `load` will load it.

    State that only the checkpoint has, and plain tensors of another length, are read unchanged: `load` decides whether
    they fit. `blank` returns a tensor to read into for path, shape and dtype, or None.
    """
    folder, name, cut = match.folder, ".".join(head), len(head)
    leaves, paths = naming.flatten(naming.unflatten({head: state}))
    live = {paths[key]: value for key, value in leaves.items()}
    keys = [key for key in match.keys_below(name) if key == name or key.startswith(f"{name}.")]
    order = {key: place for place, key in enumerate(folder.paths)}  # as dicts had their keys
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
    stored: Leaves = {}
    for path, key in found.items():
        if key in folder.objects:
            stored[path[cut:]] = match.want_object(key)
            continue
        here, entry = live.get(path), folder.tensors[key]
        if not isinstance(here, DTensor) and not (isinstance(here, torch.Tensor) and tuple(here.shape) == entry.shape):
            here = None if blank is None else blank(path[cut:], entry.shape, entry.dtype)
            here = torch.empty(entry.shape, dtype=entry.dtype) if here is None else here
        if match.want_tensor(key, here):
            stored[path[cut:]] = here

    def load_filled(objects: Mapping[str, Any]) -> None:
        values = filled(stored, objects)
        if values:  # else the object stays as it is
            load(values[()] if () in values else naming.unflatten(values))

    return load_filled


def path_of(folder: CheckpointFolder, key: str) -> tuple[str, ...]:
    """Return the path of a key in the nested state; without one in the checkpoint, dots separate it."""
    path = folder.paths.get(key, ())
    if path and all(isinstance(part, str) for part in path):
        return cast(tuple[str, ...], path)
    return tuple(key.split("."))
