"""Which key of a checkpoint belongs to which live tensor or object: settled whole before anything is read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.flat_state import flatten
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.live_state import ITERATION, MODEL, OPTIMIZER, Extras, Stateful, model_section
from megatron_fsdp.checkpoint.naming import bare, is_elsewhere, saved_name
from megatron_fsdp.checkpoint.report import LoadReport
from megatron_fsdp.checkpoint.rng import SECTION as RNG


@dataclass
class Match:
    """What to read, where it goes, and what does not fit.

    Attributes:
        tensors: Where tensors go, by key of the checkpoint: live ones, or blank ones to be installed once read.
        objects: Keys of objects to read.
        missing: As in `LoadReport`.
        unexpected: As in `LoadReport`.
        reshaped: As in `LoadReport`.
        notes: As in `LoadReport`.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def want_tensor(self, folder: CheckpointFolder, key: str, target: torch.Tensor) -> bool:
        """Ask for a tensor; False, and noted, where the checkpoint has another shape or an object there."""
        entry = folder.tensors.get(key)
        if entry is None:
            self.missing.append(key)
            self.notes.append(f"{key} is an object in the checkpoint and a tensor here")
            return False
        if entry.shape != tuple(target.shape):
            self.reshaped[key] = (entry.shape, tuple(target.shape))
            return False
        self.tensors[key] = target
        return True

    def report(self, iteration: int | None) -> LoadReport:
        """As told to the caller."""
        return LoadReport(
            tuple(sorted([*self.tensors, *self.objects])),
            tuple(sorted(self.missing)),
            tuple(sorted(self.unexpected)),
            dict(sorted(self.reshaped.items())),
            tuple(self.notes),
            iteration,
        )


def match_model(match: Match, folder: CheckpointFolder, model: nn.Module) -> dict[str, str]:
    """Find every parameter and buffer of a model.

    Returns:
        Key of each object in the model's state (what modules keep as `_extra_state`), by its name in the model.
    """
    live = {bare(key): value for key, value in model_section(model).items()}
    stored = keys_below(folder, MODEL)
    objects: dict[str, str] = {}
    for name, value in live.items():
        key = stored.get(name)
        if key is None:
            match.missing.append(f"{MODEL}.module.{name}")
        elif isinstance(value, torch.Tensor):
            match.want_tensor(folder, key, value)
        elif key in folder.objects:
            objects[name] = key
            match.objects.add(key)
        else:
            match.missing.append(key)
    _forgive_ties(match, model, stored)
    match.unexpected += [key for name, key in stored.items() if name not in live and not is_elsewhere(model, name)]
    return objects


def keys_below(folder: CheckpointFolder, section: str) -> dict[str, str]:
    """Keys of a section by the name that follows it, without what wrappers put before it."""
    prefix = f"{section}."
    return {bare(key.removeprefix(prefix)): key for key in [*folder.tensors, *folder.objects] if key.startswith(prefix)}


def _forgive_ties(match: Match, model: nn.Module, stored: dict[str, str]) -> None:
    """One of the names of a tied parameter is enough."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of[id(param)].append(bare(saved_name(model, name)))
    for names in names_of.values():
        if any(name in stored for name in names):
            spare = {f"{MODEL}.module.{name}" for name in names if name not in stored}
            match.missing = [key for key in match.missing if key not in spare]


@dataclass(frozen=True)
class ExtraMatch:
    """What belongs to one of the caller's own objects.

    Attributes:
        target: The object.
        tensors: By path inside its state: tensors to be read.
        objects: By path: key of each object.
        root_key: Key of the state where it is one object in all.
    """

    target: Stateful
    tensors: dict[tuple[str, ...], torch.Tensor]
    objects: dict[tuple[str, ...], str]
    root_key: str | None


def match_extra(match: Match, folder: CheckpointFolder, name: str, target: Stateful) -> ExtraMatch:
    """Find the state of one of the caller's own objects.

    What the checkpoint has and the object does not (as a schedule that has not stepped yet) is read as it is, and so
    are plain tensors of another length; whether they fit is for the object's `load_state_dict` to say.
    """
    leaves, paths = flatten({name: target.state_dict()})
    live = {paths[key]: value for key, value in leaves.items()}
    tensors: dict[tuple[str, ...], torch.Tensor] = {}
    objects: dict[tuple[str, ...], str] = {}
    keys = [key for key in [*folder.tensors, *folder.objects] if key == name or key.startswith(f"{name}.")]
    found = {path_of(folder, key): key for key in keys}
    match.missing += [".".join(path) for path in live if path not in found and len(found) != 1 and path != (name,)]
    if not found:
        match.missing.append(name)
    for path, key in found.items():
        here = live.get(path)
        if key in folder.objects:
            objects[path[1:]] = key
            match.objects.add(key)
            continue
        entry = folder.tensors[key]
        fits = isinstance(here, DTensor) or (isinstance(here, torch.Tensor) and tuple(here.shape) == entry.shape)
        target_tensor = cast(torch.Tensor, here) if fits else torch.empty(entry.shape, dtype=entry.dtype)
        if match.want_tensor(folder, key, target_tensor):
            tensors[path[1:]] = target_tensor
    return ExtraMatch(target, tensors, objects, name if name in folder.objects else None)


def path_of(folder: CheckpointFolder, key: str) -> tuple[str, ...]:
    """How a key nests; where the checkpoint does not say, dots part it."""
    found = folder.metadata.planner_data
    path = found.get(key) if isinstance(found, dict) else None
    if isinstance(path, tuple) and all(isinstance(part, str) for part in path):
        return path
    return tuple(key.split("."))


def note_left_out(match: Match, folder: CheckpointFolder, asked: set[str], extra: Extras) -> None:
    """Say which sections of the checkpoint nobody asked for."""
    sections = {path_of(folder, key)[0] for key in [*folder.tensors, *folder.objects]}
    left = sorted(sections - asked - extra.keys() - {ITERATION, RNG})
    if left:
        match.notes.append(f"in the checkpoint and not asked for: {', '.join(left[:12])}")


def asked_sections(optimizer: Any) -> set[str]:
    """Sections that are loaded, besides those of `extra`."""
    return {MODEL} if optimizer is None else {MODEL, OPTIMIZER}
