"""Write weight files: which rank writes which file, and how its elements come there, a portion at a time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fsdp.checkpoint.folder import BoxIndex
from megatron_fsdp.checkpoint.hf.file_tensors import FileTensor
from megatron_fsdp.checkpoint.hf.files import PORTION_BYTES, FileLayout, StoredTensor, lay_out_file, portions
from megatron_fsdp.checkpoint.hf.live import LiveTensor, Piece
from megatron_fsdp.checkpoint.new_folder import new_shared_folder
from megatron_fsdp.checkpoint.store import FileOps
from megatron_fsdp.checkpoint.verify import share_out
from megatron_fsdp.comm.agreement import (
    decided_by_first,
    gather_objects,
    raise_together,
    rank_of,
    together,
    world_size_of,
)
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

Naming = Callable[[Mapping[str, tuple[int, ...]]], dict[str, FileTensor]]

Portion = tuple[StoredTensor, Box]
"""Consecutive elements of a tensor in a file."""

_ROUNDS_BETWEEN_CHECKS = 16


# ---- which file holds what -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How a model is split into files; a larger tensor has one of its own, and several are numbered.

    The dtype is that of all floating-point tensors; None: as they are.
    """

    max_bytes: int
    single_name: str
    dtype: torch.dtype | None = None


def lay_out_files(tensors: Mapping[str, FileTensor], dtypes: Mapping[str, torch.dtype], cut: Cut) -> list[FileLayout]:
    """Assign tensors to files in their order, as many to each as fit.

    Returns:
        At least one file.
    """
    files: list[list[tuple[str, torch.dtype, Sequence[int]]]] = [[]]
    filled = 0
    for key, tensor in tensors.items():
        dtype = _stored_dtype(key, {dtypes[name] for name in tensor.names}, cut.dtype)
        size = math.prod(tensor.shape) * dtype.itemsize
        if files[-1] and filled + size > cut.max_bytes:
            files.append([])
            filled = 0
        files[-1].append((key, dtype, tensor.shape))
        filled += size
    if len(files) == 1:
        return [lay_out_file(cut.single_name, files[0])]
    stem = cut.single_name.removesuffix(".safetensors")
    return [
        lay_out_file(f"{stem}-{i:05d}-of-{len(files):05d}.safetensors", inside) for i, inside in enumerate(files, 1)
    ]


def _stored_dtype(key: str, found: set[torch.dtype], wanted: torch.dtype | None) -> torch.dtype:
    if len(found) != 1:
        raise CheckpointError(f"{key} would be made of tensors of several dtypes: {sorted(map(str, found))}")
    (own,) = found
    return wanted if wanted is not None and own.is_floating_point else own


def portions_of(files: Sequence[FileLayout], max_bytes: int = PORTION_BYTES) -> Iterator[Portion]:
    """Yield all elements of files in stored order, at most `max_bytes` (or one element) at once."""
    for file in files:
        for stored in file.tensors:
            for box in portions(Box((0,) * len(stored.shape), stored.shape), stored.dtype.itemsize, max_bytes):
                if box.numel:
                    yield stored, box


# ---- which rank holds what -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """One main weight and the ranks that hold each of its boxes, which cover it once.

    Of a tensor that is not shared out (no DTensor) the first rank's is taken.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: Mapping[Box, tuple[int, ...]]
    is_shared_out: bool

    @functools.cached_property
    def boxes(self) -> list[Box]:
        """The boxes in an order that all ranks agree on."""
        return sorted(self.holders, key=lambda box: (box.offsets, box.lengths))

    @functools.cached_property
    def index(self) -> BoxIndex:
        """Where they lie: a fused weight of experts on many ranks has thousands, and is asked for expert by expert."""
        return BoxIndex(self.boxes)

    def source_of(self, box: Box, wanted_by: int) -> int:
        """Choose the rank that sends a box: the receiver itself if it holds it, else holders take turns."""
        ranks = self.holders[box]
        if not self.is_shared_out:
            return ranks[0]
        return wanted_by if wanted_by in ranks else ranks[wanted_by % len(ranks)]


def gather_catalog(
    live: Sequence[LiveTensor], pieces: Mapping[str, Sequence[Piece]], group: dist.ProcessGroup | None
) -> dict[str, Held]:
    """Gather the tensors of all ranks' models by name; one collective."""
    mine = []
    for tensor in live:
        boxes = [box for box, _ in pieces[tensor.name]] if tensor.is_saved_here else []
        mine.append((tensor.name, (tensor.shape, tensor.dtype, tensor.is_shared_out), boxes))
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
    holders: dict[str, dict[Box, tuple[int, ...]]] = {}
    for rank, theirs in enumerate(gather_objects(mine, group)):
        for name, kind, boxes in theirs:
            shape, dtype, _ = first = kinds.setdefault(name, kind)
            if kind != first:
                raise CheckpointError(
                    f"{name} is {kind[0]} {kind[1]} on rank {rank}, and {shape} {dtype} on one before it; all ranks "
                    "have to save the same model"
                )
            of_name = holders.setdefault(name, {})
            of_name.update({box: (*of_name.get(box, ()), rank) for box in boxes})
    for name, (shape, *_) in kinds.items():
        numel, held = math.prod(shape), sum(box.numel for box in holders[name])
        if held != numel:
            raise CheckpointError(
                f"the ranks hold {held} elements of {name}, which has {numel}; all ranks that share the model have to "
                "take part (see the argument group), and each has to have another part or the same one"
            )
    return {name: Held(shape, dtype, holders[name], shared) for name, (shape, dtype, shared) in kinds.items()}


def save_files(
    live: Sequence[LiveTensor],
    naming: Naming,
    cut: Cut,
    folder: Path,
    write_the_rest: Callable[[Path, Sequence[FileLayout]], None],
    group: dist.ProcessGroup | None,
) -> None:
    """Write tensors of a model, and what else belongs to them, into a new folder; collective.

    Args:
        live: What to save of this rank's model.
        naming: From shapes by name to file tensors by key.
        cut: How to cut it into files.
        folder: Not there yet, or empty; seen by all ranks.
        write_the_rest: Called on the first rank with the temporary folder and the weight files that will be in it.
        group: The ranks.

    Raises:
        CheckpointError: Something cannot be saved or written; on every rank, and nothing is left of it.
    """
    doing = f"preparing to save {folder}"
    pieces = together(doing, lambda: {tensor.name: tensor.pieces() for tensor in live}, group)
    catalog = gather_catalog(live, pieces, group)

    def lay_out() -> tuple[dict[str, FileTensor], list[FileLayout]]:
        if not catalog:
            raise CheckpointError("there is nothing to save: the model has no such tensors")
        tensors = naming({name: held.shape for name, held in catalog.items()})
        return tensors, lay_out_files(tensors, {name: held.dtype for name, held in catalog.items()}, cut)

    tensors, files = together(doing, lay_out, group)
    exchange = Exchange(tensors, catalog, pieces, _wire_device(live, group), group)
    with new_shared_folder(folder, {file.name: file.nbytes for file in files}, group) as temporary:
        decided_by_first(lambda: write_the_rest(temporary, files), f"saving to {folder}", group)
        write_files(exchange, files, temporary)


# ---- bringing elements to the rank that writes them ------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """Elements that a rank sends for a portion: `box` out of the one that it holds, to a place in the portion."""

    source: int
    name: str
    held: Box
    box: Box
    place: Box


def moves_of(target: Box, tensor: FileTensor, catalog: Mapping[str, Held], writer: int) -> Iterator[Move]:
    """Yield all elements of a portion with their sources, in an order that all ranks agree on."""
    for part in tensor.parts:
        wanted = target.meet(part.file_box)
        if wanted is None:
            continue
        held, in_model = catalog[part.name], part.to_model(wanted)
        for at, common in held.index.meeting(in_model):
            box = held.boxes[at]
            yield Move(held.source_of(box, writer), part.name, box, common, part.to_file(common).inside(target))


def write_files(
    exchange: Exchange, files: Sequence[FileLayout], folder: Path, portion_bytes: int = PORTION_BYTES
) -> None:
    """Write all files, each by one rank; collective.

    Memory beyond the model: on a writing rank two portions, and on every rank what it gives to the writers at once.
    """
    group = exchange.group
    rank, ranks = rank_of(group), world_size_of(group)
    sizes = [file.nbytes for file in files]
    shared = [[files[at] for at in share_out(sizes, writer, ranks)] for writer in range(ranks)]
    writer, doing = FileWriter(folder, shared[rank]), f"writing {folder}"
    for index, wanted in enumerate(itertools.zip_longest(*(portions_of(own, portion_bytes) for own in shared)), 1):
        values = exchange.bring(wanted)
        if values is not None:
            writer.append(wanted[rank][0].file, values)
        if index % _ROUNDS_BETWEEN_CHECKS == 0:
            raise_together(writer.problem, doing, group)
    writer.finish()
    raise_together(writer.problem, doing, group)


@dataclass(frozen=True)
class Exchange:
    """Brings elements to the ranks that write them: parts of file tensors, who holds what, and what this rank holds."""

    tensors: Mapping[str, FileTensor]
    catalog: Mapping[str, Held]
    pieces: Mapping[str, Sequence[Piece]]
    device: torch.device
    group: dist.ProcessGroup | None

    def bring(self, wanted: Sequence[Portion | None]) -> torch.Tensor | None:
        """Return the values of this rank's portion among those of all ranks, None if it has none; collective."""
        moves = [list(self._moves(portion, writer)) for writer, portion in enumerate(wanted)]
        given = [self._given(portion, of_writer) for portion, of_writer in zip(wanted, moves, strict=True)]
        rank = rank_of(self.group)
        arriving = sorted(moves[rank], key=lambda move: move.source)  # as all_to_all orders them
        mine = wanted[rank]
        received = self._all_to_all(given, arriving, 0 if mine is None else mine[0].dtype.itemsize)
        return None if mine is None else _put_together(mine, arriving, received)

    def _moves(self, portion: Portion | None, writer: int) -> Iterator[Move]:
        if portion is not None:
            yield from moves_of(portion[1], self.tensors[portion[0].key], self.catalog, writer)

    def _given(self, portion: Portion | None, moves: Sequence[Move]) -> torch.Tensor:
        """Return what this rank sends to one writer, as bytes."""
        flat, rank = [torch.empty(0, dtype=torch.uint8, device=self.device)], rank_of(self.group)
        for move in moves:
            if portion is not None and move.source == rank:
                held = next(view for box, view in self.pieces[move.name] if box == move.held)
                values = held[move.box.inside(move.held).indices].to(portion[0].dtype)
                flat.append(values.reshape(-1).view(torch.uint8).to(self.device))
        return torch.cat(flat)

    def _all_to_all(self, given: Sequence[torch.Tensor], arriving: Sequence[Move], itemsize: int) -> torch.Tensor:
        """Send its bytes to each rank; return those that arrive for this rank's portion, on the CPU."""
        if len(given) == 1:
            return given[0].cpu()
        sizes = [0] * len(given)
        for move in arriving:
            sizes[move.source] += move.box.numel * itemsize
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        lengths = [part.numel() for part in given]
        dist.all_to_all_single(received, torch.cat(list(given)), sizes, lengths, group=self.group)
        return received.cpu()


def _put_together(portion: Portion, arriving: Sequence[Move], received: torch.Tensor) -> torch.Tensor:
    stored, box = portion
    made = torch.empty(box.lengths, dtype=stored.dtype)
    pieces = received.view(stored.dtype).split([move.box.numel for move in arriving])
    for move, values in zip(arriving, pieces, strict=True):
        made[move.place.indices] = values.view(move.place.lengths)
    return made


def _wire_device(live: Sequence[LiveTensor], group: dist.ProcessGroup | None) -> torch.device:
    """Return the device to communicate on: the elements' own, or the CPU where its backend is gloo."""
    device = next((tensor.tensor.device for tensor in live), torch.device("cpu"))
    if not dist.is_initialized() or device.type == "cpu":
        return torch.device("cpu")
    backends = dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
    return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else device


class FileWriter:
    """Appends to files of one rank, in the order of their layouts; after a `problem` it writes no more.

    Ranks that exchange elements go on until all of them look at it.
    """

    def __init__(self, folder: Path, files: Sequence[FileLayout]) -> None:
        self.problem: OSError | None = None
        self._folder = folder
        self._files = files
        for layout in files:
            self._attempt((folder / layout.name).write_bytes, layout.head)

    def append(self, name: str, values: torch.Tensor) -> None:
        """Append values to the named file."""
        self._attempt(self._append, name, values.view(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Force the files to the disk: those of another machine only that machine can."""
        for layout in self._files:
            self._attempt(FileOps().sync, self._folder / layout.name)

    def _append(self, name: str, values: memoryview) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(values)

    def _attempt(self, act: Callable[..., object], *args: object) -> None:
        if self.problem is None:
            try:
                act(*args)
            except OSError as error:
                self.problem = error
