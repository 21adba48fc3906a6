"""Find what is neither a parameter nor a buffer: the caller's own objects, and what modules keep as `_extra_state`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.flat_state import KeyPath, flatten
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.live_state import Stateful


class Wanted(Protocol):
    """Takes what is asked for (`matching.Match`)."""

    objects: set[str]
    missing: list[str]

    def want_tensor(self, folder: CheckpointFolder, key: str, target: torch.Tensor) -> bool:
        """Ask for a tensor; False where it does not fit."""
        ...


class ModuleState:
    """What one module keeps as `_extra_state`, under the protocol of the caller's own objects.

    Args:
        model: Sharded or not.
        name: Of the state in the model.
        value: As the module gives it.
    """

    def __init__(self, model: nn.Module, name: str, value: Any) -> None:
        self._model, self._name, self._value = model, name, value

    def state_dict(self) -> Any:
        """As the module gives it."""
        return self._value

    def load_state_dict(self, state_dict: Any) -> None:
        """Hand it to the module."""
        is_wrapped = hasattr(self._model, "install_optimized_model_weights")
        inner = cast(nn.Module, self._model.module) if is_wrapped else self._model
        inner.get_submodule(self._name.rpartition(".")[0]).set_extra_state(state_dict)


@dataclass(frozen=True)
class ExtraMatch:
    """What belongs to one of the caller's own objects.

    Attributes:
        target: The object.
        tensors: By path inside its state: tensors to be read.
        objects: By path: key of each object.
        root_key: Key of the state where it is one object in all.
        order: All paths, as dicts had their keys when they were saved.
    """

    target: Stateful
    tensors: dict[tuple[str, ...], torch.Tensor]
    objects: dict[tuple[str, ...], str]
    root_key: str | None
    order: tuple[tuple[str, ...], ...]

    @property
    def is_absent(self) -> bool:
        """Whether the checkpoint has nothing of it."""
        return not self.tensors and not self.objects


def match_extra(match: Wanted, folder: CheckpointFolder, head: KeyPath, target: Stateful) -> ExtraMatch:
    """Find the state of one of the caller's own objects, or what a module keeps besides tensors.

    What the checkpoint has and the object does not (as a schedule that has not stepped yet) is read as it is, and so
    are plain tensors of another length; whether they fit is for the object's `load_state_dict` to say.
    """
    name, cut = ".".join(head), len(head)
    leaves, paths = flatten(_below(head, target.state_dict()))
    live = {paths[key]: value for key, value in leaves.items()}
    tensors: dict[tuple[str, ...], torch.Tensor] = {}
    objects: dict[tuple[str, ...], str] = {}
    keys = [key for key in [*folder.tensors, *folder.objects] if key == name or key.startswith(f"{name}.")]
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
    for path, key in found.items():
        here = live.get(path)
        if key in folder.objects:
            objects[path[cut:]] = key
            match.objects.add(key)
            continue
        entry = folder.tensors[key]
        fits = isinstance(here, DTensor) or (isinstance(here, torch.Tensor) and tuple(here.shape) == entry.shape)
        make_blank = getattr(target, "blank", None)
        blank = None if fits or make_blank is None else make_blank(path[cut:], entry.shape, entry.dtype)
        plain = torch.empty(entry.shape, dtype=entry.dtype) if not fits and blank is None else None
        target_tensor = cast(torch.Tensor, next(each for each in (blank, plain, here) if each is not None))
        if match.want_tensor(folder, key, target_tensor):
            tensors[path[cut:]] = target_tensor
    return ExtraMatch(
        target, tensors, objects, name if name in folder.objects else None, tuple(path[cut:] for path in found)
    )


def path_of(folder: CheckpointFolder, key: str) -> tuple[str, ...]:
    """How a key nests; where the checkpoint does not say, dots part it."""
    found = folder.metadata.planner_data
    path = found.get(key) if isinstance(found, dict) else None
    if isinstance(path, tuple) and all(isinstance(part, str) for part in path):
        return path
    return tuple(key.split("."))


def _below(head: KeyPath, state: Any) -> dict[str, Any]:
    """A state where its path says."""
    for part in reversed(head):
        state = {part: state}
    return state
