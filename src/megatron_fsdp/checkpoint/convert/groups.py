"""The parameter group of each parameter: from a map that the run has dumped, or by Megatron's default rule.

A `torch_dist` checkpoint keeps the groups without their members. A run calls `dump_param_to_param_group_map`, which
writes a DCP folder with one entry per parameter; `export_group_map_json` turns the folder into a JSON file: name ->
index into the groups of all optimizers. The rule is Megatron's default grouping, and it is only used if exactly one
group fits each parameter. A single group has everything that is optimised as a member.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.convert.names import canonical_name
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import is_repeated, own_name
from megatron_fsdp.checkpoint.report import decided_by_first, some_of, together
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.checkpoint.store import new_folder, replace_text
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.errors import CheckpointError, ConfigurationError

INFER, MAP, NO_GROUPS = "infer", "map", "none"
MAP_FILE = "param_to_param_group_map.json"


@dataclass(frozen=True)
class Parameter:
    """The properties of a parameter that decide its group: name (of both halves), dimensions per layer and expert."""

    name: str
    ndim: int
    has_state: bool

    @property
    def is_exempt(self) -> bool:
        """True if it may lack a group: routers' biases are not optimised."""
        return not self.has_state or self.name.endswith(".expert_bias")


@dataclass(frozen=True)
class Assignment:
    """The group index of every parameter that has one, and notes for the user."""

    group_of: Mapping[str, int]
    notes: tuple[str, ...] = ()


def assign(
    parameters: Iterable[Parameter],
    groups: Sequence[Mapping[str, Any]],
    how: str,
    written_map: Mapping[str, int] | None = None,
) -> Assignment:
    """Assign each parameter to a group; `how` is "infer", "map" or "none". One without a group is an error."""
    if how == NO_GROUPS:
        return Assignment({})
    if how == MAP:
        return _from_map(list(parameters), len(groups), written_map or {})
    if not groups:
        return Assignment({}, ("the checkpoint holds no parameter groups; none are written",))
    return Assignment({p.name: _only_fit(p, groups) for p in parameters if not p.is_exempt})


def _from_map(parameters: Sequence[Parameter], count: int, written_map: Mapping[str, int]) -> Assignment:
    outside = [f"{name} -> {index}" for name, index in written_map.items() if not 0 <= index < count]
    if outside:
        raise CheckpointError(f"the map names groups that the checkpoint lacks (it has {count}): {some_of(outside)}")
    by_name: dict[str, int] = {}
    apart = [name for name, i in written_map.items() if by_name.setdefault(canonical_name(name), i) != i]
    if apart:
        raise CheckpointError(f"the map puts one parameter into different groups under several names: {some_of(apart)}")
    known = {p.name: canonical_name(p.name) for p in parameters}
    found = {name: by_name[key] for name, key in known.items() if key in by_name}
    lacking = [p.name for p in parameters if p.name not in found and not p.is_exempt]
    if lacking:
        raise CheckpointError(
            f"the map has no group for {some_of(lacking)}; dump it again from the model of this checkpoint"
        )
    surplus = sorted(by_name.keys() - known.values())
    notes = (f"the map names what the checkpoint lacks: {some_of(surplus)}",) if surplus else ()
    return Assignment(found, notes)


def _only_fit(parameter: Parameter, groups: Sequence[Mapping[str, Any]]) -> int:
    if len(groups) == 1:
        return 0
    is_expert = ".experts." in parameter.name
    decays = parameter.ndim != 1 and not parameter.name.endswith(".bias")
    fitting = [
        index
        for index, group in enumerate(groups)
        if bool(group.get("is_expert_parallel", False)) == is_expert and bool(group.get("wd_mult", 1.0)) == decays
    ]
    if any(group.get("is_decoupled_lr", False) for group in groups):
        decoupled = parameter.name.startswith(("embedding.", "output_layer."))
        fitting = [i for i in fitting if bool(groups[i].get("is_decoupled_lr", False)) == decoupled]
    if len(fitting) != 1:
        count = "no parameter group fits" if not fitting else f"the parameter groups {fitting} all fit"
        raise CheckpointError(
            f"{count} {parameter.name} by Megatron's default rule (1-d tensors and biases do not decay, experts "
            "apart); give --param-to-param-group-map-json FILE, dumped by the run, or --groups none"
        )
    return fitting[0]


def group_map(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Map names of `named_parameters()` to the index of their group, counted on from one optimizer to the next.

    An optimizer's parameters that are not the model's are an error.
    """
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    groups = [group for each in optimizers for group in each.param_groups]
    index_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    named = dict(model.named_parameters())
    strangers = len(index_of.keys() - {id(param) for param in named.values()})
    if strangers:
        raise ConfigurationError(
            f"the optimizer holds {strangers} parameters that are not the model's, so their names are unknown; "
            "give the model that the optimizer was made for"
        )
    return {
        name: index_of[id(param)]
        for name, param in named.items()
        if id(param) in index_of and not is_repeated(model, own_name(model, name))
    }


def dump_param_to_param_group_map(
    model: nn.Module,
    optimizer: Any,
    folder: str | Path,
    *,
    global_name: Callable[[str], str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write each parameter's group index as a DCP folder; collective, the first rank writes.

    Args:
        model: Whole or sharded.
        optimizer: Of any kind; or a sequence of optimizers.
        folder: To write to; must not exist, or be empty.
        global_name: From a name on this rank to the name over all ranks, where ranks number layers or experts by
            themselves.
        group: The ranks.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder is in use or cannot be written, or ranks put a name into different groups.
    """
    folder = Path(folder)
    doing = f"dumping the parameter groups to {folder}"

    def own() -> dict[str, int]:
        found = group_map(model, optimizer)
        return {global_name(name): index for name, index in found.items()} if global_name else found

    def write() -> None:
        merged: dict[str, int] = {}
        differing = [n for each in everyone for n, index in each.items() if merged.setdefault(n, index) != index]
        if differing:
            raise CheckpointError(f"ranks put {some_of(differing)} into different parameter groups")
        with new_folder(folder) as temporary:
            save_alone(merged, checkpoint_id=temporary)

    everyone = gather_objects(together(doing, own, group), group)
    decided_by_first(write, doing, group)
    return folder


def export_group_map_json(
    folder: str | Path, out: str | Path | None = None, model_prefix: str = "model.module"
) -> Path:
    """Write the map of a DCP folder as a JSON file.

    Args:
        folder: Written by `dump_param_to_param_group_map`, or by Megatron's flag of that name.
        out: The file; None: `param_to_param_group_map.json` in the folder.
        model_prefix: The prefix of names instead of the `module.` of each wrapper.

    Returns:
        The file.

    Raises:
        CheckpointError: The folder cannot be read, or holds something else than a map.
    """
    folder = Path(folder)
    stored = read_group_map(folder)
    found = {re.sub(r"^(module\.)*", f"{model_prefix}.", name): index for name, index in stored.items()}
    path = Path(out) if out is not None else folder / MAP_FILE
    try:
        replace_text(path, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    return path


def read_group_map(folder: str | Path) -> dict[str, int]:
    """Read the map from a DCP folder, with the names as stored."""
    opened = CheckpointFolder(folder)
    odd = [key for key, entry in opened.tensors.items() if entry.shape]
    if odd:
        raise CheckpointError(f"{folder} holds tensors ({some_of(odd)}), so it is not a map of parameter groups")
    found = {key: opened.read_object(key) for key in opened.objects}
    return _checked(found | {key: opened.read_tensor(key) for key in opened.tensors}, str(folder))


def read_group_map_json(path: str | Path) -> dict[str, int]:
    """Read the map from a JSON file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the map of parameter groups from {path}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a JSON {type(found).__name__}; a map of parameter groups is an object")
    return _checked(found, str(path))


def _checked(found: Mapping[str, Any], where: str) -> dict[str, int]:
    values: dict[str, Any] = {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in found.items()}
    wrong = [f"{n}: {v!r}" for n, v in values.items() if not isinstance(v, int) or isinstance(v, bool) or v < 0]
    if wrong:
        raise CheckpointError(
            f"{where} is not a map of parameter groups, whose values count from 0: {some_of(wrong, 3)}"
        )
    return values
