"""Load a checkpoint into a live model, optimizer and whatever else was saved with them, on any ranks."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_fsdp.checkpoint import optimizer_state, rng
from megatron_fsdp.checkpoint.archive import load_object
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.live_state import ITERATION, OPTIMIZER, Extras, check_names, device_of
from megatron_fsdp.checkpoint.manifest import Manifest
from megatron_fsdp.checkpoint.matching import (
    ExtraMatch,
    Match,
    OptimizerMatch,
    asked_sections,
    match_extra,
    match_model,
    match_optimizer,
    note_left_out,
)
from megatron_fsdp.checkpoint.naming import place_of, unflatten
from megatron_fsdp.checkpoint.optimizer_state import as_extra
from megatron_fsdp.checkpoint.report import LoadReport, report_of_all
from megatron_fsdp.checkpoint.verify import require_sound
from megatron_fsdp.comm.agreement import rank_of, together, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError


class SafeReader(FileSystemReader):
    """Reads a checked folder; each chunk once, however many pieces of it are wanted, and one at a time.

    Args:
        folder: Opened, and so checked.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        super().__init__(folder.path)
        self._folder = folder
        self._chunk_of = {
            (key, chunk.box.offsets): which
            for key, entry in folder.tensors.items()
            for which, chunk in enumerate(entry.chunks)
            if chunk.box.numel or not entry.numel
        }

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the metadata that the folder has read and checked already."""
        found = self._folder.metadata
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan wants, file by file in the order of bytes.

        Raises:
            CheckpointError: Bytes are damaged or ask for code; names key and file.
        """
        wanted: dict[tuple[str, int, str, int], list[ReadItem]] = {}
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                place, which = self._folder.objects[key].span, 0
            else:
                which = self._chunk_of[key, tuple(item.storage_index.offset or ())]
                place = self._folder.tensors[key].chunks[which].span
            wanted.setdefault((place.file, place.offset, key, which), []).append(item)
        with self._folder.kept_open():
            for (*_, which), items in sorted(wanted.items(), key=lambda entry: entry[0]):
                self._read_one(which, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_one(self, which: int, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        key = items[0].storage_index.fqn
        if items[0].type is LoadItemType.BYTE_IO:
            for item in items:
                planner.load_bytes(item, io.BytesIO(self._folder.read_bytes(key)))
            return
        chunk = self._folder.read_chunk(key, which)  # checks shape and dtype
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(_narrowed(chunk, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's load planner, with objects read as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object into the state dict.

        Raises:
            CheckpointError: It is damaged or asks for code.
        """
        key = read_item.dest_index.fqn
        found = load_object(value.getvalue(), key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found


def _narrowed(chunk: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a box of a chunk; raises where `copy_` would broadcast instead."""
    for dim, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
        chunk = chunk.narrow(dim, first, length)
    return chunk


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


def read_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Extras | None = None,
    with_rng: bool = True,
    strict: bool = True,
    verify: bool | None = None,
    view: Callable[[CheckpointFolder], CheckpointFolder] | None = None,
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
) -> LoadReport:
    """Load one checkpoint folder, with the arguments, the result and the errors of `load_checkpoint`; collective.

    `facts` is what else must be equal on all ranks, by name.
    """
    doing = f"loading {folder}"
    notes: list[str] = []

    def prepare() -> tuple[_Plan, LoadReport, dict[str, Any], rng.RandomStates | None]:
        stored = CheckpointFolder(folder)
        plan = _plan(stored if view is None else view(stored), model, optimizer, extra or {})
        report = plan.match.report(plan.iteration)
        if strict:
            report.require_complete(str(folder))
        if verify or (verify is None and Manifest.read(stored.path) is not None):
            unread = {*({OPTIMIZER} if optimizer is None else ()), *(() if with_rng else {rng.SECTION})}
            without = () if verify else unread
            notes.append(require_sound(stored, rank_of(group), world_size_of(group), without))
        objects = {key: plan.folder.read_object(key) for key in plan.match.objects}
        return plan, report, objects, _random_states(plan.folder, model, group) if with_rng else None

    def install() -> None:
        _install(plan, objects, model, optimizer)
        if with_rng:
            notes.append(_restore_rng(random_states))

    compares = "where there is a manifest" if verify is None else str(bool(verify))
    asked = {"strict": str(bool(strict)), "verify": compares} | facts_of(optimizer, extra, with_rng)
    plan, report, objects, random_states = together(doing, prepare, group, {**(facts or {}), **asked})
    together(doing, lambda: _telling("a part of it is in memory now: load a whole one", lambda: _read(plan)), group)
    together(doing, lambda: _telling("its weights are in memory now: load a whole one", install), group)
    report = replace(report, notes=(*report.notes, *notes))
    return report if place_of(model) is None else report_of_all(report, group)


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
        found = match_optimizer(match, opened, names, optimizer, model)
        try:
            options = optimizer_state.merged_options(names, optimizer.param_groups, found.options)
        except ConfigurationError as error:
            raise CheckpointError(f"{opened.path}: {error}") from error
    extras = tuple(match_extra(match, opened, (name,), as_extra(target)) for name, target in extra.items())
    note_left_out(match, opened, asked_sections(optimizer), extra)
    _note_dtypes(match, opened)
    return _Plan(opened, match, names, found, options, (*states, *extras), _iteration(opened))


def _telling(what_is_left: str, act: Callable[[], None]) -> None:
    """Add what could not be undone to an error of `act`."""
    try:
        act()
    except Exception as error:
        raise CheckpointError(f"{error} ({what_is_left})") from error


def _iteration(folder: CheckpointFolder) -> int | None:
    found = folder.read_object(ITERATION) if ITERATION in folder.objects else None
    return found if type(found) is int else None


def _note_dtypes(match: Match, folder: CheckpointFolder) -> None:
    cast = [key for key, target in match.tensors.items() if folder.tensors[key].dtype != target.dtype]
    if cast:
        first = cast[0]
        match.notes.append(
            f"{len(cast)} tensors were cast, as {first} from {folder.tensors[first].dtype} to "
            f"{match.tensors[first].dtype}"
        )


def _read(plan: _Plan) -> None:
    """Read the chunks that this rank holds a part of; no communication."""
    reader, planner = SafeReader(plan.folder), SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = plan.folder.metadata
    with torch.no_grad():
        planner.state_dict = dict(plan.match.tensors)
        local = create_default_local_load_plan(planner.state_dict, metadata, True)
        reader.set_up_storage_reader(metadata, False)
        reader.read_data(local, planner).wait()


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
        if extra.is_absent:
            continue  # reported as missing; the object stays as it is
        if extra.root_key is not None:
            extra.target.load_state_dict(objects[extra.root_key])
            continue
        found = {**extra.tensors, **{path: objects[key] for path, key in extra.objects.items()}}
        paths = {".".join(path): path for path in extra.order if path in found}
        extra.target.load_state_dict(unflatten({key: found[path] for key, path in paths.items()}, paths))


def _random_states(
    folder: CheckpointFolder, model: nn.Module, group: dist.ProcessGroup | None
) -> rng.RandomStates | None:
    """Read and test the random states to restore last, so that damage changes nothing."""
    keys = [key for key in folder.objects if key.startswith(f"{rng.SECTION}.")]
    if f"{rng.SECTION}.topology" not in keys:
        return None
    place = rng.logical_rank_of(model, group)
    same = folder.read_object(f"{rng.SECTION}.topology") == place.topology
    wanted = [key for key in keys if not same or key.endswith((".topology", f".{place.key}.states"))]
    return rng.prepare({key: folder.read_object(key) for key in wanted}, place, device_of(model))


def _restore_rng(states: rng.RandomStates | None) -> str:
    if states is None:
        return "random states: none that this library has saved, so the streams go on as they are"
    rng.restore(states)
    return states.told
