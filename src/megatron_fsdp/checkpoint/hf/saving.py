"""Saves a live, sharded model as Hugging Face files: several ranks write, nothing is gathered whole."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.hf.file_tensors import file_tensors
from megatron_fsdp.checkpoint.hf.files import INDEX_FILE, MODEL_FILE, FileLayout
from megatron_fsdp.checkpoint.hf.live import live_tensors, own_class, unwrap
from megatron_fsdp.checkpoint.hf.writing import Cut, Job, plan_job, write_files
from megatron_fsdp.checkpoint.new_folder import new_shared_folder
from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.comm.agreement import decided_by_first
from megatron_fsdp.errors import CheckpointError, ConfigurationError

DEFAULT_SHARD_BYTES = 5 * 2**30

_CONFIG_FILE = "config.json"

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
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    live = [tensor for tensor in live_tensors(module) if tensor.name not in ignored]
    cut = Cut(max_shard_bytes, MODEL_FILE, dtype)
    job = plan_job(live, lambda shapes: file_tensors(module, shapes), cut, f"preparing to save {folder}", group)

    def write_the_rest(temporary: Path) -> None:
        if carry_from is not None:
            _carry_files(Path(carry_from), temporary)
            if dtype is not None:
                _change_dtype(temporary, dtype)
        _write_config(module, config, temporary, _only_dtype(job.files))
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if len(job.files) > 1:
            (temporary / INDEX_FILE).write_text(_index_text(job.files), encoding="utf-8")

    publish_files(job, folder, write_the_rest, group)


def _check_arguments(max_shard_bytes: int, dtype: torch.dtype | None, carried: Mapping[str, Any]) -> None:
    if type(max_shard_bytes) is not int:
        raise ConfigurationError(
            f"max_shard_bytes={max_shard_bytes!r} is a {type(max_shard_bytes).__name__}; give a whole number of bytes"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"dtype={dtype!r} is a {type(dtype).__name__}; give a torch.dtype, or None")
    if max_shard_bytes <= 0:
        raise ConfigurationError(f"max_shard_bytes={max_shard_bytes} holds nothing; give a positive number of bytes")
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise ConfigurationError(
            f"dtype={dtype} cannot hold weights as they are; give a floating-point dtype of 16 bits or more, or None"
        )
    for name, value in carried.items():
        if value is not None and not hasattr(value, "save_pretrained"):
            raise ConfigurationError(
                f"{name} is a {type(value).__name__} without save_pretrained; give an object of transformers, or the "
                "folder that has its files as carry_from"
            )


def publish_files(
    job: Job, folder: Path, write_the_rest: Callable[[Path], None], group: dist.ProcessGroup | None
) -> None:
    """Write the files of a job, and what else belongs to them, into a new folder; collective.

    Args:
        job: What to write.
        folder: As of `save_hf`.
        write_the_rest: Called on the first rank with the temporary folder.
        group: The ranks.

    Raises:
        CheckpointError: As of `save_hf`.
    """
    with new_shared_folder(folder, {file.name: file.nbytes for file in job.files}, group) as temporary:
        decided_by_first(lambda: write_the_rest(temporary), f"saving to {folder}", group)
        write_files(job, temporary, group)


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


def _carry_files(source: Path, target: Path) -> None:
    """Copy everything but weights from one folder of a model to another."""
    if not (source / _CONFIG_FILE).is_file():
        raise CheckpointError(f"carry_from={source} has no {_CONFIG_FILE}; give the local folder of a model, or None")
    for path in filter(_is_carried, sorted(source.iterdir())):
        copy_one = shutil.copytree if path.is_dir() else shutil.copyfile
        copy_one(path, target / path.name)


def _write_config(module: nn.Module, config: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and generation_config.json, unless they were copied.

    Args:
        module: Its own configs are used where none is given.
        config: Goes before what was carried along; None: none.
        folder: Where to.
        dtype: Of the stored weights, for the config; None where they are of several.
    """
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


def _change_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Set the dtype of the weights in a copied config."""
    path = folder / _CONFIG_FILE
    described = read_json(path)
    field = "torch_dtype" if "torch_dtype" in described and "dtype" not in described else "dtype"
    described[field] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _index_text(files: Sequence[FileLayout]) -> str:
    """Return the index of several weight files as JSON."""
    tensors = [tensor for file in files for tensor in file.tensors]
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    weight_map = {tensor.key: tensor.file for tensor in tensors}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
