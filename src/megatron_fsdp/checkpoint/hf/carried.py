"""The files beside the weights: config, generation config, tokenizer, and the index."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.hf.own_classes import own_class
from megatron_fsdp.checkpoint.hf.safetensors_format import FileLayout
from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.errors import CheckpointError

CONFIG_FILE = "config.json"

_SUFFIXES = frozenset({".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".spm", ".py"})
_NAMES = frozenset({"LICENSE", "NOTICE"})
_FOLDERS = frozenset({"additional_chat_templates"})
_NOT_CARRIED = frozenset({"adapter_config.json", "trainer_state.json", "manifest.json"})


def is_carried(path: Path) -> bool:
    """Whether a file beside weights describes the model or its tokenizer, rather than weights or a training run."""
    if path.is_dir():
        return path.name in _FOLDERS
    if path.name.endswith(".index.json") or path.name in _NOT_CARRIED:
        return False
    return path.suffix in _SUFFIXES or path.name.partition(".")[0] in _NAMES


def carry_files(source: Path, target: Path) -> None:
    """Copy everything but weights from one folder of a model to another.

    Raises:
        CheckpointError: The source is no folder, or has no config.
    """
    if not (source / CONFIG_FILE).is_file():
        raise CheckpointError(f"carry_from={source} has no {CONFIG_FILE}; give the local folder of a model, or None")
    for path in sorted(source.iterdir()):
        if not is_carried(path):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def write_config(module: nn.Module, config: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and generation_config.json, unless they have been carried along.

    Args:
        module: Its own configs are used where none is given.
        config: Goes before what was carried along; None: none.
        folder: Where to.
        dtype: Of the stored weights, for the config; None where they are of several.
    """
    own: Any = getattr(module, "config", None)
    if config is not None or not (folder / CONFIG_FILE).exists():
        chosen: Any = config if config is not None else own
        if hasattr(chosen, "save_pretrained"):
            chosen = copy.deepcopy(chosen)
            chosen.architectures = [own_class(module).__name__]
            if dtype is not None and dtype.is_floating_point:
                setattr(chosen, _dtype_field(chosen), str(dtype).removeprefix("torch."))
            chosen.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if generation is not None and not (folder / "generation_config.json").exists():
        generation.save_pretrained(folder)


def _dtype_field(config: Any) -> str:
    return "dtype" if hasattr(config, "dtype") else "torch_dtype"


def change_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Let a config that was carried along say in which dtype the weights are now."""
    path = folder / CONFIG_FILE
    described = read_json(path)
    field = "torch_dtype" if "torch_dtype" in described and "dtype" not in described else "dtype"
    described[field] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def index_text(files: Sequence[FileLayout]) -> str:
    """The index of several weight files."""
    tensors = [tensor for file in files for tensor in file.tensors]
    weight_map: Mapping[str, str] = {tensor.key: tensor.file for tensor in tensors}
    numels = [torch.Size(tensor.shape).numel() for tensor in tensors]
    metadata = {"total_parameters": sum(numels), "total_size": sum(tensor.nbytes for tensor in tensors)}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
