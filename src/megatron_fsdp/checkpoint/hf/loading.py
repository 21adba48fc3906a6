"""Load Hugging Face files into a live, sharded model: each rank reads the bytes of its own shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.hf.files import FolderReader, StoredTensor, WeightFiles, open_folder, portions
from megatron_fsdp.checkpoint.hf.live import (
    CannotFollowError,
    FileTensor,
    KeyMapping,
    LiveTensor,
    LocalBox,
    base_tensors,
    file_tensors,
    install_weights,
    is_ignored,
    key_variants,
    map_keys,
    other_file_keys,
    unwrap,
)
from megatron_fsdp.checkpoint.rearranged import Part
from megatron_fsdp.checkpoint.report import Findings, LoadReport, decided_by_first, report_of_all, together
from megatron_fsdp.comm.agreement import agreed, gather_objects, group_of
from megatron_fsdp.errors import CheckpointError, words_of

Source = tuple[Part, StoredTensor]
_Described = list[tuple[str, FileTensor]]


@agreed("loading Hugging Face files", group_of, CheckpointError)
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
    there; then the compute weights are updated. Names, shapes, dtypes and sizes are all checked on all ranks
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
        The report on loaded and other keys; the same on every rank.

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
        return Match(*base_tensors(module), stored)

    return load_matched(model, together(f"matching {folder} with the model", match, group), files, strict, group)


def load_matched(
    model: nn.Module, match: Match, files: WeightFiles, strict: bool, group: dist.ProcessGroup | None
) -> LoadReport:
    """Check and then load the matched tensors; collective."""
    report = report_of_all(match.reported(wanted.live.name for wanted in match.wanted), group)
    unknown_to_all = set.intersection(*gather_objects(set(match.unexpected), group))  # stages and experts differ
    report = replace(report, unexpected=tuple(key for key in report.unexpected if key in unknown_to_all))
    if strict:
        report.require_complete(str(files.folder))
    held = together(f"preparing to load {files.folder}", lambda: _checked_boxes(match, files), group)
    count = together(f"loading {files.folder}", lambda: _copy_all(match.wanted, held, files), group)
    install_weights(model, [wanted.live for wanted in match.wanted])
    counts = gather_objects(count, group)
    note = f"read {sum(counts)} bytes on {len(counts)} ranks, {min(counts)} to {max(counts)} on each"
    return replace(report, notes=(*report.notes, note))


# ---- which stored tensors belong to which of the model ---------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A model tensor and the stored ones with its parts; `doubles` if a tied one is stored once more."""

    live: LiveTensor
    sources: tuple[Source, ...]
    doubles: Mapping[str, tuple[Source, ...]]


class Match(Findings):
    """The model tensors found among stored ones, and their places.

    A tensor is searched for as transformers would store it (experts one by one), then under its own name, each with and
    without the prefix of the base model, and at last under names that transformers renames. A tied weight may be stored
    under any of its names.
    """

    def __init__(self, module: nn.Module, live: Sequence[LiveTensor], stored: Mapping[str, StoredTensor]) -> None:
        super().__init__()
        self.wanted: list[Wanted] = []
        self._module = module
        self._stored = stored
        self._shapes = {name: tensor.shape for tensor in live for name in tensor.aliases}
        self._used: set[str] = set()
        self._by_name: dict[str, _Described] = {}
        self._renamed: dict[str, str] = {}  # name -> key of an older file
        try:
            described = file_tensors(module, self._shapes)
        except CannotFollowError as error:
            described = {}
            self.notes.append(f"tensors were looked for only as the model names them: {error}")
        for key, tensor in described.items():
            for name in tensor.names:
                self._by_name.setdefault(name, []).append((key, tensor))
        lost = [tensor for tensor in live if not self._place(tensor)]
        if lost:
            others = other_file_keys(module, sorted(stored.keys() - self._used))
            self._renamed = {name: key for key, name in others.items() if name in self._shapes}
        for absent in lost:
            if not self._place(absent):
                self._note_missing(absent)
        for key in sorted(stored.keys() - self._used):
            if is_ignored(module, "_keys_to_ignore_on_load_unexpected", [key]):
                self.notes.append(f"{key} is stored and was left out, as the model asks")
            else:
                self.unexpected.append(key)

    def _stored_for(self, name: str) -> _Described:
        """Return the stored keys of a tensor with their parts; empty if it is not stored."""
        whole = FileTensor.of(name, self._shapes[name])
        for described in (self._by_name.get(name, []), [(name, whole)], [(self._renamed.get(name, name), whole)]):
            found = [(stored, tensor) for key, tensor in described if (stored := self._stored_key(key)) is not None]
            if found and len(found) == len(described):
                return found
        return []

    def _stored_key(self, key: str) -> str | None:
        return next((variant for variant in key_variants(self._module, key) if variant in self._stored), None)

    def _place(self, live: LiveTensor) -> bool:
        """Record the place of a stored tensor; return False if it is not stored."""
        stored = {name: found for name in (live.name, *live.aliases) if (found := self._stored_for(name))}
        if not stored:
            return False
        shapes = [(key, self._stored[key].shape, tensor.shape) for found in stored.values() for key, tensor in found]
        self._used.update(key for key, _, _ in shapes)
        reshaped = {key: (has, wanted) for key, has, wanted in shapes if has != wanted}
        self.reshaped |= reshaped
        if not reshaped:
            sources = {
                name: tuple((p, self._stored[key]) for key, tensor in places for p in tensor.parts if p.key == name)
                for name, places in stored.items()
            }
            first, *others = sources
            keys = {entry.key for _, entry in sources[first]}
            doubles = {name: sources[name] for name in others if keys.isdisjoint(e.key for _, e in sources[name])}
            self.wanted.append(Wanted(live, sources[first], doubles))
        return True

    def _note_missing(self, live: LiveTensor) -> None:
        if is_ignored(self._module, "_keys_to_ignore_on_load_missing", live.aliases):
            self.notes.append(f"{live.name} is not stored and kept its value, as the model allows")
            return
        self.missing.append(live.name)
        keys = [key for key, _ in self._by_name.get(live.name, [])]
        there = [stored for key in keys if (stored := self._stored_key(key)) is not None]
        self._used.update(there)
        if there:
            absent = next(key for key in keys if self._stored_key(key) is None)
            self.notes.append(f"{live.name} is stored only in part: {len(there)} of {len(keys)}, not {absent}")


# ---- checks --------------------------------------------------------------------------------------------------------


def _checked_boxes(match: Match, files: WeightFiles) -> dict[str, list[LocalBox]]:
    """Return the memory to load into, by name, without writing to it."""
    held = {wanted.live.name: wanted.live.local_boxes() for wanted in match.wanted}
    for wanted in match.wanted:
        live = wanted.live
        for _, view in held[live.name]:
            if torch._debug_has_internal_overlap(view) == 1:  # torch would refuse to write, when others are written
                raise CheckpointError(
                    f"several elements of {live.name} share one place of memory (strides {view.stride()}), so it "
                    "cannot be loaded into; make it contiguous in the model, or leave it out of its state "
                    "(persistent=False)"
                )
        for _, stored in wanted.sources:
            are_cast = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (stored.dtype, live.dtype))
            if stored.dtype != live.dtype and not are_cast:
                raise CheckpointError(
                    f"tensor {stored.key!r} is stored as {stored.dtype}, and {live.name} is {live.dtype}; only "
                    "floating-point weights of 16 bits and more are cast, convert the others (quantised ones with "
                    "their scales) beforehand"
                )
    files.check_here()
    reader = FolderReader(files.folder)
    for wanted in match.wanted:
        for name, double in wanted.doubles.items():
            _check_tied(wanted, name, double, held[wanted.live.name], reader)
    return held


def _check_tied(
    wanted: Wanted, name: str, double: Sequence[Source], boxes: Sequence[LocalBox], reader: FolderReader
) -> None:
    """Compare two stored copies of one tied weight, each rank its own part, in the dtype they are loaded in."""
    dtype = wanted.live.dtype
    for here, _ in boxes:
        for box in portions(here, dtype.itemsize):
            one, other = (torch.empty(box.lengths, dtype=dtype) for _ in range(2))
            copy_boxes(wanted.sources, [(box, one)], reader)
            copy_boxes(double, [(box, other)], reader)
            if not torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
                raise CheckpointError(
                    f"{wanted.live.name} and {name} are one tied weight in the model, and two different ones in "
                    f"{reader.folder} (they differ at or behind {box.offsets}); untie them in the model "
                    "(tie_word_embeddings=False), or store one"
                )


def _copy_all(wanted: Sequence[Wanted], held: Mapping[str, list[LocalBox]], files: WeightFiles) -> int:
    """Copy everything into the model; return the number of bytes read."""
    reader = FolderReader(files.folder)
    try:
        with torch.no_grad():
            for entry in wanted:
                copy_boxes(entry.sources, held[entry.live.name], reader)
    except Exception as error:  # whatever it is
        raise CheckpointError(f"{words_of(error)}; the model is partly loaded, load again before using it") from error
    return reader.bytes_read


def copy_boxes(sources: Sequence[Source], boxes: Sequence[LocalBox], reader: FolderReader) -> None:
    """Fill this rank's boxes of one tensor, a portion at a time."""
    for held, view in boxes:
        for part, stored in sources:
            common = held.meet(part.source)
            if common is None:
                continue
            for portion in portions(part.to_target(common), stored.dtype.itemsize):
                box = part.to_source(portion)
                view[box.inside(held).indices].copy_(reader.read(stored, portion).reshape(box.lengths))
