"""Save models as Hugging Face files: from live shards, by several ranks, or from a checkpoint, by one process."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.folder import CheckpointFolder, whole_box
from megatron_fsdp.checkpoint.hf.files import DTYPES, INDEX_FILE, MODEL_FILE, StoredTensor, write_file
from megatron_fsdp.checkpoint.hf.live import FileTensor, LiveTensor, file_tensors, live_tensors, own_class, unwrap
from megatron_fsdp.checkpoint.naming import MODEL, unwrapped
from megatron_fsdp.checkpoint.rearranged import Part, RearrangedFolder
from megatron_fsdp.checkpoint.report import check_group, decided_by_first, together
from megatron_fsdp.checkpoint.safe_read import read_file, read_json, resolve_inside
from megatron_fsdp.checkpoint.save import TensorSource, write_state
from megatron_fsdp.checkpoint.store import new_folder, new_shared_folder, require_apart
from megatron_fsdp.checkpoint.verify import share_out
from megatron_fsdp.comm.agreement import agreed, gather_objects, group_of, rank_of, world_size_of
from megatron_fsdp.config.hf_config import CONFIG_FILE, build_from_config, read_config
from megatron_fsdp.errors import CheckpointError, ConfigurationError

Files = Mapping[str, Sequence[StoredTensor]]
"""The tensors of each file, by its name."""
Naming = Callable[[Mapping[str, tuple[int, ...]]], dict[str, FileTensor]]

_SHARDS = ".shards"
DEFAULT_SHARD_BYTES = 5 * 2**30

_SHOWN = 4

_SUFFIXES = frozenset({".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".spm", ".py"})
_NAMES = frozenset({"LICENSE", "NOTICE"})
_FOLDERS = frozenset({"additional_chat_templates"})
_MAX_CARRIED_BYTES = 1 << 30
_NOT_CARRIED = frozenset({"adapter_config.json", "trainer_state.json", "manifest.json"})


@agreed("saving Hugging Face files", group_of, CheckpointError)
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

    Saves the main weights, under the names of transformers, tied ones once. Each rank writes its shards to the disk,
    and then some of the files from all shards, one in memory at a time: the weights are on the disk twice meanwhile.
    The folder appears at once and complete, or not at all.

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
    check_group(group)
    _check_arguments(max_shard_bytes, dtype, {"config": config, "tokenizer": tokenizer})
    module = unwrap(model)
    if getattr(module, "peft_config", None):
        raise ConfigurationError(
            "the model has adapters, which a Hugging Face checkpoint of the model cannot hold; save them by "
            "save_adapter (those of peft.get_peft_model), or merge them into the model first"
        )
    folder = Path(folder)
    same = {"max_shard_bytes": str(max_shard_bytes), "dtype": str(dtype)}
    together(f"preparing to save {folder}", lambda: None, group, same)
    live = saved_tensors(module)
    stored = next((each.name for each in live if ".parametrizations." in each.name and each.dtype is torch.uint8), None)
    if stored is not None:
        raise ConfigurationError(
            f"the model has quantised weights ({stored}), whose bytes no Hugging Face file of this package holds; save "
            "adapters by save_adapter, or the model by torch.distributed.checkpoint"
        )
    dtypes = {dtype or tensor.dtype for tensor in live if tensor.dtype.is_floating_point}

    def write_the_rest(temporary: Path) -> None:
        if carry_from is not None:
            _carry_files(Path(carry_from), temporary, dtype)
        _write_config(module, config, temporary, dtypes.copy().pop() if len(dtypes) == 1 else None)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)

    cut = Cut(max_shard_bytes, MODEL_FILE, dtype)
    save_files(live, lambda shapes: file_tensors(module, shapes), cut, folder, write_the_rest, group)


def saved_tensors(module: nn.Module) -> list[LiveTensor]:
    """List the tensors that a model stores; transformers leaves some out."""
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    return [tensor for tensor in live_tensors(module) if tensor.name not in ignored]


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


# ---- the files beside the weights ------------------------------------------------------------------------------------


def _carry_files(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy everything but weights from one folder of a model to another, and set the dtype in the config."""
    if not (source / CONFIG_FILE).is_file():
        raise CheckpointError(f"{source} has no {CONFIG_FILE}; give the local folder of a model")
    left = _MAX_CARRIED_BYTES
    for path in _files_to_carry(source):
        try:
            contents = read_file(resolve_inside(path, source), left)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be carried along ({error.strerror}; what is beside weights may have "
                f"{_MAX_CARRIED_BYTES >> 20} MiB in all); remove it, or put a regular file there"
            ) from error
        left -= len(contents)
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(contents)
    if dtype is not None:
        described = read_json(target / CONFIG_FILE)
        field = "torch_dtype" if "torch_dtype" in described and "dtype" not in described else "dtype"
        described[field] = str(dtype).removeprefix("torch.")
        (target / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _files_to_carry(source: Path) -> Iterator[Path]:
    """List the files beside a model's weights that belong to it."""
    for path in sorted(source.iterdir()):
        is_of_weights = path.name.endswith(".index.json") or path.name in _NOT_CARRIED  # or of a training run
        if path.is_dir():
            yield from sorted(each for each in path.rglob("*") if not each.is_dir()) if path.name in _FOLDERS else ()
        elif not is_of_weights and (path.suffix in _SUFFIXES or path.name.partition(".")[0] in _NAMES):
            yield path


def _write_config(module: nn.Module, config: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and generation_config.json, unless they were copied."""
    chosen: Any = config if config is not None else getattr(module, "config", None)
    is_wanted = config is not None or not (folder / CONFIG_FILE).exists()
    if is_wanted and hasattr(chosen, "save_pretrained"):
        chosen = copy.deepcopy(chosen)
        chosen.architectures = [own_class(module).__name__]
        if dtype is not None:
            setattr(chosen, "dtype" if hasattr(chosen, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
        chosen.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if generation is not None and not (folder / "generation_config.json").exists():
        generation.save_pretrained(folder)


def _write_index(files: Files, folder: Path) -> None:
    """Write the index from tensors to files, if there are several files."""
    if len(files) == 1:
        return
    tensors = list(itertools.chain.from_iterable(files.values()))
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    index = {"metadata": metadata, "weight_map": {tensor.key: tensor.file for tensor in tensors}}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# ---- the division into files -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The division of a model into files, numbered if several; `dtype` casts floating-point tensors."""

    max_bytes: int
    single_name: str
    dtype: torch.dtype | None = None


def lay_out_files(tensors: Mapping[str, FileTensor], dtypes: Mapping[str, torch.dtype], cut: Cut) -> Files:
    """Assign tensors to files (at least one) in their order, as many to each as fit."""
    files: list[list[StoredTensor]] = [[]]
    filled = 0
    for key, tensor in tensors.items():
        dtype = _stored_dtype(key, {dtypes[name] for name in tensor.names}, cut.dtype)
        stored = StoredTensor(key, "", dtype, tensor.shape)
        if files[-1] and filled + stored.nbytes > cut.max_bytes:
            files.append([])
            filled = 0
        files[-1].append(stored)
        filled += stored.nbytes
    stem, count = cut.single_name.removesuffix(".safetensors"), len(files)
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    named = zip(names if count > 1 else [cut.single_name], files, strict=True)
    return {name: [replace(stored, file=name) for stored in inside] for name, inside in named}


def _stored_dtype(key: str, found: set[torch.dtype], wanted: torch.dtype | None) -> torch.dtype:
    if len(found) != 1:
        raise CheckpointError(f"{key} would be made of tensors of several dtypes: {sorted(map(str, found))}")
    (own,) = found
    dtype = wanted if wanted is not None and own.is_floating_point else own
    if dtype not in DTYPES.values():
        raise CheckpointError(f"{key} has dtype {dtype}, which safetensors cannot hold; give another dtype")
    return dtype


# ---- from live shards ------------------------------------------------------------------------------------------------


def save_files(
    live: Sequence[LiveTensor],
    naming: Naming,
    cut: Cut,
    folder: Path,
    write_the_rest: Callable[[Path], None],
    group: dist.ProcessGroup | None,
) -> None:
    """Write a model's tensors, and its other files, into a new folder; collective.

    The shards are written as they are into a checkpoint inside the temporary folder, and each rank makes some of the
    files from it. torch's HuggingFaceStorageWriter does the same, but accepts only one box of a tensor from each rank:
    a shard that is cut inside a row is several. `naming` goes from shapes by name to file tensors by key;
    `write_the_rest` is called on the first rank with the temporary folder.
    """
    doing = f"preparing to save {folder}"
    sources = together(doing, lambda: {tensor.name: _source(tensor, cut) for tensor in live}, group)
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for of_rank in gather_objects({name: (found.shape, found.dtype) for name, found in sources.items()}, group):
        known |= {name: described for name, described in of_rank.items() if name not in known}

    def lay_out() -> tuple[dict[str, FileTensor], Files]:
        if not known:
            raise CheckpointError("there is nothing to save: the model has no such tensors")
        tensors = naming({name: shape for name, (shape, _) in known.items()})
        return tensors, lay_out_files(tensors, {name: dtype for name, (_, dtype) in known.items()}, cut)

    tensors, files = together(doing, lay_out, group)
    sizes = [sum(stored.nbytes for stored in inside) for inside in files.values()]
    mine = [list(files)[at] for at in share_out(sizes, rank_of(group), world_size_of(group))]
    own = {name: files[name] for name in mine}

    def write_first(temporary: Path) -> None:
        write_the_rest(temporary)
        _write_index(files, temporary)

    def write_own(shards: Path, temporary: Path) -> None:
        try:
            source = CheckpointFolder(shards)
        except CheckpointError as error:
            raise CheckpointError(
                f"the ranks do not hold the whole model ({error}); all ranks that share it have to take part (see the "
                "argument group), and each has to have another part or the same one"
            ) from error
        write_files(own, {key: tensor.parts for key, tensor in tensors.items()}, source, temporary)

    with new_shared_folder(folder, group) as temporary:
        shards = temporary / _SHARDS
        decided_by_first(lambda: write_first(temporary), f"saving to {folder}", group)
        write_state(sources, shards, group, paths={})
        together(f"writing {folder}", lambda: write_own(shards, temporary), group)
        decided_by_first(lambda: shutil.rmtree(shards), f"saving to {folder}", group)


def _source(live: LiveTensor, cut: Cut) -> TensorSource:
    """Return this rank's shards of a tensor, in the dtype of the files; ranks with equal shards write them once."""
    shape, dtype = live.shape, _stored_dtype(live.name, {live.dtype}, cut.dtype)
    shards = dict(live.local_boxes())
    if 0 in shape:
        shards = {whole_box(shape): torch.empty(shape, dtype=dtype)}
    boxes = list(shards) if live.is_saved_here else []
    return TensorSource(shape, dtype, boxes, lambda box: shards[box].to(dtype))


def write_files(files: Files, parts: Mapping[str, Sequence[Part]], source: CheckpointFolder, folder: Path) -> None:
    """Write files whose tensors are made of parts of a checkpoint, one at a time."""
    view = RearrangedFolder(source, parts, {})
    with view.kept_open():
        for name, inside in files.items():
            made = {each.key: view.read_tensor(each.key).to(each.dtype).contiguous() for each in inside}
            write_file(folder / name, made)
            del made  # before the next one is read


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

    Memory: one file, and one tensor or chunk of the checkpoint.

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
    model = build_from_config(read_config(config), torch.get_default_dtype(), None)
    keys = _stored_keys(source, model)
    shapes = {name: source.tensors[key].shape for name, key in keys.items()}
    tensors = file_tensors(model, shapes)
    dtypes = {name: source.tensors[key].dtype for name, key in keys.items()}
    parts = {key: [replace(part, key=keys[part.key]) for part in tensor.parts] for key, tensor in tensors.items()}
    files = lay_out_files(tensors, dtypes, Cut(max_shard_bytes, MODEL_FILE, dtype))
    with new_folder(folder) as temporary:
        _carry_files(config, temporary, dtype)
        _write_index(files, temporary)
        write_files(files, parts, source, temporary)
    return tuple(files)


def _stored_keys(source: CheckpointFolder, model: nn.Module) -> dict[str, str]:
    """Return the keys of a checkpoint that hold a model's tensors, by name in the model."""
    known = {alias for tensor in live_tensors(model) for alias in tensor.aliases}
    section = f"{MODEL}."
    below = [key.removeprefix(section) for key in source.tensors if key.startswith(section)]
    stored = {name: section + key for name, key in unwrapped(below, known.__contains__)[0].items()}
    kind, found, missing = type(model).__name__, {}, []
    for tensor in saved_tensors(model):
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
        for key in keys[1:]:
            for box, values in source.parts(keys[0]):
                if not torch.equal(values, source.read_box(key, box.offsets, box.lengths)):
                    raise CheckpointError(
                        f"{source.path}: {keys[0]} and {key} are one tied weight in the config's model, and differ; "
                        "give a config with tie_word_embeddings=false"
                    )
    for what, names in (("lacks", missing), ("has, beyond the model,", sorted(stored.keys() - known))):
        if names:
            raise CheckpointError(
                f"{source.path} {what} {len(names)} tensors of {kind}, such as {', '.join(names[:_SHOWN])}; give the "
                "config that the model was trained with (models that are not of transformers cannot be exported)"
            )
    return found
