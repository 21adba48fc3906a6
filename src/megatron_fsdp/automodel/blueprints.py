"""From a name, a folder or a config to a model of transformers on the meta device; nothing is downloaded."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.agree import decided_by_first
from megatron_fsdp.checkpoint.hf.index import open_folder
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.plan.models import read_config

transformers: Any = require("transformers", "megatron_fsdp.automodel")


def find_folder(name_or_path: str | Path) -> Path:
    """The local folder of a model: the path itself, or where the hub's cache has the name.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(name_or_path, str | Path):
        raise ConfigurationError(f"the model is given as {name_or_path!r}; give a local folder, or a name in the cache")
    path = Path(name_or_path)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name_or_path), local_files_only=True))
    except Exception as error:
        raise ConfigurationError(
            f"{str(name_or_path)!r} is neither a local folder nor in the local cache of the hub; download it first, "
            "since nothing is downloaded here"
        ) from error


def refuse_foreign(device_map: object, trust_remote_code: object) -> None:
    """Refuse what transformers' own loaders take, and these cannot honour.

    Raises:
        ConfigurationError: One of them is given.
    """
    if device_map is not None:
        raise ConfigurationError(
            f"device_map={device_map!r} puts whole layers on devices, and here every rank holds a part of each layer; "
            "leave it out, and divide the model by distributed_config and sizes such as tp_size"
        )
    if trust_remote_code:
        raise ConfigurationError(
            f"trust_remote_code={trust_remote_code!r}, but code that lies beside weights is never run here; leave it "
            "out, and register classes of your own with transformers first (AutoConfig.register, "
            "AutoModelForCausalLM.register)"
        )


def config_of(folder: Path | None, given: Any, overrides: Mapping[str, Any]) -> Any:
    """The config of the model, as a copy: the one that is given, or the folder's.

    Raises:
        ConfigurationError: It cannot be read, is of another type, or has no field of an override's name.
    """
    if given is not None:
        if not isinstance(given, transformers.PretrainedConfig):
            raise ConfigurationError(f"config is a {type(given).__name__}; give a config of transformers or its folder")
        config: Any = copy.deepcopy(given)
    else:
        if folder is None:
            raise ConfigurationError("config is None; give a config of transformers, or a folder that has one")
        config = read_config(folder)
    for name, value in overrides.items():
        if not hasattr(config, name) or callable(getattr(type(config), name, None)):
            raise ConfigurationError(
                f"{name!r} is neither an argument nor a field of {type(config).__name__}; check its spelling"
            )
        setattr(config, name, value)
    return config


def resolve_dtype(dtype: torch.dtype | str | None, config: Any, folder: Path | None) -> torch.dtype:
    """The dtype of the weights.

    Args:
        dtype: A dtype or its name; "auto" or None: what the config says, else what most
            elements of the files have.
        config: Of the model.
        folder: Of the files; None: there are none, and torch's default is taken.

    Raises:
        ConfigurationError: It is no floating-point dtype.
    """
    if dtype in (None, "auto"):
        said = getattr(config, "dtype", None)
        if said not in (None, "auto"):
            return resolve_dtype(said, config, folder)
        if folder is None:
            return torch.get_default_dtype()
        stored = decided_by_first(lambda: open_folder(folder), f"opening {folder}")
        sizes: dict[torch.dtype, int] = {}
        for tensor in stored.tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
        return max(sizes, key=lambda found: sizes[found]) if sizes else torch.get_default_dtype()
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ConfigurationError(f"dtype={dtype!r}; give a floating-point torch.dtype, its name, or 'auto'")
    return resolved


def adopt_generation_config(model: Any, folder: Path) -> None:
    """Let a model generate as the folder says, where it does.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    if not (folder / "generation_config.json").is_file() or not model.can_generate():
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigurationError(f"{folder}: generation_config.json cannot be read: {error}") from error


def refuse_quantised(model: nn.Module) -> None:
    """Quantised weights are not cast into shards.

    Raises:
        CheckpointError: The config says that the weights are quantised.
    """
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise CheckpointError(
            "the weights are quantised (quantization_config); convert them to floating point first, or train adapters "
            "on a model that transformers has loaded"
        )
