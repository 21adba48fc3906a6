"""Load Hugging Face files into a live, sharded model: each rank reads the bytes of its own shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.agree import decided_by_first, gather_objects, together
from megatron_fsdp.checkpoint.hf.base_model import base_tensors
from megatron_fsdp.checkpoint.hf.index import WeightFiles, open_folder
from megatron_fsdp.checkpoint.hf.live import LiveTensor, Piece, install_weights, unwrap
from megatron_fsdp.checkpoint.hf.matching import Match, Source, Wanted, match_tensors, merge_reports
from megatron_fsdp.checkpoint.hf.names import KeyMapping, map_keys
from megatron_fsdp.checkpoint.hf.reading import FolderReader, portions
from megatron_fsdp.checkpoint.hf.safetensors_format import StoredTensor
from megatron_fsdp.checkpoint.report import LoadReport
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box


def load_hf(
    model: nn.Module,
    folder: str | Path,
    *,
    key_mapping: KeyMapping | None = None,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load the weights of a local Hugging Face folder into a model; collective.

    Every rank reads the byte ranges of its own shards, casts them to the dtype of the main weights and writes them
    there; then the compute weights are brought up to date. Names, shapes, dtypes and sizes are all checked on all ranks
    before anything in memory changes. Memory: 32 MiB beyond the model.

    Args:
        model: Sharded by `fully_shard_model` or `fully_shard`, or a plain module. Of a peft model the base is loaded.
        folder: With `model.safetensors`, or `model.safetensors.index.json` and the files that it names; the same for
            all ranks.
        key_mapping: From keys in files to names in the model, where they differ by more than transformers knows of:
            regular expressions with their replacements, or a function.
        strict: Refuse the folder unless everything fits. False: load what fits; what does not is in the report.
        group: The ranks that hold the model; None: all.

    Returns:
        What was loaded and what was not; the same on every rank.

    Raises:
        CheckpointError: The folder cannot be trusted or read or, with `strict`, does not fit; nothing was changed,
            unless the message says so. The same on every rank.
        ConfigurationError: `key_mapping` is no mapping, or the model shows full parameters at the moment.
    """
    module = unwrap(model)
    folder = Path(folder)
    files = replace(decided_by_first(lambda: open_folder(folder), f"opening {folder}", group), folder=folder)

    def match() -> Match:
        stored = {name: files.tensors[key] for name, key in map_keys(files.tensors, key_mapping).items()}
        return match_tensors(*base_tensors(module), stored)

    return load_matched(model, together(f"matching {folder} with the model", match, group), files, strict, group)


def load_matched(
    model: nn.Module, match: Match, files: WeightFiles, strict: bool, group: dist.ProcessGroup | None
) -> LoadReport:
    """Check and then load what was matched; collective.

    Raises:
        CheckpointError: As of `load_hf`.
    """
    report = merge_reports(gather_objects(match.report(), group))
    if strict:
        report.require_complete(str(files.folder))
    held = together(f"preparing to load {files.folder}", lambda: _checked_pieces(match, files), group)
    count = together(f"loading {files.folder}", lambda: _copy_all(match.wanted, held, files), group)
    install_weights(model, [wanted.live for wanted in match.wanted])
    return replace(report, notes=(*report.notes, _traffic_note(gather_objects(count, group))))


def _traffic_note(counts: Sequence[int]) -> str:
    return f"read {sum(counts)} bytes on {len(counts)} ranks, {min(counts)} to {max(counts)} on each"


# ---- checks --------------------------------------------------------------------------------------------------------


def _checked_pieces(match: Match, files: WeightFiles) -> dict[str, list[Piece]]:
    """The memory to load into, by name; nothing is written yet.

    Raises:
        CheckpointError: Something cannot be loaded.
    """
    held = {wanted.live.name: wanted.live.pieces() for wanted in match.wanted}
    for wanted in match.wanted:
        _check_memory(wanted.live, held[wanted.live.name])
        for _, stored in wanted.sources:
            _check_dtype(wanted.live, stored)
    files.check_here(stored.file for wanted in match.wanted for _, stored in _needed(wanted, held[wanted.live.name]))
    with FolderReader(files.folder) as reader:
        for wanted in match.wanted:
            for name, double in wanted.doubles.items():
                _check_tied(wanted, name, double, held[wanted.live.name], reader)
    return held


def _needed(wanted: Wanted, pieces: Sequence[Piece]) -> Iterator[Source]:
    for sources in (wanted.sources, *wanted.doubles.values()):
        for part, stored in sources:
            if any(box.meet(part.model_box) is not None for box, _ in pieces):
                yield part, stored


def _check_memory(live: LiveTensor, pieces: Sequence[Piece]) -> None:
    """Every element must have a place of its own; torch refuses to write to others, but only when it comes to them."""
    for _, view in pieces:
        if _shares_memory(view):
            raise CheckpointError(
                f"several elements of {live.name} share one place of memory (strides {view.stride()}), so it cannot "
                "be loaded into; make it contiguous in the model, or leave it out of its state (persistent=False)"
            )


def _shares_memory(view: torch.Tensor) -> bool:
    """Whether elements overlap, as far as torch sees it when it writes: dimensions of small strides inside larger."""
    dims = sorted((stride, length) for stride, length in zip(view.stride(), view.shape, strict=True) if length > 1)
    reach = 0
    for stride, length in dims:
        if stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def _check_dtype(live: LiveTensor, stored: StoredTensor) -> None:
    wanted = live.dtype
    if stored.dtype == wanted:
        return
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (stored.dtype, wanted)):
        raise CheckpointError(
            f"tensor {stored.key!r} is stored as {stored.dtype}, and {live.name} is {wanted}; only floating-point "
            "weights of 16 bits and more are cast, convert the others (quantised ones with their scales) beforehand"
        )


def _check_tied(
    wanted: Wanted, name: str, double: Sequence[Source], pieces: Sequence[Piece], reader: FolderReader
) -> None:
    """Compare two stored copies of one tied weight, each rank what it holds, as they would be loaded."""
    dtype = wanted.live.dtype
    for piece, _ in pieces:
        for box in portions(piece, dtype.itemsize):
            one, other = (_stored_box(sources, box, dtype, reader) for sources in (wanted.sources, double))
            if not torch.equal(_bits(one), _bits(other)):
                raise CheckpointError(
                    f"{wanted.live.name} and {name} are one tied weight in the model, and two different ones in "
                    f"{reader.folder} (they differ at or behind {box.offsets}); untie them in the model "
                    "(tie_word_embeddings=False), or store one"
                )


def _stored_box(sources: Sequence[Source], box: Box, dtype: torch.dtype, reader: FolderReader) -> torch.Tensor:
    found = torch.empty(box.lengths, dtype=dtype)
    pieces = [(box, found)]
    for portion, values in _stored_values(sources, pieces, reader):
        _write(pieces, portion, values)
    return found


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


# ---- reading -------------------------------------------------------------------------------------------------------


def _copy_all(wanted: Sequence[Wanted], held: Mapping[str, list[Piece]], files: WeightFiles) -> int:
    """Write everything into the model; returns how many bytes were read.

    Raises:
        CheckpointError: Something went wrong in the middle; says so.
    """
    try:
        with torch.no_grad(), FolderReader(files.folder) as reader:
            for entry in wanted:
                pieces = held[entry.live.name]
                for box, values in _stored_values(entry.sources, pieces, reader):
                    _write(pieces, box, values)
            return reader.bytes_read
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{error}; the model is partly loaded, load again before using it") from error


def _stored_values(
    sources: Sequence[Source], pieces: Sequence[Piece], reader: FolderReader
) -> Iterator[tuple[Box, torch.Tensor]]:
    """What is stored of the boxes that this rank holds, in portions: (box of the model tensor, values)."""
    for piece, _ in pieces:
        for part, stored in sources:
            common = piece.meet(part.model_box)
            if common is None:
                continue
            for portion in portions(part.to_file(common), stored.dtype.itemsize):
                box = part.to_model(portion)
                yield box, reader.read(stored, portion).view(box.lengths)


def _write(pieces: Sequence[Piece], box: Box, values: torch.Tensor) -> None:
    for held, view in pieces:
        if held.meet(box) == box:
            place = box.inside(held)
            index = tuple(slice(a, a + n) for a, n in zip(place.offsets, place.lengths, strict=True))
            view[index].copy_(values)
            return
