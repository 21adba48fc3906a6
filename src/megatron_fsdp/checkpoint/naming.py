"""The keys of a checkpoint: the flattening of nested state, and the names of a live model's tensors.

model.module.<parameter or buffer>                     DTensors and tensors, the live ones
optimizer.state.module.<parameter>.<slot>              live DTensors and tensors
optimizer.param_groups                                 options of the groups, with the names of their parameters
rng_state.(<stage>, <tensor rank>).<data rank>.states  random states
iteration                                              steps done
<anything else>                                        what the caller adds: a schedule, a data position, an average

Parameters have the names of the whole model in every stage of a pipeline. So what differs from a model on one rank is
only what the stages have to exchange: which names are in other stages, which parameter groups the others have,
and that the head is a copy where it is tied to input embeddings in another stage. Experts have the names of all ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._traverse import set_element

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.errors import ConfigurationError, check_keys

KeyPath = tuple[str, ...]

Groups = list[dict[str, Any]]
Names = list[list[str]]
PREFIX = "module."
MODEL, OPTIMIZER, ITERATION, RNG = "model", "optimizer", "iteration", "rng_state"
RESERVED = frozenset({MODEL, OPTIMIZER, ITERATION, RNG})
_MOST_WRAPPERS = 8


class Stateful(Protocol):
    """The interface of objects that can be put into a checkpoint next to model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; tensors in it are loaded in place."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


Extras = Mapping[str, Stateful]


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Flatten nested dicts to leaves by dotted key; returned with the path of each key.

    The path distinguishes `a.b` of {"a": {"b": ...}} from that of {"a.b": ...}. A dict whose keys are all text is
    walked into; everything else (a list, an empty dict, a dict with other keys or of another kind, except OrderedDict)
    is a leaf and stored in one piece.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in _leaves(state, ()):
        key = ".".join(path)
        check_keys([key])
        if key in leaves:
            raise ConfigurationError(f"two values of the state would be stored as {key}; rename one of them")
        leaves[key], paths[key] = value, path
    return leaves, paths


def unflatten(leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Rebuild nested dicts from leaves by path."""
    nested: dict[str, Any] = {}
    for path, value in leaves.items():
        set_element(nested, path, value)
    return nested


def _leaves(state: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in state.items():
        is_plain = isinstance(value, dict) and type(value) in (dict, OrderedDict)
        if is_plain and value and all(isinstance(inner, str) for inner in value):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


@dataclass(frozen=True)
class PipelinePlace:
    """The position of a rank in a pipeline; its model has it as `pipeline_place`.

    `number` is the pipeline's own, `names` are those of all its ranks. `copies` maps the local name of a parameter that
    repeats one of another rank to that one's: both are always equal, and their state is saved once.
    """

    index: int
    size: int
    number: int
    names: frozenset[str]
    copies: Mapping[str, str] = field(default_factory=dict)


def place_of(model: nn.Module) -> PipelinePlace:
    """Return this rank's position in a pipeline; a whole model has size 1 and no names."""
    for part in (model, getattr(model, "module", None)):
        found = getattr(part, "pipeline_place", None)
        if isinstance(found, PipelinePlace) and found.size > 1:
            return found
    return PipelinePlace(0, 1, 0, frozenset())


def original_name(model: nn.Module, name: str) -> str:
    """Return the original of a bare name that is a copy; else the name itself."""
    return place_of(model).copies.get(name, name)


def is_repeated(model: nn.Module, name: str) -> bool:
    """Return True if a bare name is a copy of a parameter of another rank."""
    return original_name(model, name) != name


def stored_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return the possible names of a bare name in a checkpoint, the best one first."""
    original = original_name(model, name)
    copies = [copy for copy, source in place_of(model).copies.items() if source == original]
    return tuple(dict.fromkeys((original, name, *copies)))


def groups_of_all(own: Groups, place: PipelinePlace, group: dist.ProcessGroup | None = None) -> Groups:
    """Gather the parameter groups of all stages, as one optimizer of the whole model would have them; collective."""
    by_index: dict[int, Groups] = {}
    for index, groups in gather_objects((place.index, own), group):
        by_index.setdefault(index, groups)
    return join_groups([by_index[index] for index in sorted(by_index)])


def join_groups(stages: Sequence[Groups]) -> Groups:
    """Join groups: by position if all stages have groups of the same options, else by their options."""

    def options(group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name != "params"}

    first = [options(group) for group in stages[0]]
    if all(alike([options(group) for group in groups], first) for groups in stages):
        rows: list[Groups] = [list(row) for row in zip(*stages, strict=True)]
    else:
        rows = []
        for group in (group for groups in stages for group in groups):
            row = next((row for row in rows if alike(options(row[0]), options(group))), None)
            if row is None:
                rows.append([group])
            else:
                row.append(group)
    return [{**row[0], "params": [name for group in row for name in group["params"]]} for row in rows]


def alike(a: Any, b: Any) -> bool:
    """Compare lists and dicts element by element, tensors and arrays as a whole, with their dtypes."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(alike(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)


def own_name(model: nn.Module, name: str) -> str:
    """Return the name of the model inside our wrapper."""
    return name.removeprefix(PREFIX) if hasattr(model, "install_optimized_model_weights") else name


def saved_name(model: nn.Module, name: str) -> str:
    """Return the checkpoint name of a parameter or buffer of `named_parameters()`, without a prefix."""
    names, own = getattr(model, "checkpoint_names", None), own_name(model, name)
    return own if names is None else str(names.saved(own))


def unwrapped(
    stored: Collection[str], known: Callable[[str], bool], first_guess: int = 0
) -> tuple[dict[str, str], int]:
    """Strip the `module.` prefixes that match most names; return stored names by stripped ones, and the count."""
    most = 0
    while stored and most < _MOST_WRAPPERS and all(name.startswith(PREFIX, most * len(PREFIX)) for name in stored):
        most += 1
    guesses = sorted(range(most + 1), key=lambda count: (count != first_guess, -count))
    best = max(guesses, key=lambda count: sum(known(name[count * len(PREFIX) :]) for name in stored))
    return {name[best * len(PREFIX) :]: name for name in stored}, best


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """Return True if a bare name of a checkpoint belongs to an expert or a pipeline stage of another rank."""
    names = getattr(model, "checkpoint_names", None)
    return name in place_of(model).names or (names is not None and names.held(name) is None)


def saved_view(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor, sharded as the parameter of a bare name, as a checkpoint has it; shares memory."""
    names: Any = getattr(model, "checkpoint_names", None)
    return tensor if names is None else names.saved_view(name, tensor)


def listed_names(optimizer: torch.optim.Optimizer, model: nn.Module, own: Names) -> Names:
    """Return names by the numbers of `optimizer.state_dict()`, in groups; of all ranks if experts are divided."""
    names: Any = getattr(model, "checkpoint_names", None)
    return own if names is None else names.of_optimizer(optimizer) or own


def model_section(model: nn.Module) -> dict[str, Any]:
    """Return the model's state with one `module.` before each name, also of a model without a wrapper."""
    return {f"{PREFIX}{own_name(model, key)}": value for key, value in model.state_dict().items()}


def check_names(extra: Extras | None) -> None:
    """Raise for names of extras that a checkpoint would confuse with others."""
    for name in extra or {}:
        if name in RESERVED or not name or "." in name:
            raise ConfigurationError(
                f"extra has {name!r}; give names without dots other than {', '.join(sorted(RESERVED))}"
            )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))
