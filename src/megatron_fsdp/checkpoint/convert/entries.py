"""The data of a conversion: tensors of the source, its common state, moves and values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict

from megatron_fsdp.errors import CheckpointError

PathParts = tuple[str | int, ...]
"""Path of a value in the nested dict that a loader requests; DCP joins it with dots to a key."""

_KEPT_WITH_WEIGHTS = (
    "args",
    "checkpoint_version",
    "iteration",
    "num_floating_point_operations_so_far",
    "content_metadata",
)
_DEFAULT_VERSION = 3.0
BUCKET_KINDS = ("dp_reshardable", "fully_sharded_bucket_space")
"""Names in checkpoints of the optimizer layouts that follow communication buckets."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the source, in its true shape (which old files do not store; see `Cells`)."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a source tensor that becomes a whole tensor of the output without arithmetic.

    Attributes:
        source: Key in the source.
        offsets: First index per axis of the source's true shape.
        lengths: Indices per axis; leading axes of length one are those that vanish.
        target: Key in the output.
        path: The same as nested steps.
        shape: In the output; as many elements as the box.
        dtype: Of both.
    """

    source: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: str
    path: PathParts
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Value:
    """Something small that is written as it is: an object, or a tensor without a source box.

    Attributes:
        target: Key in the output.
        path: The same as nested steps.
        value: An object for `torch.save`, or a tensor.
    """

    target: str
    path: PathParts
    value: Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key of the source that is not in the output, and why."""

    key: str
    why: str


def key_of(path: PathParts) -> str:
    """Join nested steps to a flat key, as DCP does."""
    return ".".join(map(str, path))


def listed(keys: Sequence[str], shown: int = 8) -> str:
    """Format keys for a message: the first few, and how many more."""
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return ", ".join(keys[:shown]) + more


def flatten(tree: Mapping[str, Any]) -> list[Value]:
    """List the leaves of a nested dict, flattened as by DCP: only lists of dicts or tensors are walked."""
    values: list[Value] = []
    traverse_state_dict(dict(tree), lambda path, value: values.append(Value(key_of(path), path, value)))
    return values


@dataclass(frozen=True)
class CommonState:
    """The common state, with what a conversion reads from it.

    Attributes:
        tree: The dict as it was read; classes that are not here stand as placeholders.
        groups: The parameter groups of all optimizers, in order, without their members.
        common_step: The optimizer's step where it stands outside the groups.
    """

    tree: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    common_step: float | None = None

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> CommonState:
        """Read the groups and the step from a common dict."""
        groups: list[Mapping[str, Any]] = []
        steps: list[float] = []
        _collect(tree.get("optimizer"), groups, steps)
        return cls(tree, tuple(groups), steps[0] if steps else None)

    def argument(self, name: str) -> Any:
        """Return `args.<name>`; None if the checkpoint does not have it."""
        args = self.tree.get("args")
        return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)

    @property
    def is_bucket_space(self) -> bool:
        """Whether the optimizer state is laid out by communication buckets, as the common state says."""
        said = self.tree.get("content_metadata")
        kinds = [said.get("distrib_optim_sharding_type")] if isinstance(said, Mapping) else []
        return any(kind in BUCKET_KINDS for kind in kinds)

    @property
    def is_fp32(self) -> bool:
        """Whether the run had no half-precision wrapper around its model, by its arguments."""
        return self.argument("bf16") is False and self.argument("fp16") is False

    def step_of(self, group: int | None) -> float | None:
        """Return the optimizer's step of a group; for None, the step that all groups share."""
        chosen = self.groups if group is None else (self.groups[group],)
        steps = {float(g["step"]) for g in chosen if isinstance(g.get("step"), int | float)}
        if len(steps) == 1:
            return steps.pop()
        return None if steps else self.common_step

    def output_tree(self, weights_only: bool, members: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        """Build the nested dict to write, parameter groups included."""
        tree = {key: value for key, value in self.tree.items() if key != "optimizer"}
        if weights_only:
            tree = {key: value for key, value in tree.items() if key in _KEPT_WITH_WEIGHTS}
        tree.setdefault("checkpoint_version", _DEFAULT_VERSION)
        if self.groups and not weights_only:
            groups = [{"params": list(members.get(i, ())), **group} for i, group in enumerate(self.groups)]
            tree["optimizer"] = {"param_groups": groups}
            scaler = _find(self.tree.get("optimizer"), "grad_scaler")
            tree |= {} if scaler is None else {"grad_scaler": scaler}
        return tree


def _collect(tree: Any, groups: list[Mapping[str, Any]], steps: list[float]) -> None:
    """Collect the parameter groups of one optimizer, of a wrapper of one, or of several (numbered)."""
    if not isinstance(tree, Mapping):
        return
    if "param_groups" in tree:
        found = tree["param_groups"]
        if not isinstance(found, Sequence) or not all(isinstance(group, Mapping) for group in found):
            raise CheckpointError("the optimizer's param_groups are not a list of dicts; the common state is damaged")
        groups += [{key: value for key, value in group.items() if key != "params"} for group in found]
        state = tree.get("state")
        step = state.get("common_step") if isinstance(state, Mapping) else None
        steps += [float(step)] if step is not None else []
    elif "optimizer" in tree:
        _collect(tree["optimizer"], groups, steps)
    else:
        for _, inner in _numbered(tree):
            _collect(inner, groups, steps)


def _numbered(tree: Mapping[Any, Any]) -> list[tuple[int, Any]]:
    return sorted((int(key), value) for key, value in tree.items() if str(key).isdigit())


def _find(tree: Any, name: str) -> Any:
    if not isinstance(tree, Mapping):
        return None
    if name in tree:
        return tree[name]
    places = [tree.get("optimizer"), *(inner for _, inner in _numbered(tree))]
    return next((found for place in places if (found := _find(place, name)) is not None), None)
