"""Adapters of a sharded peft model, in peft's own format."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.agree import decided_by_first, together
from megatron_fsdp.checkpoint.hf.adapter_config import check_config, default_config, plain_config
from megatron_fsdp.checkpoint.hf.index import ADAPTER_FILE, WeightFiles, open_folder
from megatron_fsdp.checkpoint.hf.live import LiveTensor, live_tensors, unwrap
from megatron_fsdp.checkpoint.hf.loading import load_matched
from megatron_fsdp.checkpoint.hf.matching import Match, match_tensors
from megatron_fsdp.checkpoint.hf.parts import FileTensor
from megatron_fsdp.checkpoint.hf.saving import plan_job, publish_files
from megatron_fsdp.checkpoint.report import LoadReport
from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.errors import CheckpointError, ConfigurationError

CONFIG_FILE = "adapter_config.json"

_ONE_FILE = 2**62


def save_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    save_embedding_layers: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save an adapter so that `peft.PeftModel.from_pretrained(base, folder)` loads it; collective.

    Args:
        model: A peft model that was sharded, or a plain one.
        folder: Not there yet, or empty; seen by all ranks.
        adapter_name: Which one.
        save_embedding_layers: Save the embeddings too, as peft does where the vocabulary was changed.
        group: The ranks that hold the model; None: all.

    Raises:
        CheckpointError: It cannot be saved; on every rank, and nothing is left of it.
        ConfigurationError: The model has no such adapter.
    """
    module, folder = _peft_model(model, adapter_name), Path(folder)

    def naming(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FileTensor]:
        return adapter_tensors(module, shapes, adapter_name, save_embedding_layers)

    live = together(f"preparing to save {folder}", lambda: _live_of(module, naming), group)
    job = plan_job(live, naming, folder, None, (_ONE_FILE, ADAPTER_FILE), group)
    publish_files(job, folder, lambda temporary: _write_config(module, adapter_name, temporary), group)


def load_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load an adapter that peft or `save_adapter` wrote into the adapter of a sharded peft model; collective.

    Args:
        model: A peft model with an adapter of the same config.
        folder: With `adapter_model.safetensors` and `adapter_config.json`; the same for all ranks.
        adapter_name: The adapter to load into.
        strict: As of `load_hf`.
        group: The ranks that hold the model; None: all.

    Returns:
        What was loaded and what was not; the same on every rank.

    Raises:
        CheckpointError: As of `load_hf`, or the stored adapter is configured otherwise.
        ConfigurationError: The model has no such adapter.
    """
    module, folder = _peft_model(model, adapter_name), Path(folder)
    own = module.peft_config[adapter_name]
    files = replace(decided_by_first(lambda: _open_adapter(folder, own), f"opening {folder}", group), folder=folder)

    def match() -> Match:
        live = _all_live(module)
        described = adapter_tensors(module, live_shapes(live), adapter_name, False)
        unknown = files.tensors.keys() - described.keys()
        if unknown and has_embeddings(module):  # they may be stored with the adapter
            more = adapter_tensors(module, live_shapes(live), adapter_name, True)
            if unknown & more.keys():
                described = more
        names = {key: tensor.parts[0].name for key, tensor in described.items()}
        stored = {names.get(key, key): tensor for key, tensor in files.tensors.items()}
        wanted = set(names.values())
        return match_tensors(nn.Module(), [tensor for tensor in live if tensor.name in wanted], stored)

    return load_matched(model, together(f"matching {folder} with the model", match, group), files, strict, group)


def adapter_tensors(
    module: Any, shapes: Mapping[str, tuple[int, ...]], adapter_name: str, save_embedding_layers: bool
) -> dict[str, FileTensor]:
    """What peft stores of a model's tensors for an adapter, by key in the file.

    Raises:
        CannotFollowError: peft computes with the weights before it stores them.
        CheckpointError: peft stores nothing.
    """
    from peft.utils import get_peft_model_state_dict

    plain: Any = {name: FileTensor.of(name, shape) for name, shape in shapes.items()}
    found = get_peft_model_state_dict(
        module, state_dict=plain, adapter_name=adapter_name, save_embedding_layers=save_embedding_layers
    )
    if not found or not all(isinstance(value, FileTensor) for value in found.values()):
        raise CheckpointError(f"adapter {adapter_name!r} stores nothing that could be taken from the model's weights")
    return dict(found)


def has_embeddings(module: Any) -> bool:
    """Whether peft would find embeddings to store with an adapter."""
    return hasattr(module.get_base_model(), "get_input_embeddings")


def live_shapes(live: list[LiveTensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of global tensors by name."""
    return {tensor.name: tensor.shape for tensor in live}


def _all_live(module: nn.Module) -> list[LiveTensor]:
    """Every tensor under each of its names: peft chooses one (of a projection that layers share, of a tied weight)."""
    return [
        replace(tensor, name=alias, aliases=(alias,)) for tensor in live_tensors(module) for alias in tensor.aliases
    ]


def _live_of(module: nn.Module, naming: Any) -> list[LiveTensor]:
    live = _all_live(module)
    wanted = {name for tensor in naming(live_shapes(live)).values() for name in tensor.names}
    return [tensor for tensor in live if tensor.name in wanted]


def _peft_model(model: nn.Module, adapter_name: str) -> Any:
    module = unwrap(model)
    configs = getattr(module, "peft_config", None)
    if configs and not hasattr(module, "get_base_model"):
        raise ConfigurationError(
            f"the adapters of this {type(module).__name__} were added by its own add_adapter; only those of "
            "peft.get_peft_model are saved and loaded here, so make the model by that"
        )
    if not configs:
        raise ConfigurationError(
            f"a {type(module).__name__} has no adapters; give a model made by peft.get_peft_model, sharded or not"
        )
    if adapter_name not in configs:
        raise ConfigurationError(f"the model has no adapter {adapter_name!r}; it has {', '.join(sorted(configs))}")
    if getattr(configs[adapter_name], "is_prompt_learning", False):
        raise ConfigurationError(
            f"adapter {adapter_name!r} is a learned prompt ({type(configs[adapter_name]).__name__}), of which peft "
            "stores what it computes; only adapters that add weights to layers (LoRA, IA3, VeRA, ...) are saved and "
            "loaded here"
        )
    return module


def _open_adapter(folder: Path, own: Any) -> WeightFiles:
    files = open_folder(folder, ADAPTER_FILE, None)
    path = folder / CONFIG_FILE
    stored = read_json(path)
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} is no adapter config")
    check_config(stored, plain_config(own), default_config(own), path)
    return files


def _write_config(module: Any, adapter_name: str, folder: Path) -> None:
    """The config as peft's own `save_pretrained` writes it."""
    config = copy.deepcopy(module.peft_config[adapter_name])
    base = module.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
