"""Load a checkpoint into a live model, optimizer and other saved objects, on any ranks.

Keys are matched with live tensors and objects completely, before anything is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint import naming, rng
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.match import Match, match_extra, match_model, path_of
from megatron_fsdp.checkpoint.naming import ITERATION, MODEL, OPTIMIZER, RNG, Extras
from megatron_fsdp.checkpoint.optimizer_state import OptimizerMatch, as_extra
from megatron_fsdp.checkpoint.report import LoadReport, check_group, report_of_all, together
from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.checkpoint.verify import require_sound
from megatron_fsdp.comm.agreement import agreed, group_of, rank_of, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError, words_of
from megatron_fsdp.sharding.shards import Box


@agreed("loading a checkpoint", group_of, CheckpointError)
def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    root: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    extra: Extras | None = None,
    with_rng: bool = True,
    strict: bool = True,
    verify: bool | None = None,
    view: Callable[[CheckpointFolder], CheckpointFolder] | None = None,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load one checkpoint; collective.

    Names, shapes and files are compared first, on every rank, and nothing changes unless all ranks can go on. Any
    number of ranks, strategy and mesh may have written it.

    Args:
        model: Sharded or not; its tensors are written in place.
        optimizer: None: the optimizer's part is left out. A fresh one gets its state, without a step being made.
        root: Folder of the run (then the latest is loaded), or of one checkpoint of torch.distributed.checkpoint.
        iteration: Which one of the run; None: the latest.
        extra: More to load, by the names under which it was saved.
        with_rng: Whether to bring back the random states (`rng.py` has the rule for other numbers of ranks).
        strict: Refuse a checkpoint that lacks something, has something more, or has other shapes; False loads what
            fits and reports the rest.
        verify: Compare everything with the manifest first; ranks share the work, which takes about as long as reading.
            None: where there is one, and without the sections that are not loaded.
        view: From the opened folder to one that shows its content under the names of the model; None: as it is.
        group: The ranks; None: all.

    Returns:
        The report on loaded and other keys.

    Raises:
        CheckpointError: The checkpoint is no checkpoint, incomplete, damaged or (with `strict`) another model's; the
            same on every rank. Nothing was changed, unless the message says otherwise.
        ConfigurationError: The arguments do not belong together, or ranks give different ones.
    """
    check_group(group)
    folder = CheckpointStore(root, group=group).resolve(iteration)
    doing = f"loading {folder}"
    notes: list[str] = []

    def prepare() -> tuple[Match, LoadReport, dict[str, Any], Callable[[], None]]:
        stored = CheckpointFolder(folder)
        match = _matched(stored if view is None else view(stored), model, optimizer, extra or {})
        report = match.report()
        if strict:
            report.require_complete(str(folder))
        if verify or (verify is None and stored.manifest is not None):
            unread = {*({OPTIMIZER} if optimizer is None else ()), *(() if with_rng else {RNG})}
            without = () if verify else unread
            notes.append(require_sound(stored, rank_of(group), world_size_of(group), without))
        objects = {key: match.folder.read_object(key) for key in match.objects}
        if not with_rng:
            return match, report, objects, lambda: None
        restore_rng, described = rng.prepare(match.folder, model, group)
        notes.append(f"random states: {described}")
        return match, report, objects, restore_rng

    def load_matched() -> None:
        install_weights = getattr(model, "install_optimized_model_weights", None)
        if install_weights is not None:
            install_weights()
        for loader in match.loaders:
            loader(objects)
        restore_rng()

    compares = "where there is a manifest" if verify is None else str(bool(verify))
    asked = {"iteration": repr(iteration), "strict": str(bool(strict)), "verify": compares}
    asked |= facts_of(optimizer, extra, with_rng)
    match, report, objects, restore_rng = together(doing, prepare, group, asked)
    together(doing, lambda: _noting("a part of it is in memory now: load a whole one", lambda: _read(match)), group)
    together(doing, lambda: _noting("its weights are in memory now: load a whole one", load_matched), group)
    report = replace(report, notes=(*report.notes, *notes))
    return report if naming.place_of(model).size == 1 else report_of_all(report, group)


def facts_of(optimizer: torch.optim.Optimizer | None, extra: Extras | None, with_rng: bool) -> dict[str, str]:
    """Return the arguments that must be equal on all ranks when they save or load, as text; raises nothing."""
    count = len(extra) if isinstance(extra, Mapping) else 0  # names may be those of a rank, numbers of them not
    return {
        "optimizer": "None" if optimizer is None else "given",
        "extra": f"{count} names" if count else "empty",
        "with_rng": str(bool(with_rng)),
    }


def _matched(
    folder: CheckpointFolder, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Extras
) -> Match:
    """Match all requested state with the stored entries."""
    naming.check_names(extra)
    if not getattr(model, "is_param_fsdp_distributed", True):
        raise ConfigurationError(
            "the model shows full parameters at the moment, whose values are dropped afterwards; load outside of "
            "full_parameters_context(), forward and backward"
        )
    match = Match(folder=folder)
    states = match_model(match, model)
    match.loaders += [] if optimizer is None else [OptimizerMatch(match, optimizer, model).load]
    match.loaders += states
    for name, target in extra.items():
        found = as_extra(target)
        blank = getattr(found, "blank", None)
        match.loaders.append(match_extra(match, (name,), found.state_dict(), found.load_state_dict, blank))
    asked = {MODEL, ITERATION, RNG, *([] if optimizer is None else [OPTIMIZER]), *extra}
    # No section has a dot in its name; a first part that has is a flat name.
    left = {path_of(folder, key)[0].partition(".")[0] for key in match.keys_below("")} - asked
    if left:
        match.notes.append(f"in the checkpoint and not asked for: {', '.join(sorted(left)[:12])}")
    cast = [key for key, target in match.tensors.items() if folder.tensors[key].dtype != target.dtype]
    if cast:
        described = f"{cast[0]} from {folder.tensors[cast[0]].dtype} to {match.tensors[cast[0]].dtype}"
        match.notes.append(f"{len(cast)} tensors were cast, as {described}")
    return match


def _noting(what_is_left: str, act: Callable[[], None]) -> None:
    """Run a step that is not rolled back; its error says which state it leaves."""
    try:
        act()
    except Exception as error:
        raise CheckpointError(f"{words_of(error)} ({what_is_left})") from error


def _read(match: Match) -> None:
    """Read this rank's part of each tensor, one stored chunk at a time; no communication.

    torch's reader is not used: it reads a chunk once per requested part, and trusts the file's own description.
    """
    folder, targets = match.folder, match.tensors
    with torch.no_grad(), folder.kept_open():
        for key, target in targets.items():
            if isinstance(target, DTensor) and target.device_mesh.get_coordinate() is None:
                continue
            for chunk in _create_chunk_list(target):
                held = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                view = find_state_dict_object(targets, MetadataIndex(key, chunk.offsets)).detach()
                for shared, values in folder.parts(key, held):
                    view[shared.inside(held).indices].copy_(values)
                    del values  # before the next one is read
