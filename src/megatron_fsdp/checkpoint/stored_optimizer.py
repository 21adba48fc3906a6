"""Find an optimizer's state in a checkpoint, whichever of the usual ways it is stored in.

    by name        optimizer.state.<parameter>.<slot>, as here, by torch's `get_state_dict`, in Megatron's fsdp_dtensor
    by position    optimizer.state.<number>.<slot>, as a plain `optimizer.state_dict()` gives it

Options stand in `optimizer.param_groups` (one list, or flattened), or in
`optimizer.param_to_group_meta.<parameter>.<option>`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element

from megatron_fsdp.checkpoint.extras import path_of
from megatron_fsdp.checkpoint.flat_state import flatten, unflatten
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.live_state import OPTIMIZER
from megatron_fsdp.checkpoint.matching import Match
from megatron_fsdp.checkpoint.naming import PREFIX, by_number, listed_names, own_name, saved_view, unwrapped
from megatron_fsdp.checkpoint.optimizer_state import GROUPS, KIND, META, STATE, blank_slot, kind_of, options_by_name
from megatron_fsdp.checkpoint.stages import names_of_all
from megatron_fsdp.errors import CheckpointError, ConfigurationError

_STATE, _META, _GROUPS = f"{OPTIMIZER}.{STATE}.", f"{OPTIMIZER}.{META}.", f"{OPTIMIZER}.{GROUPS}"
_KIND = f"{OPTIMIZER}.{KIND}"


SlotPath = tuple[str, ...]


@dataclass
class OptimizerMatch:
    """What an optimizer will hold once everything is read.

    Attributes:
        tensors: Slot by parameter and path of the slot, which is one name unless state is nested.
        objects: Key of the checkpoint, likewise.
        options: Of each parameter's group, by parameter.
        kept: Parameters whose live state is left as it is, since the checkpoint has none that fits.
        rest: Keys of what else is stored.
    """

    tensors: dict[str, dict[SlotPath, torch.Tensor]] = field(default_factory=dict)
    objects: dict[str, dict[SlotPath, str]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    rest: dict[str, str] = field(default_factory=dict)

    def state(self, objects: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """State by parameter, once tensors are read.

        Args:
            objects: What was read, by key.
        """
        leaves: dict[str, dict[SlotPath, Any]] = {name: dict(slots) for name, slots in self.tensors.items()}
        for name, keys in self.objects.items():
            leaves.setdefault(name, {}).update({slot: objects[key] for slot, key in keys.items()})
        for name, slots in leaves.items():  # Megatron keeps the step counter in the options of the group
            step = self.options.get(name, {}).get("step")
            if ("step",) not in slots and isinstance(step, int | float):
                slots["step",] = torch.tensor(float(step))
        return {name: nested(slots) for name, slots in leaves.items()}


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
        names: Names of the parameters of each group in a checkpoint, without prefixes.
        optimizer: Live; its tensors are loaded in place, those that it does not have yet are made.
        model: Whose parameters it has.

    Raises:
        CheckpointError: The stored options make no sense.
    """
    found = OptimizerMatch()
    keys = [key for key in [*folder.tensors, *folder.objects] if key.startswith(f"{OPTIMIZER}.")]
    if not keys:
        match.missing.append(OPTIMIZER)
        found.kept = {name for group in names for name in group}
        return found
    params = {
        name: param
        for group, in_group in zip(names, optimizer.param_groups, strict=True)
        for name, param in zip(group, in_group["params"], strict=True)
    }
    listed = list(by_number(listed_names(optimizer, model, names)).values())  # other experts, too
    of_all = names_of_all(model)
    slots = {name: each for name, each in _slots(match, folder, keys, listed, of_all).items() if name in params}
    own_names = {id(param): own_name(model, name) for name, param in model.named_parameters()}
    for name, by_slot in slots.items():
        param, own = params[name], own_names[id(params[name])]
        view = saved_view(model, own, param.detach())
        if _is_reshaped(match, folder, name, view, by_slot):
            found.kept.add(name)
            continue
        leaves, paths = flatten(optimizer.state.get(param, {}))
        live = {
            paths[key]: saved_view(model, own, value) if isinstance(value, torch.Tensor) else value
            for key, value in leaves.items()
        }
        _want(match, folder, found, name, view, by_slot, live)
    known = _read_options(match, folder, keys, found, listed, of_all)
    _note_without_state(match, found, slots.keys(), list(params), known)
    if slots and not found.options:
        match.notes.append("the checkpoint has no options of the optimizer (lr, ...): they stay as they are")
    kind = folder.read_object(_KIND) if _KIND in folder.objects else None
    if kind not in (None, kind_of(optimizer)):
        match.unexpected.append(f"{_KIND} (state of {kind!s:.100}, and the optimizer is {kind_of(optimizer)})")
    prefixes = (_STATE, _META, f"{_GROUPS}.", _KIND)
    for key in keys:
        if key != _GROUPS and not key.startswith(prefixes) and key in folder.objects:
            found.rest[key.removeprefix(f"{OPTIMIZER}.")] = key
            match.objects.add(key)
    return found


def nested(slots: Mapping[SlotPath, Any]) -> dict[str, Any]:
    """The state of one parameter out of its leaves."""
    return unflatten({".".join(path): value for path, value in slots.items()}, {".".join(path): path for path in slots})


def _slots(
    match: Match, folder: CheckpointFolder, keys: Sequence[str], listed: Sequence[str], of_all: Collection[str]
) -> dict[str, dict[SlotPath, str]]:
    """Key of each slot, by parameter and path of the slot."""
    found: dict[str, dict[SlotPath, str]] = {}
    known = {*listed, *of_all}
    rests = [key.removeprefix(_STATE) for key in keys if key.startswith(_STATE)]
    by_rest, _ = unwrapped(rests, lambda rest: _split(rest, known)[0] is not None, match.prefixes)
    by_position: dict[str, str] = {}  # a stage of a pipeline does not know how many parameters are before its own
    if not of_all and not any(_split(rest, known)[0] for rest in by_rest):
        # Names come first: those of a Sequential are numbers, too.
        by_position = {str(position): name for position, name in enumerate(listed)}
    for rest, stored in by_rest.items():
        key = _STATE + stored
        name, slot = _split(rest, known)
        if name is None:
            head, _, slot = stored.partition(".")
            name = by_position.get(head)
        if name is None:
            match.unexpected.append(key)
            continue
        path = path_of(folder, key)
        is_told = len(path) > 3 and ".".join(path[3:]) == slot  # how state nests, and which names have dots
        found.setdefault(name, {})[path[3:] if is_told else tuple(slot.split("."))] = key
    return found


def _split(rest: str, known: set[str]) -> tuple[str | None, str]:
    """The parameter at the head of a key, and what follows; the longest name that is known."""
    parts = rest.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        if name in known:
            return name, ".".join(parts[cut:])
    return None, rest


def _is_reshaped(
    match: Match, folder: CheckpointFolder, name: str, param: torch.Tensor, by_slot: Mapping[SlotPath, str]
) -> bool:
    """Whether the parameter had another shape when its state was saved; then none of its state is of use."""
    entry = folder.tensors.get(match.model_keys.get(name, ""))
    if entry is None or entry.shape == tuple(param.shape):
        return False
    for key in by_slot.values():
        if key in folder.tensors and folder.tensors[key].shape == entry.shape:
            match.reshaped[key] = (entry.shape, tuple(param.shape))
    return True


def _want(
    match: Match,
    folder: CheckpointFolder,
    found: OptimizerMatch,
    name: str,
    param: torch.Tensor,
    by_slot: Mapping[SlotPath, str],
    live: Mapping[SlotPath, Any],
) -> None:
    for slot, key in by_slot.items():
        if key in folder.objects:
            found.objects.setdefault(name, {})[slot] = key
            match.objects.add(key)
            continue
        entry, here = folder.tensors[key], live.get(slot)
        target = here if isinstance(here, torch.Tensor) else blank_slot(param, slot[-1], entry.shape, entry.dtype)
        if match.want_tensor(folder, key, target):
            found.tensors.setdefault(name, {})[slot] = target
    match.missing += [f"{_STATE}{PREFIX}{name}.{'.'.join(slot)}" for slot in live if slot not in by_slot]


def _read_options(
    match: Match,
    folder: CheckpointFolder,
    keys: Sequence[str],
    found: OptimizerMatch,
    listed: Sequence[str],
    of_all: Collection[str],
) -> set[str]:
    """Read the options; they are small, and wanted before anything is changed. Returns the parameters they name."""
    groups: Any = None
    if _GROUPS in folder.objects:
        groups = folder.read_object(_GROUPS)
        match.objects.add(_GROUPS)
    elif any(key.startswith(f"{_GROUPS}.") for key in keys):
        groups = _unflattened(match, folder, [key for key in keys if key.startswith(f"{_GROUPS}.")])
    known = {*listed, *of_all}
    if groups is not None:
        try:
            stored = options_by_name(groups)
        except ConfigurationError as error:
            raise CheckpointError(f"{folder.path}: {error}") from error
        names, _ = unwrapped(stored, known.__contains__, match.prefixes)
        is_numbered = not of_all and not known & names.keys()
        by_position = {str(position): name for position, name in enumerate(listed)} if is_numbered else {}
        found.options = {by_position.get(name, name): stored[full] for name, full in names.items()}
    halved = {name.removesuffix("_w") for name in known if name.endswith("_w")} - known
    fits = known | halved
    rests = [key.removeprefix(_META) for key in keys if key.startswith(_META)]
    by_rest, _ = unwrapped(rests, lambda rest: _split(rest, fits)[0] is not None, match.prefixes)
    for rest, full in by_rest.items():
        name, option = _split(rest, fits)
        key = _META + full
        if name is None:
            match.unexpected.append(key)
        elif name not in halved:  # Megatron asks for options under the name of both halves; here each has its own
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


def _note_without_state(
    match: Match, found: OptimizerMatch, with_state: Collection[str], names: Sequence[str], known: set[str]
) -> None:
    """A parameter without state was without it when it was saved, or else its state is missing."""
    if not with_state:
        return
    without = [name for name in names if name not in with_state]
    missing = [name for name in without if name not in known]
    match.missing += [f"{_STATE}{PREFIX}{name}" for name in missing]
    found.kept.update(missing)
    if len(missing) < len(without):
        match.notes.append(
            f"{len(without) - len(missing)} parameters had no optimizer state when they were saved, and have none now"
        )
