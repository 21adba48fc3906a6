"""Load a checkpoint into a live model, optimizer and whatever else was saved with them, on any ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from megatron_fsdp.checkpoint import optimizer_state, rng
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.matching import (
    ExtraMatch,
    Match,
    OptimizerMatch,
    match_extra,
    match_model,
    note_left_out,
)
from megatron_fsdp.checkpoint.naming import (
    ITERATION,
    MODEL,
    OPTIMIZER,
    RNG,
    Extras,
    check_names,
    device_of,
    place_of,
)
from megatron_fsdp.checkpoint.optimizer_state import as_extra
from megatron_fsdp.checkpoint.ranks import together
from megatron_fsdp.checkpoint.report import LoadReport, report_of_all
from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.checkpoint.verify import require_sound
from megatron_fsdp.comm.agreement import rank_of, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class _Plan:
    """Everything that is decided before the first tensor is read."""

    folder: CheckpointFolder
    match: Match
    names: list[list[str]]
    optimizer: OptimizerMatch | None
    options: list[dict[str, Any]]
    extras: tuple[ExtraMatch, ...]
    iteration: int | None


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

    Names, shapes and files are compared first, on every rank, and nothing is touched unless all ranks can go on. Any
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
        What was loaded and what was not.

    Raises:
        CheckpointError: The checkpoint is no checkpoint, incomplete, damaged or (with `strict`) another model's; the
            same on every rank. Nothing was changed, unless the message says otherwise.
        ConfigurationError: The arguments do not belong together, or ranks give different ones.
    """
    folder = CheckpointStore(root, group=group).resolve_or_itself(iteration)
    doing = f"loading {folder}"
    notes: list[str] = []

    def prepare() -> tuple[_Plan, LoadReport, dict[str, Any], Callable[[], None]]:
        stored = CheckpointFolder(folder)
        plan = _plan(stored if view is None else view(stored), model, optimizer, extra or {})
        report = plan.match.report(plan.iteration)
        if strict:
            report.require_complete(str(folder))
        if verify or (verify is None and stored.manifest is not None):
            unread = {*({OPTIMIZER} if optimizer is None else ()), *(() if with_rng else {RNG})}
            without = () if verify else unread
            notes.append(require_sound(stored, rank_of(group), world_size_of(group), without))
        objects = {key: plan.folder.read_object(key) for key in plan.match.objects}
        if not with_rng:
            return plan, report, objects, lambda: None
        restore_rng, told = _random_states(plan.folder, model, group)
        notes.append(f"random states: {told}")
        return plan, report, objects, restore_rng

    def install() -> None:
        _install(plan, objects, model, optimizer)
        restore_rng()

    compares = "where there is a manifest" if verify is None else str(bool(verify))
    asked = {"iteration": repr(iteration), "strict": str(bool(strict)), "verify": compares}
    asked |= facts_of(optimizer, extra, with_rng)
    plan, report, objects, restore_rng = together(doing, prepare, group, asked)
    together(doing, lambda: _telling("a part of it is in memory now: load a whole one", lambda: _read(plan)), group)
    together(doing, lambda: _telling("its weights are in memory now: load a whole one", install), group)
    report = replace(report, notes=(*report.notes, *notes))
    return report if place_of(model).size == 1 else report_of_all(report, group)


def facts_of(optimizer: torch.optim.Optimizer | None, extra: Extras | None, with_rng: bool) -> dict[str, str]:
    """Return the arguments that must be equal on all ranks when they save or load, in words; raises nothing."""
    count = len(extra) if isinstance(extra, Mapping) else 0  # names may be those of a rank, numbers of them not
    return {
        "optimizer": "None" if optimizer is None else "given",
        "extra": f"{count} names" if count else "empty",
        "with_rng": str(bool(with_rng)),
    }


def _plan(opened: CheckpointFolder, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Extras) -> _Plan:
    check_names(extra)
    if not getattr(model, "is_param_fsdp_distributed", True):
        raise ConfigurationError(
            "the model shows full parameters at the moment, whose values are dropped afterwards; load outside of "
            "full_parameters_context(), forward and backward"
        )
    match = Match()
    states = match_model(match, opened, model)
    names: list[list[str]] = []
    found, options = None, []
    if optimizer is not None:
        names = optimizer_state.named_parameters_of(optimizer, model)
        found = OptimizerMatch(match, opened, names, optimizer, model)
        try:
            options = optimizer_state.merged_options(names, optimizer.param_groups, found.options)
        except ConfigurationError as error:
            raise CheckpointError(f"{opened.path}: {error}") from error
    extras = tuple(match_extra(match, opened, (name,), as_extra(target)) for name, target in extra.items())
    note_left_out(match, opened, {MODEL, *([] if optimizer is None else [OPTIMIZER]), *extra})
    _note_dtypes(match, opened)
    iteration = opened.read_object(ITERATION) if ITERATION in opened.objects else None
    return _Plan(
        opened, match, names, found, options, (*states, *extras), iteration if type(iteration) is int else None
    )


def _telling(what_is_left: str, act: Callable[[], None]) -> None:
    """Add what could not be undone to an error of `act`."""
    try:
        act()
    except Exception as error:
        raise CheckpointError(f"{error} ({what_is_left})") from error


def _note_dtypes(match: Match, folder: CheckpointFolder) -> None:
    cast = [key for key, target in match.tensors.items() if folder.tensors[key].dtype != target.dtype]
    if cast:
        first = cast[0]
        match.notes.append(
            f"{len(cast)} tensors were cast, as {first} from {folder.tensors[first].dtype} to "
            f"{match.tensors[first].dtype}"
        )


def _read(plan: _Plan) -> None:
    """Read each chunk that this rank holds a part of once, file by file; no communication.

    torch's planner says which parts those are. Its reader is not used: it reads a chunk as often as parts of it are
    wanted, and believes what a file says of itself.
    """
    folder, targets = plan.folder, plan.match.tensors
    chunk_of = {
        (key, chunk.box.offsets): which
        for key in targets
        for which, chunk in enumerate(folder.tensors[key].chunks)
        if chunk.box.numel or not folder.tensors[key].numel
    }
    wanted: dict[tuple[str, int, str, int], list[ReadItem]] = defaultdict(list)
    for item in create_default_local_load_plan(targets, folder.metadata, True).items:
        key = item.storage_index.fqn
        which = chunk_of[key, tuple(item.storage_index.offset or ())]
        span = folder.tensors[key].chunks[which].span
        wanted[span.file, span.offset, key, which].append(item)
    with torch.no_grad(), folder.kept_open():
        for place in sorted(wanted):
            _copy(folder.read_chunk(*place[2:]), targets, wanted[place])


def _copy(chunk: torch.Tensor, targets: dict[str, Any], items: Sequence[ReadItem]) -> None:
    """Copy parts of a chunk to where they belong."""
    for item in items:
        target = find_state_dict_object(targets, item.dest_index).detach()
        part = narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths)
        narrow_tensor_by_index(target, item.dest_offsets, item.lengths).copy_(part)


def _install(
    plan: _Plan, objects: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    install_weights = getattr(model, "install_optimized_model_weights", None)
    if install_weights is not None:
        install_weights()
    if optimizer is not None and plan.optimizer is not None:
        rest = {name: objects[key] for name, key in plan.optimizer.rest.items()}
        state, kept = plan.optimizer.state(objects), plan.optimizer.kept
        optimizer_state.install(optimizer, plan.names, state, kept, plan.options, rest)
    for extra in plan.extras:
        extra.install(objects)


def _random_states(
    folder: CheckpointFolder, model: nn.Module, group: dist.ProcessGroup | None
) -> tuple[Callable[[], None], str]:
    """Read and test the random states to restore last, so that damage changes nothing."""
    keys = [key for key in folder.objects if key.startswith(f"{RNG}.")]
    if f"{RNG}.topology" not in keys:
        return lambda: None, "none that this library has saved, so the streams go on as they are"
    place = rng.logical_rank_of(model, group)
    same = folder.read_object(f"{RNG}.topology") == place.topology
    wanted = [key for key in keys if not same or key.endswith((".topology", f".{place.key}.states"))]
    return rng.prepare({key: folder.read_object(key) for key in wanted}, place, device_of(model))
