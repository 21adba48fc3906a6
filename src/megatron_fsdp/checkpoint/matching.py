"""Which key of a checkpoint belongs to which live tensor or object: settled whole before anything is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.extras import ExtraMatch, ModuleState, match_extra, path_of
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.live_state import ITERATION, MODEL, OPTIMIZER, Extras, model_section
from megatron_fsdp.checkpoint.naming import PREFIX, is_elsewhere, saved_name, unwrapped
from megatron_fsdp.checkpoint.report import LoadReport
from megatron_fsdp.checkpoint.rng import SECTION as RNG
from megatron_fsdp.checkpoint.stages import stored_names


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
        model_keys: Key of each parameter and buffer in the checkpoint, by its name without prefixes.
        prefixes: How many `module.` stand before the names of the checkpoint's model.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model_keys: dict[str, str] = field(default_factory=dict)
    prefixes: int = 1

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


def match_model(match: Match, folder: CheckpointFolder, model: nn.Module) -> list[ExtraMatch]:
    """Find every parameter and buffer of a model.

    Returns:
        What modules keep as `_extra_state`.
    """
    live = {key.removeprefix(PREFIX): value for key, value in model_section(model).items()}
    stored, match.prefixes = keys_below(folder, MODEL, live.__contains__)
    match.model_keys = stored
    states: list[ExtraMatch] = []
    inside: set[str] = set()
    for name, value in live.items():
        key = next((stored[each] for each in stored_names(model, name) if each in stored), None)
        if isinstance(value, torch.Tensor):
            if key is None:
                match.missing.append(f"{MODEL}.{PREFIX}{name}")
            else:
                match.want_tensor(folder, key, value)
            continue
        below = [each for each in stored if each == name or each.startswith(f"{name}.")]
        inside.update(below)
        head = path_of(folder, stored[below[0]])[:2] if below else (MODEL, PREFIX + name)
        states.append(match_extra(match, folder, head, ModuleState(model, name, value)))
    _forgive_ties(match, model, stored)
    known = live.keys() | inside
    match.unexpected += [key for name, key in stored.items() if name not in known and not is_elsewhere(model, name)]
    return states


def keys_below(folder: CheckpointFolder, section: str, known: Callable[[str], bool]) -> tuple[dict[str, str], int]:
    """Keys of a section by the name that follows it, without what wrappers put before it, and how much that was."""
    prefix = f"{section}."
    keys = [key for key in [*folder.tensors, *folder.objects] if key.startswith(prefix)]
    names, count = unwrapped([key.removeprefix(prefix) for key in keys], known)
    return {name: prefix + stored for name, stored in names.items()}, count


def _forgive_ties(match: Match, model: nn.Module, stored: dict[str, str]) -> None:
    """One of the names of a tied parameter is enough."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of[id(param)].append(saved_name(model, name))
    for names in names_of.values():
        if any(name in stored for name in names):
            spare = {f"{MODEL}.module.{name}" for name in names if name not in stored}
            match.missing = [key for key in match.missing if key not in spare]


def note_left_out(match: Match, folder: CheckpointFolder, asked: set[str], extra: Extras) -> None:
    """Say which sections of the checkpoint nobody asked for."""
    # No section has a dot in its name; a first part that has is a flat name, such as `mfsdp checkpoint edit` makes.
    sections = {path_of(folder, key)[0].partition(".")[0] for key in [*folder.tensors, *folder.objects]}
    left = sorted(sections - asked - extra.keys() - {ITERATION, RNG})
    if left:
        match.notes.append(f"in the checkpoint and not asked for: {', '.join(left[:12])}")


def asked_sections(optimizer: Any) -> set[str]:
    """Sections that are loaded, besides those of `extra`."""
    return {MODEL} if optimizer is None else {MODEL, OPTIMIZER}
