"""Carry out a save plan: elements travel to the rank that writes them, a bounded stretch at a time."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fsdp.checkpoint.agree import raise_together, rank_of, world_size_of
from megatron_fsdp.checkpoint.hf.catalog import Held
from megatron_fsdp.checkpoint.hf.live import Piece
from megatron_fsdp.checkpoint.hf.parts import FileTensor
from megatron_fsdp.checkpoint.hf.safetensors_format import FileLayout
from megatron_fsdp.checkpoint.hf.save_plan import Move, Stretch, moves_of, share_out_files, stretches_of
from megatron_fsdp.sharding.shards import Box

STRETCH_BYTES = 32 * 2**20
"""What one rank puts together and writes at once."""

_ROUNDS_BETWEEN_CHECKS = 16


@dataclass(frozen=True)
class Job:
    """What is written, and from what.

    Attributes:
        files: As they will be.
        tensors: The parts of each file tensor, by key.
        catalog: Who holds what.
        pieces: What this rank holds, by name.
        device: Where the pieces lie.
    """

    files: Sequence[FileLayout]
    tensors: Mapping[str, FileTensor]
    catalog: Mapping[str, Held]
    pieces: Mapping[str, Sequence[Piece]]
    device: torch.device


def write_files(
    job: Job, folder: Path, group: dist.ProcessGroup | None = None, stretch_bytes: int = STRETCH_BYTES
) -> None:
    """Write all files, each by one rank; collective.

    Memory beyond the model: on a writing rank two stretches, and on every rank what it gives to the writers at once.

    Args:
        job: What to write.
        folder: There already; the same for all ranks.
        group: The ranks.
        stretch_bytes: What a rank writes at once.

    Raises:
        CheckpointError: A rank could not write; on every rank.
    """
    shared = share_out_files(job.files, world_size_of(group))
    writer = _FileWriter(folder, shared[rank_of(group)])
    exchange = _Exchange(job, group)
    rounds = itertools.zip_longest(*(stretches_of(files, stretch_bytes) for files in shared))
    doing = f"writing {folder}"
    with writer:
        for index, stretches in enumerate(rounds):
            values = exchange.put_together(stretches)
            if values is not None:
                writer.write(stretches[rank_of(group)], values)
            if index % _ROUNDS_BETWEEN_CHECKS == _ROUNDS_BETWEEN_CHECKS - 1:
                raise_together(writer.problem, doing, group)
        writer.finish()
    raise_together(writer.problem, doing, group)


class _Exchange:
    """Brings the elements of each rank's stretch to it."""

    def __init__(self, job: Job, group: dist.ProcessGroup | None) -> None:
        self._job = job
        self._group = group
        self._rank = rank_of(group)
        self._num_ranks = world_size_of(group)
        self._device = _wire_device(job.device, group)

    def put_together(self, stretches: Sequence[Stretch | None]) -> bytearray | None:
        """The bytes of this rank's stretch; None if it has none. Collective.

        Args:
            stretches: Of every rank, in this round.
        """
        moves = [self._moves(stretch, writer) for writer, stretch in enumerate(stretches)]
        received: dict[int, torch.Tensor] = {}
        if any(move.source != writer for writer, of_writer in enumerate(moves) for move in of_writer):
            received = self._exchange(stretches, moves)
        stretch = stretches[self._rank]
        if stretch is None:
            return None
        return self._assemble(stretch, moves[self._rank], received)

    def _moves(self, stretch: Stretch | None, writer: int) -> list[Move]:
        if stretch is None:
            return []
        return list(moves_of(stretch, self._job.tensors[stretch.stored.key], self._job.catalog, writer))

    def _exchange(
        self, stretches: Sequence[Stretch | None], moves: Sequence[Sequence[Move]]
    ) -> dict[int, torch.Tensor]:
        """What other ranks give to this one's stretch, as flat elements by rank."""
        sent = [
            torch.empty(0, dtype=torch.uint8, device=self._device)
            if stretch is None or writer == self._rank
            else self._given(of_writer, stretch.stored.dtype)
            for writer, (stretch, of_writer) in enumerate(zip(stretches, moves, strict=True))
        ]
        mine = stretches[self._rank]
        sizes = [0] * self._num_ranks
        if mine is not None:
            for move in moves[self._rank]:
                if move.source != self._rank:
                    sizes[move.source] += move.box.numel * mine.stored.dtype.itemsize
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(incoming, torch.cat(sent), sizes, [piece.numel() for piece in sent], group=self._group)
        if mine is None:
            return {}
        pieces = incoming.cpu().split(sizes)
        return {rank: piece.view(mine.stored.dtype) for rank, piece in enumerate(pieces) if piece.numel()}

    def _given(self, moves: Sequence[Move], dtype: torch.dtype) -> torch.Tensor:
        values = [self._values(move, dtype) for move in moves if move.source == self._rank]
        flat = [value.contiguous().view(-1).view(torch.uint8).to(self._device) for value in values]
        return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=self._device)

    def _values(self, move: Move, dtype: torch.dtype) -> torch.Tensor:
        view = next(view for box, view in self._job.pieces[move.name] if box == move.held)
        return view[_index(move.box.inside(move.held))].to(dtype)

    def _assemble(self, stretch: Stretch, moves: Sequence[Move], received: Mapping[int, torch.Tensor]) -> bytearray:
        dtype = stretch.stored.dtype
        memory = bytearray(stretch.count * dtype.itemsize)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        used = dict.fromkeys(received, 0)
        for move in moves:
            if move.source == self._rank:
                values = self._values(move, dtype)
            else:
                first = used[move.source]
                used[move.source] = first + move.box.numel
                values = received[move.source][first : first + move.box.numel]
            target = flat[move.target_first : move.target_first + move.target.numel].view(move.target.lengths)
            target[_index(move.place)].copy_(values.reshape(move.place.lengths))
        return memory


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))


def _wire_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Where elements travel: on their own device, unless that is gloo's, which has no such collective off the CPU."""
    if not dist.is_initialized() or device.type == "cpu":
        return torch.device("cpu")
    backends = dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
    return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else device


class _FileWriter:
    """Writes this rank's files one after another; after an error it writes nothing more and keeps the error.

    Attributes:
        problem: What went wrong.
    """

    def __init__(self, folder: Path, files: Sequence[FileLayout]) -> None:
        self._folder = folder
        self._waiting = list(files)
        self._file: io.FileIO | None = None
        self._name = ""
        self.problem: OSError | None = None

    def __enter__(self) -> _FileWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, stretch: Stretch, values: bytearray) -> None:
        """Write a stretch; those of one file come in order."""
        if self.problem is None:
            try:
                while self._name != stretch.stored.file:
                    self._open_next()
                self._write_all(stretch.start, values)
            except OSError as error:
                self.problem = error

    def finish(self) -> None:
        """Write what has no elements, and make sure that everything has reached the disk."""
        try:
            while self.problem is None and self._waiting:
                self._open_next()
            self._close()
        except OSError as error:
            self.problem = self.problem or error

    def _open_next(self) -> None:
        self._close()
        layout = self._waiting.pop(0)
        self._file = io.FileIO(str(self._folder / layout.name), "xb")
        self._name = layout.name
        self._write_all(0, layout.head)

    def _write_all(self, start: int, values: bytes | bytearray) -> None:
        assert self._file is not None
        self._file.seek(start)
        rest = memoryview(values)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
