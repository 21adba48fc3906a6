"""The map from parameters to parameter groups: written by a training run, exported to JSON, read by the converter.

A run calls `dump_param_to_param_group_map`, which writes a DCP folder with one entry per parameter;
`export_group_map_json` turns the folder into a JSON file: name -> index into the groups of all optimizers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.convert.entries import listed
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import own_name
from megatron_fsdp.checkpoint.ranks import gather_objects, raise_together, rank_of
from megatron_fsdp.checkpoint.save_alone import save_alone
from megatron_fsdp.checkpoint.stages import is_repeated
from megatron_fsdp.errors import CheckpointError, ConfigurationError

MAP_FILE = "param_to_param_group_map.json"


def group_map(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Name -> index of the parameter group, for every parameter of a model that is optimised.

    Args:
        model: Whole or sharded; names are those of `named_parameters()`.
        optimizer: Anything with `param_groups`, or a sequence of such: groups count on from one to the next.

    Raises:
        ConfigurationError: The optimizer holds parameters that are not the model's.
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
    """Write which parameter group each parameter belongs to, as a DCP folder. Collective; the first rank writes.

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
    error: Exception | None = None
    mine: dict[str, int] = {}
    try:
        mine = group_map(model, optimizer)
        mine = {global_name(name): index for name, index in mine.items()} if global_name else mine
    except ConfigurationError as problem:
        error = problem
    raise_together(error, f"dumping the parameter groups to {folder}", group)
    everyone = gather_objects(mine, group)
    if rank_of(group) == 0:
        try:
            _write(_merge(everyone), folder)
        except (OSError, CheckpointError) as problem:
            error = problem
    raise_together(error, f"dumping the parameter groups to {folder}", group)
    return folder


def _merge(maps: Sequence[Mapping[str, int]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    differing = [name for each in maps for name, index in each.items() if merged.setdefault(name, index) != index]
    if differing:
        raise CheckpointError(f"ranks put {listed(differing)} into different parameter groups")
    return merged


def _write(merged: Mapping[str, int], folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder; give another one")
    save_alone(merged, checkpoint_id=folder)


def export_group_map_json(
    folder: str | Path, out: str | Path | None = None, model_prefix: str = "model.module"
) -> Path:
    """Write the map of a DCP folder as a JSON file.

    Args:
        folder: Written by `dump_param_to_param_group_map`, or by Megatron's flag of that name.
        out: The file; None: `param_to_param_group_map.json` in the folder.
        model_prefix: What stands before names instead of the `module.` of each wrapper.

    Returns:
        The file.

    Raises:
        CheckpointError: The folder cannot be read, or holds something else than a map.
    """
    folder = Path(folder)
    found = {f"{model_prefix}.{_unwrapped(name)}": index for name, index in read_group_map(folder).items()}
    path = Path(out) if out is not None else folder / MAP_FILE
    try:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    return path


def read_group_map(folder: str | Path) -> dict[str, int]:
    """The map of a DCP folder, with the names that stand in it.

    Raises:
        CheckpointError: The folder cannot be read, or holds something else than a map.
    """
    opened = CheckpointFolder(folder)
    found: dict[str, Any] = {key: opened.read_object(key) for key in opened.objects}
    found |= {key: opened.read_tensor(key).tolist() for key, entry in opened.tensors.items() if not entry.shape}
    odd = [key for key, entry in opened.tensors.items() if entry.shape]
    if odd:
        raise CheckpointError(f"{folder} holds tensors ({listed(odd)}), so it is not a map of parameter groups")
    return _checked(found, str(folder))


def read_group_map_json(path: str | Path) -> dict[str, int]:
    """The map of a JSON file.

    Raises:
        CheckpointError: It cannot be read, names a parameter twice, or holds something else than names with indices.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_named_once)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the map of parameter groups from {path}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a JSON {type(found).__name__}; a map of parameter groups is an object")
    return _checked(found, str(path))


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"names that stand there twice: {listed(twice)}")
    return found


def _checked(found: Mapping[str, Any], where: str) -> dict[str, int]:
    values: dict[str, Any] = {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in found.items()}
    wrong = [f"{n}: {v!r}" for n, v in values.items() if not isinstance(v, int) or isinstance(v, bool) or v < 0]
    if wrong:
        raise CheckpointError(
            f"{where} is not a map of parameter groups, whose values count from 0: {listed(wrong, 3)}"
        )
    return values


def _unwrapped(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
