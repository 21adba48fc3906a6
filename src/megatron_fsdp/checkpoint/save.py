"""Write a state with torch.distributed.checkpoint, with a checksum of every global tensor as it is written.

Each rank sums over the chunks that it writes; the sums travel with the results that torch gathers anyway, and the rank
that writes the metadata adds them up and writes the manifest. No collective is added.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from megatron_fsdp.checkpoint import manifest
from megatron_fsdp.checkpoint.archive import load_object, write_archive
from megatron_fsdp.checkpoint.folder import METADATA
from megatron_fsdp.checkpoint.manifest import Manifest, TensorSeal, checksum_box, combine
from megatron_fsdp.checkpoint.naming import flatten
from megatron_fsdp.checkpoint.report import in_short
from megatron_fsdp.checkpoint.save_plan import BitPlan, LastPlan, Layouts, PlannedMetadata, Written
from megatron_fsdp.checkpoint.store import FileOps
from megatron_fsdp.comm.agreement import by_value, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError, text_of
from megatron_fsdp.package_info import __version__
from megatron_fsdp.sharding.shards import Box

SEAL = MetadataIndex("\0seal")

KeyPath = tuple[str | int, ...]
"""The place of an entry in the nested state dict: names in dicts and indices in lists (torch's `planner_data`)."""


def save_alone(state: Mapping[str, Any], **options: Any) -> None:
    """Save from this process alone, in a distributed run or not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save(dict(state), no_dist=True, **options)


class SealingPlanner(DefaultSavePlanner):
    """torch's save planner over a flat state; it takes checksums of the data for the writer.

    A state of sources has the keys of `paths`. Entries of several ranks are taken from the first of them.
    """

    def __init__(
        self,
        paths: Mapping[str, KeyPath] | None = None,
        layouts: Layouts | None = None,
        last: LastPlan | None = None,
    ) -> None:
        super().__init__(dedup_save_to_lowest_rank=paths is not None)
        self.layouts = layouts  # of all tensors, if every rank knows them
        self.sums: dict[str, int] = {}  # over the chunks of each tensor that this rank writes
        self.digests: dict[str, str] = {}  # SHA-256 of each object
        self._paths, self._last = paths, last or LastPlan()
        self._readable: set[str] = set()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 (torch gives it)
        is_coordinator: bool = False,
    ) -> None:
        """Flatten by the rule of `naming.flatten`."""
        leaves, paths = flatten(state_dict)
        self.state_dict, self.is_coordinator = leaves, is_coordinator
        self.mappings = dict(paths if self._paths is None else self._paths)

    def create_local_plan(self) -> SavePlan:
        """Plan all that this rank could write; a tensor that every rank knows takes one bit of the message."""
        if self.layouts is not None and self.layouts.are_as_before:
            return BitPlan([])
        plan = super().create_local_plan()
        if self.layouts is None:
            return plan
        known = self.layouts.keys
        self._own: dict[str, list[WriteItem]] = {key: [] for key in known}
        for item in plan.items:
            if item.index.fqn in known:
                self._own[item.index.fqn].append(item)
        objects = [item for item in plan.items if item.index.fqn not in known]
        paths = {item.index.fqn: self.mappings[item.index.fqn] for item in objects}
        bits = self.layouts.bits_of({key for key, items in self._own.items() if items})
        return BitPlan(objects, planner_data=paths, bits=bits)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the plans of all ranks, with the paths of every rank's keys."""
        if self.layouts is not None and self.layouts.are_as_before:
            assert self._last.metadata is not None, "the first rank made the last plan"
            return all_plans, self._last.metadata
        _require_alike(all_plans)
        paths: dict[str, KeyPath] = {}
        for plan in reversed(all_plans):
            paths |= plan.planner_data
        if self.layouts is None:
            # torch looks up each key in the paths of one rank after another, so those of the first are those of all.
            given = [replace(plan, planner_data={} if number else paths) for number, plan in enumerate(all_plans)]
            return super().create_global_plan(given)
        assignment = self.layouts.assign([plan.bits for plan in all_plans if isinstance(plan, BitPlan)])
        writers: dict[str, int] = {}  # of each object, the first rank that has it
        plans: list[SavePlan] = []
        for rank, (plan, bits) in enumerate(zip(all_plans, assignment.bits, strict=True)):
            items = [item for item in plan.items if writers.setdefault(item.index.fqn, rank) == rank]
            plans.append(BitPlan(items, bits=bits))
        planned = PlannedMetadata({key: BytesStorageMetadata() for key in writers}, paths)
        planned.assignment, self._last.metadata = assignment, planned
        return plans, planned

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Add the tensors that this rank writes."""
        if self.layouts is not None and isinstance(new_plan, BitPlan):
            if not self.layouts.are_as_before:
                items = [item for key in self.layouts.keys_of(new_plan.bits) for item in self._own[key]]
                self._last.own = replace(new_plan, items=[*new_plan.items, *items])
            assert self._last.own is not None, "ranks agree that they made the last plan"
            new_plan = replace(self._last.own, storage_data=new_plan.storage_data)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one item; a source is read now."""
        key, described = write_item.index.fqn, write_item.tensor_data
        source = self.state_dict[key]
        data: torch.Tensor | io.BytesIO
        if isinstance(source, TensorSource) and described is not None:
            data = source.read(Box(tuple(described.chunk.offsets), tuple(described.chunk.sizes)))
        else:
            data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            assert described is not None, "torch describes every tensor that it writes"
            part = checksum_box(data, described.chunk.offsets, described.size)
            self.sums[key] = combine((self.sums.get(key, 0), part))
            return data
        raw = data.getvalue()
        digest = self.digests[key] = hashlib.sha256(raw).hexdigest()
        if digest not in self._readable:
            try:
                load_object(raw, key)
            except CheckpointError as error:
                raise ConfigurationError(
                    f"{key} holds an object that could not be read back ({error}); store numbers, text, lists, dicts, "
                    "tensors or NumPy arrays instead"
                ) from error
            self._readable.add(digest)
        return data


class SealingWriter(FileSystemWriter):
    """torch's writer, which also writes the manifest (from its planner's sums), just before the metadata.

    One tensor is held at a time: torch's writer keeps to the end every one that it had to copy, such as views of a flat
    buffer. `progress` is called after each item with the bytes of tensors that this rank has written.
    """

    def __init__(self, folder: Path, progress: Callable[[int], None] | None = None) -> None:
        super().__init__(folder)
        self._progress = progress
        self.met: BaseException | None = None  # while this rank wrote

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file as `_write` does; an error goes to the other ranks as text, which can be sent."""
        try:
            return self._write(plan, planner)
        except BaseException as met:  # noqa: BLE001 - the other ranks must raise, too
            self.met = met
            raise CheckpointError(text_of(met)) from None

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if it has data, force it to the disk, and add its checksums."""
        results: list[WriteResult] = []
        extra: list[int] = []  # bytes of each tensor besides its elements
        first = written = 0
        if plan.items:
            name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            with (Path(self.path) / name).open("wb") as stream:
                for item in sorted(plan.items, key=lambda item: item.type is not WriteItemType.BYTE_IO):
                    offset, data = stream.tell(), planner.resolve_data(item)
                    if isinstance(data, torch.Tensor):
                        write_archive(_with_own_storage(data), stream)
                        first = first if extra else offset
                        extra.append(stream.tell() - offset - data.nbytes)
                        written += data.nbytes
                    else:
                        stream.write(data.getbuffer())
                    del data
                    length = stream.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
                    if self._progress is not None:
                        self._progress(written)
                stream.flush()
                os.fsync(stream.fileno())
        assert isinstance(planner, SealingPlanner)
        seal: Any = (planner.sums, planner.digests)
        if planner.layouts is not None:  # the first rank knows the keys and boxes
            short = np.array(extra, np.min_scalar_type(max(extra, default=0)))
            sums = np.array(list(planner.sums.values()), np.uint64)
            seal = (Written(first, short, sums), planner.digests)
            results = [found for found in results if found.index.fqn not in planner.layouts.keys]
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(SEAL, 0, seal)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest on one rank, then the metadata, whose presence marks a whole checkpoint."""
        seals: Any = [found.storage_data for of_rank in results for found in of_rank if found.index == SEAL]
        written = [[found for found in of_rank if found.index != SEAL] for of_rank in results]
        if isinstance(metadata, PlannedMetadata):
            files = FileOps()
            of_tensors = [found for found, _ in seals]
            known = zip(metadata.assignment.layouts.tensors, metadata.assignment.totals(of_tensors), strict=True)
            tensors = {
                each.key: TensorSeal(each.shape, str(each.properties.dtype), f"{total:016x}") for each, total in known
            }
            self._write_manifest(tensors, seals)
            metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()
            metadata.storage_data = {found.index: found.storage_data for of_rank in written for found in of_rank}
            names = [f"__{rank}_0{DEFAULT_SUFFIX}" for rank in range(len(seals))]
            partial = Path(self.path) / f"{METADATA}.tmp"
            with partial.open("wb") as stream:
                metadata.dump(names, of_tensors, stream)
            files.sync(partial)
            files.rename(partial, Path(self.path) / METADATA)
            return
        tensors = {}
        for key, found in metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                total = combine(sums.get(key, 0) for sums, _ in seals)
                tensors[key] = TensorSeal(tuple(found.size), str(found.properties.dtype), f"{total:016x}")
        self._write_manifest(tensors, seals)
        super().finish(metadata, written)

    def _write_manifest(self, tensors: Mapping[str, TensorSeal], seals: Sequence[Any]) -> None:
        objects = {key: digest for _, digests in seals for key, digest in digests.items()}
        facts = {"megatron_fsdp": __version__, "torch": str(torch.__version__), "ranks": len(seals)}
        FileOps().write_file(Path(self.path) / manifest.FILE_NAME, Manifest(tensors, objects, facts).to_json())


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with a storage of just its size: `torch.save` writes the whole storage."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _require_alike(plans: Sequence[SavePlan]) -> None:
    """Raise for keys whose global tensor or kind differs between ranks."""
    kinds: dict[str, set[tuple[torch.Size, torch.dtype] | None]] = defaultdict(set)
    for plan in plans:
        for item in plan.items:
            kinds[item.index.fqn].add(_kind(item))
    differing = [key for key, found in kinds.items() if len(found) > 1]
    if not differing:
        return
    key = differing[0]
    words = [
        sorted({f"{kind[1]} of shape {tuple(kind[0])}" if kind else "an object" for kind in map(_kind, items)})
        for items in ([item for item in plan.items if item.index.fqn == key] for plan in plans)
    ]
    told = by_value((rank, " and ".join(kinds) or "nothing") for rank, kinds in enumerate(words))
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    raise CheckpointError(
        f"{key}{more} is not the same on all ranks: {told}; of plain tensors one copy is stored, so keep what is "
        "sharded in a DTensor, as torch.zeros_like(param) makes it for a sharded param, or under a name for each rank"
    )


def _kind(item: WriteItem) -> tuple[torch.Size, torch.dtype] | None:
    described = item.tensor_data
    return None if described is None else (described.size, described.properties.dtype)


def write_state(
    state: Mapping[str, Any],
    folder: Path,
    group: dist.ProcessGroup | None = None,
    *,
    paths: Mapping[str, KeyPath] | None = None,
    progress: Callable[[int], None] | None = None,
    last: LastPlan | None = None,
) -> None:
    """Write a nested state with its manifest into a folder, which the caller makes and publishes; collective.

    Tensors that are not in memory are sources in the state, read when they are written. `paths` are the places of keys
    in the nested state if `state` is flat (empty: keys are not nested); boxes of several ranks are then the first
    rank's. `last` is that of the run, by which the next save of the same tensors and objects needs no plan.
    """
    if group is None and not dist.is_initialized():
        _require_whole(state)
    last = LastPlan() if last is None else last
    layouts = Layouts.agreed(state, group, last) if paths is None and world_size_of(group) > 1 else None
    last.facts = b""  # until the save is done on all ranks
    writer, planner = SealingWriter(folder, progress), SealingPlanner(paths, layouts, last)
    try:
        if world_size_of(group) == 1:
            save_alone(state, storage_writer=writer, planner=planner)
        else:
            save(dict(state), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        if writer.met is not None and not isinstance(writer.met, Exception):
            raise writer.met from error
        raise in_short(error, f"writing {folder}") from error
    last.facts = b"" if layouts is None else layouts.facts


# ---- entries that are read when they are written ---------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: its chunks here are the boxes, whose values `read` gives in its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[Box]
    read: Callable[[Box], torch.Tensor]

    def __create_write_items__(self, key: str, _object: object) -> Iterator[WriteItem]:
        """Describe the chunks to torch's planner."""
        for box in self.boxes:
            offsets, properties = torch.Size(box.offsets), TensorProperties(dtype=self.dtype)
            chunk = ChunkStorageMetadata(offsets, torch.Size(box.lengths))
            described = TensorWriteData(chunk, properties, torch.Size(self.shape))
            yield WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=described)


def _require_whole(state: Mapping[str, Any]) -> None:
    """Raise when one process saves other ranks' DTensors, as after torch.distributed was shut down."""
    for key, value in flatten(state)[0].items():
        if isinstance(value, DTensor) and value.device_mesh.size() > 1:
            raise CheckpointError(
                f"{key} is spread over {value.device_mesh.size()} ranks, and torch.distributed is not initialised (any "
                "more), so this process alone would save a part of it; save, and wait for saves in the background, "
                "before destroy_process_group()"
            )
