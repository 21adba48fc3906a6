"""Find an optimizer's state in a checkpoint, whichever of the usual ways it is stored in.

    by name        optimizer.state.<parameter>.<slot>, as here, by torch's `get_state_dict`, in Megatron's fsdp_dtensor
    by position    optimizer.state.<number>.<slot>, as a plain `optimizer.state_dict()` gives it

Options stand in `optimizer.param_groups` (one list, or flattened), or in
`optimizer.param_to_group_meta.<parameter>.<option>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.live_state import OPTIMIZER
from megatron_fsdp.checkpoint.matching import Match
from megatron_fsdp.checkpoint.naming import bare, by_number, listed_names, saved_view
from megatron_fsdp.checkpoint.optimizer_state import GROUPS, META, STATE, blank_slot, options_by_name
from megatron_fsdp.errors import CheckpointError, ConfigurationError

_STATE, _META, _GROUPS = f"{OPTIMIZER}.{STATE}.", f"{OPTIMIZER}.{META}.", f"{OPTIMIZER}.{GROUPS}"


@dataclass
class OptimizerMatch:
    """What an optimizer will hold once everything is read.

    Attributes:
        tensors: Slot by parameter and name of the slot.
        objects: Key of the checkpoint, likewise.
        options: Of each parameter's group, by parameter.
        rest: Keys of what else is stored.
    """

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    objects: dict[str, dict[str, str]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: dict[str, str] = field(default_factory=dict)


def match_optimizer(
    match: Match,
    folder: CheckpointFolder,
    names: list[list[str]],
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
) -> OptimizerMatch:
    """Find the state and options of every parameter of an optimizer.

    Args:
        match: Takes what is wanted and what does not fit.
        folder: The checkpoint.
        names: Bare names of the parameters of each group.
        optimizer: Live; its tensors are loaded in place, those that it does not have yet are made.
        model: Whose parameters it has.

    Raises:
        CheckpointError: The stored options make no sense.
    """
    found = OptimizerMatch()
    keys = [key for key in [*folder.tensors, *folder.objects] if key.startswith(f"{OPTIMIZER}.")]
    if not keys:
        match.missing.append(OPTIMIZER)
        return found
    flat = [name for group in names for name in group]
    params = {
        name: param
        for group, in_group in zip(names, optimizer.param_groups, strict=True)
        for name, param in zip(group, in_group["params"], strict=True)
    }
    listed = [bare(name) for name in by_number(listed_names(optimizer, model, names)).values()]  # other experts, too
    slots = {name: by_slot for name, by_slot in _slots(match, keys, listed).items() if name in params}
    own_names = {id(param): bare(name) for name, param in model.named_parameters()}
    for name, by_slot in slots.items():
        param, own = params[name], own_names[id(params[name])]
        live = {
            slot: saved_view(model, own, value) if isinstance(value, torch.Tensor) else value
            for slot, value in optimizer.state.get(param, {}).items()
        }
        _want(match, folder, found, name, saved_view(model, own, param.detach()), by_slot, live)
    known = _read_options(match, folder, keys, found, listed)
    _note_without_state(match, slots.keys(), flat, known)
    prefixes = (_STATE, _META, f"{_GROUPS}.")
    for key in keys:
        if key != _GROUPS and not key.startswith(prefixes) and key in folder.objects:
            found.rest[key.removeprefix(f"{OPTIMIZER}.")] = key
            match.objects.add(key)
    return found


def _slots(match: Match, keys: Sequence[str], flat: Sequence[str]) -> dict[str, dict[str, str]]:
    """Key of each slot, by parameter and slot."""
    found: dict[str, dict[str, str]] = {}
    by_position = {str(position): name for position, name in enumerate(flat)}
    known = set(flat)
    for key in keys:
        if not key.startswith(_STATE):
            continue
        rest = key.removeprefix(_STATE)
        head, _, slot = rest.partition(".")
        name: str | None = by_position.get(head)
        if name is None or head in known:
            name, slot = _split(bare(rest), known)
        if name is None:
            match.unexpected.append(key)
        else:
            found.setdefault(name, {})[slot] = key
    return found


def _split(rest: str, known: set[str]) -> tuple[str | None, str]:
    """The parameter at the head of a key, and what follows; the longest name that is known."""
    parts = rest.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        if name in known:
            return name, ".".join(parts[cut:])
    return None, rest


def _want(
    match: Match,
    folder: CheckpointFolder,
    found: OptimizerMatch,
    name: str,
    param: torch.Tensor,
    by_slot: Mapping[str, str],
    live: Mapping[str, Any],
) -> None:
    for slot, key in by_slot.items():
        if key in folder.objects:
            found.objects.setdefault(name, {})[slot] = key
            match.objects.add(key)
            continue
        entry, here = folder.tensors[key], live.get(slot)
        fits = isinstance(here, torch.Tensor) and tuple(here.shape) == entry.shape
        target = here if fits else blank_slot(param, slot, entry.shape, entry.dtype)
        assert isinstance(target, torch.Tensor), "made or found just now"
        if match.want_tensor(folder, key, target):
            found.tensors.setdefault(name, {})[slot] = target
    match.missing += [f"{_STATE}module.{name}.{slot}" for slot in live if slot not in by_slot]


def _read_options(
    match: Match, folder: CheckpointFolder, keys: Sequence[str], found: OptimizerMatch, flat: Sequence[str]
) -> set[str]:
    """Read the options; they are small, and wanted before anything is changed. Returns the parameters they name."""
    groups: Any = None
    if _GROUPS in folder.objects:
        groups = folder.read_object(_GROUPS)
        match.objects.add(_GROUPS)
    elif any(key.startswith(f"{_GROUPS}.") for key in keys):
        groups = _unflattened(match, folder, [key for key in keys if key.startswith(f"{_GROUPS}.")])
    if groups is not None:
        try:
            stored = options_by_name(groups)
        except ConfigurationError as error:
            raise CheckpointError(f"{folder.path}: {error}") from error
        by_position = {str(position): name for position, name in enumerate(flat)}
        found.options = {by_position.get(name, bare(name)): options for name, options in stored.items()}
    known = set(flat)
    for key in keys:
        if not key.startswith(_META):
            continue
        name, option = _split(bare(key.removeprefix(_META)), known)
        if name is None:
            match.unexpected.append(key)
        else:
            match.objects.add(key)
            found.options.setdefault(name, {})[option] = folder.read_object(key)
    return set(found.options)


def _unflattened(match: Match, folder: CheckpointFolder, keys: Sequence[str]) -> Any:
    """The list of groups out of one entry per option, as torch's planner stores lists of dicts."""
    nested: dict[str, Any] = {}
    paths = folder.metadata.planner_data or {}
    for key in keys:
        if key in folder.objects:
            set_element(nested, paths.get(key, tuple(key.split("."))), folder.read_object(key))
            match.objects.add(key)
    return nested.get(OPTIMIZER, {}).get(GROUPS)


def _note_without_state(match: Match, with_state: Any, flat: Sequence[str], known: set[str]) -> None:
    """A parameter without state was without it when it was saved, or else its state is missing."""
    if not with_state:
        return
    without = [name for name in flat if name not in with_state]
    match.missing += [f"{_STATE}module.{name}" for name in without if name not in known]
    blank = sum(name in known for name in without)
    if blank:
        match.notes.append(f"{blank} parameters had no optimizer state when they were saved, and have none now")


def with_step(found: OptimizerMatch, state: dict[str, dict[str, Any]]) -> None:
    """Give each parameter the step counter that Megatron keeps in the options of its group."""
    for name, slots in state.items():
        step = found.options.get(name, {}).get("step")
        if "step" not in slots and isinstance(step, int | float):
            slots["step"] = torch.tensor(float(step))
