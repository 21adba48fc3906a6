"""Save models as Hugging Face files: from live shards, by several ranks, or from a checkpoint, by one process.

From live shards: which rank writes which file, and how its elements come there, a portion at a time.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.folder import BoxIndex, CheckpointFolder
from megatron_fsdp.checkpoint.hf.file_tensors import FileTensor, file_tensors
from megatron_fsdp.checkpoint.hf.files import (
    INDEX_FILE,
    MODEL_FILE,
    PORTION_BYTES,
    FileLayout,
    StoredTensor,
    lay_out_file,
    portions,
)
from megatron_fsdp.checkpoint.hf.live import LiveTensor, Piece, live_tensors, own_class, unwrap
from megatron_fsdp.checkpoint.naming import MODEL, unwrapped
from megatron_fsdp.checkpoint.new_folder import new_folder, new_shared_folder, require_apart
from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.checkpoint.store import FileOps
from megatron_fsdp.checkpoint.verify import share_out
from megatron_fsdp.comm.agreement import (
    decided_by_first,
    gather_objects,
    in_short,
    raise_together,
    rank_of,
    together,
    world_size_of,
)
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.sharding.shards import Box

Naming = Callable[[Mapping[str, tuple[int, ...]]], dict[str, FileTensor]]

Portion = tuple[StoredTensor, Box]
"""Consecutive elements of a tensor in a file."""

_ROUNDS_BETWEEN_CHECKS = 16
DEFAULT_SHARD_BYTES = 5 * 2**30

_CONFIG_FILE = "config.json"
_SHOWN = 4

_SUFFIXES = frozenset({".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".spm", ".py"})
_NAMES = frozenset({"LICENSE", "NOTICE"})
_FOLDERS = frozenset({"additional_chat_templates"})
_NOT_CARRIED = frozenset({"adapter_config.json", "trainer_state.json", "manifest.json"})


def save_hf(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    carry_from: str | Path | None = None,
    config: Any = None,
    tokenizer: Any = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model as `transformers` does, so that `from_pretrained(folder)` loads it; collective.

    Saves the main weights, under the names that transformers stores, tied ones once. Each file is written
    by one rank, several at the same time, which receives elements in portions of 32 MiB. The folder appears at once and
    complete, or not at all.

    Args:
        model: Sharded by `fully_shard_model` or `fully_shard`, or a plain module.
        folder: Not there yet, or empty; seen by all ranks.
        max_shard_bytes: Of the tensors of one file; several files have an index.
        dtype: Of all floating-point tensors in the files; None: that of the main weights.
        carry_from: A local folder of a model whose other files (config, tokenizer, templates) are copied.
        config: Its `save_pretrained` writes the config; None: the one of `carry_from`, or else the model's own.
        tokenizer: Its `save_pretrained` writes the tokenizer; None: only what `carry_from` has.
        group: The ranks that hold the model; None: all.

    Raises:
        CheckpointError: It cannot be saved, or a rank could not write; on every rank, and nothing is left of it.
        ConfigurationError: An argument is out of range, or the model cannot be saved so.
    """
    _check_arguments(max_shard_bytes, dtype, {"config": config, "tokenizer": tokenizer})
    module = unwrap(model)
    if getattr(module, "peft_config", None):
        raise ConfigurationError(
            "the model has adapters, which a Hugging Face checkpoint of the model cannot hold; save them by "
            "save_adapter (those of peft.get_peft_model), or merge them into the model first"
        )
    folder = Path(folder)
    live = _saved(module, live_tensors(module))

    def write_the_rest(temporary: Path, files: Sequence[FileLayout]) -> None:
        if carry_from is not None:
            _carry_files(Path(carry_from), temporary, dtype)
        _write_config(module, config, temporary, _only_dtype(files))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _write_index(files, temporary)

    cut = Cut(max_shard_bytes, MODEL_FILE, dtype)
    save_files(live, lambda shapes: file_tensors(module, shapes), cut, folder, write_the_rest, group)


def _saved(module: nn.Module, live: Sequence[LiveTensor]) -> list[LiveTensor]:
    """Leave out what a model of transformers does not store."""
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    return [tensor for tensor in live if tensor.name not in ignored]


def _check_arguments(max_shard_bytes: int, dtype: torch.dtype | None, carried: Mapping[str, Any]) -> None:
    if type(max_shard_bytes) is not int or max_shard_bytes <= 0:
        raise ConfigurationError(f"max_shard_bytes={max_shard_bytes!r}: give a whole number of bytes from 1")
    is_dtype = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not None and not is_dtype:
        raise ConfigurationError(
            f"dtype={dtype!r} cannot hold weights as they are; give a floating-point torch.dtype of 16 bits or more"
        )
    for name, value in carried.items():
        if value is not None and not hasattr(value, "save_pretrained"):
            raise ConfigurationError(
                f"{name} is a {type(value).__name__} without save_pretrained; give an object of transformers, or the "
                "folder that has its files as carry_from"
            )


def _only_dtype(files: Sequence[FileLayout]) -> torch.dtype | None:
    dtypes = {tensor.dtype for file in files for tensor in file.tensors if tensor.dtype.is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 else None


# ---- the files beside the weights ------------------------------------------------------------------------------------


def _is_carried(path: Path) -> bool:
    """Return whether a file beside weights describes the model or its tokenizer, not weights or a training run."""
    if path.is_dir():
        return path.name in _FOLDERS
    if path.name.endswith(".index.json") or path.name in _NOT_CARRIED:
        return False
    return path.suffix in _SUFFIXES or path.name.partition(".")[0] in _NAMES


def _carry_files(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy everything but weights from one folder of a model to another, and set the dtype in the config."""
    if not (source / _CONFIG_FILE).is_file():
        raise CheckpointError(f"{source} has no {_CONFIG_FILE}; give the local folder of a model")
    for path in filter(_is_carried, sorted(source.iterdir())):
        copy_one = shutil.copytree if path.is_dir() else shutil.copyfile
        copy_one(path, target / path.name)
    if dtype is not None:
        described = read_json(target / _CONFIG_FILE)
        field = "torch_dtype" if "torch_dtype" in described and "dtype" not in described else "dtype"
        described[field] = str(dtype).removeprefix("torch.")
        (target / _CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _write_config(module: nn.Module, config: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and generation_config.json, unless they were copied."""
    chosen: Any = config if config is not None else getattr(module, "config", None)
    is_wanted = config is not None or not (folder / _CONFIG_FILE).exists()
    if is_wanted and hasattr(chosen, "save_pretrained"):
        chosen = copy.deepcopy(chosen)
        chosen.architectures = [own_class(module).__name__]
        if dtype is not None:
            setattr(chosen, "dtype" if hasattr(chosen, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
        chosen.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if generation is not None and not (folder / "generation_config.json").exists():
        generation.save_pretrained(folder)


def _write_index(files: Sequence[FileLayout], folder: Path) -> None:
    """Write which file has which tensor, where there are several files."""
    if len(files) == 1:
        return
    tensors = [tensor for file in files for tensor in file.tensors]
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    index = {"metadata": metadata, "weight_map": {tensor.key: tensor.file for tensor in tensors}}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# ---- which file holds what -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How a model is split into files, numbered if several; `dtype` is for floating-point tensors, None: their own."""

    max_bytes: int
    single_name: str
    dtype: torch.dtype | None = None


def lay_out_files(tensors: Mapping[str, FileTensor], dtypes: Mapping[str, torch.dtype], cut: Cut) -> list[FileLayout]:
    """Assign tensors to files (at least one) in their order, as many to each as fit."""
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
    """One main weight, and the ranks that hold each of its boxes; of what is no DTensor the first rank's is taken."""

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

    `naming` goes from shapes by name to file tensors by key; `write_the_rest` is called on the first rank with the
    temporary folder and the weight files that will be in it.
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


# ---- from a checkpoint -----------------------------------------------------------------------------------------------


def export_hf(
    source: CheckpointFolder,
    folder: str | Path,
    config: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
) -> tuple[str, ...]:
    """Write the model of a checkpoint as `save_hf` writes a live one; not collective: one process reads and writes.

    Memory: 32 MiB, or one chunk of the checkpoint where the file has its elements in another order.

    Args:
        source: A checkpoint of a transformers model, opened; of any number of ranks.
        folder: Not there yet, or empty.
        config: A local folder with the `config.json` of that model, and its tokenizer; all but weights is copied.
        max_shard_bytes: As of `save_hf`.
        dtype: As of `save_hf`; None: those of the checkpoint.

    Returns:
        The names of the weight files.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model, or the folder cannot be written; nothing is
            left of it.
        ConfigurationError: An argument is out of range, or transformers builds no model from the config.
    """
    _check_arguments(max_shard_bytes, dtype, {})
    folder, config = Path(folder), Path(config)
    if not config.is_dir():
        raise ConfigurationError(f"config={str(config)!r} is no folder; give the local folder of the model")
    require_apart(folder, source.path)
    model = _model_of(config)
    keys = _stored_keys(source, model)
    shapes = {name: source.tensors[key].shape for name, key in keys.items()}
    tensors = file_tensors(model, shapes)
    dtypes = {name: source.tensors[key].dtype for name, key in keys.items()}
    files = lay_out_files(tensors, dtypes, Cut(max_shard_bytes, MODEL_FILE, dtype))
    with new_folder(folder) as temporary, source.kept_open():
        _carry_files(config, temporary, dtype)
        _write_index(files, temporary)
        writer = FileWriter(temporary, files)
        for stored, box in portions_of(files):
            writer.append(stored.file, _assembled(source, keys, tensors[stored.key], box, stored.dtype))
            if writer.problem is not None:
                raise in_short(writer.problem, f"writing {folder}") from writer.problem
    return tuple(file.name for file in files)


def _model_of(folder: Path) -> nn.Module:
    """Build the model of a config without memory; code that lies beside it is not run."""
    transformers: Any = require("transformers", "a Hugging Face folder")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind: Any = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        with torch.device("meta"):
            build = kind if is_model else transformers.AutoModelForCausalLM.from_config
            model: nn.Module = build(config)
    except Exception as error:
        raise ConfigurationError(
            f"{folder} has no config from which transformers {transformers.__version__} builds a model ({error}); give "
            "the local folder of the model that was trained"
        ) from error
    return model


def _stored_keys(source: CheckpointFolder, model: nn.Module) -> dict[str, str]:
    """Return the keys of a checkpoint that hold a model's tensors, by name in the model."""
    live = live_tensors(model)
    known = {alias for tensor in live for alias in tensor.aliases}
    section = f"{MODEL}."
    below = [key.removeprefix(section) for key in source.tensors if key.startswith(section)]
    stored = {name: section + key for name, key in unwrapped(below, known.__contains__)[0].items()}
    kind, found, missing = type(model).__name__, {}, []
    for tensor in _saved(model, live):
        keys = [stored[alias] for alias in tensor.aliases if alias in stored]
        if not keys:
            missing.append(tensor.name)
            continue
        found[tensor.name] = keys[0]
        for key in keys:
            if source.tensors[key].shape != tensor.shape:
                raise CheckpointError(
                    f"{source.path} has {key} of shape {source.tensors[key].shape}, and {kind} of the config "
                    f"{tensor.shape}; give the config that the model was trained with"
                )
        _check_same(source, keys)
    for what, names in (("lacks", missing), ("has, beyond the model,", sorted(stored.keys() - known))):
        if names:
            raise CheckpointError(
                f"{source.path} {what} {len(names)} tensors of {kind}, such as {', '.join(names[:_SHOWN])}; give the "
                "config that the model was trained with (models that are not of transformers cannot be exported)"
            )
    return found


def _check_same(source: CheckpointFolder, keys: Sequence[str]) -> None:
    """Refuse different values of what is one tied weight in the model."""
    shape, itemsize = source.tensors[keys[0]].shape, source.tensors[keys[0]].dtype.itemsize
    for key in keys[1:]:
        for box in portions(Box((0,) * len(shape), shape), itemsize):
            one, other = (source.read_box(each, box.offsets, box.lengths) for each in (keys[0], key))
            if not torch.equal(one, other):
                raise CheckpointError(
                    f"{source.path}: {keys[0]} and {key} are one tied weight in the config's model, and differ; give a "
                    "config with tie_word_embeddings=false"
                )


def _assembled(
    source: CheckpointFolder, keys: Mapping[str, str], tensor: FileTensor, box: Box, dtype: torch.dtype
) -> torch.Tensor:
    """Read a box of a file tensor, from the parts that it is made of."""
    made = torch.empty(box.lengths, dtype=dtype)
    for part in tensor.parts:
        wanted = box.meet(part.file_box)
        if wanted is not None:
            inside = part.to_model(wanted)
            values = source.read_box(keys[part.name], inside.offsets, inside.lengths)
            made[wanted.inside(box).indices] = values.reshape(wanted.lengths).to(dtype)
    return made
