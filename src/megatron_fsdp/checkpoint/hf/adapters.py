"""Adapters of a sharded peft model, in peft's own format."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.hf.files import ADAPTER_FILE, WeightFiles, open_folder
from megatron_fsdp.checkpoint.hf.live import FileTensor, Followed, LiveTensor, live_tensors, unwrap
from megatron_fsdp.checkpoint.hf.loading import Match, load_matched
from megatron_fsdp.checkpoint.hf.saving import Cut, save_files
from megatron_fsdp.checkpoint.report import LoadReport, decided_by_first, together
from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.comm.agreement import agreed, group_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError

_CONFIG_FILE = "adapter_config.json"
_ONE_FILE = 2**62

_ABOUT_THE_FILE = "auto_mapping base_model_name_or_path inference_mode peft_version revision task_type"
_SEEN_BY_NAMES = """
bias exclude_modules layers_pattern layers_to_transform modules_to_save save_indices save_only_topk_weights
save_precomputed_indices save_projection target_modules target_parameters
"""  # they decide which tensors exist, and the names of the stored ones are compared anyhow
_FOR_TRAINING = """
beta1 beta2 corda_config d_initial deltaT eva_config init_logits_std init_theta_d_bound init_v_bound
init_vector_bank_bound lora_ga_config megatron_config megatron_core orth_reg_weight progressbar rank_dropout_scale
runtime_config target_r tfinal tinit total_step
"""  # schedules, first values, and where things run
_HARMLESS = frozenset(f"{_ABOUT_THE_FILE} {_SEEN_BY_NAMES} {_FOR_TRAINING}".split())
"""Fields of peft's configs that do not change the result of the weights; dropouts are recognised by name."""

_INIT_FIELDS = {"init_ia3_weights", "init_lora_weights", "init_weights"}
_PLAIN_INITS = {"eva", "gaussian", "orthogonal"}
"""Other named ones change the weights of the base, or the computation (pissa, olora, loftq, bat)."""


@agreed("saving the adapter", group_of, CheckpointError)
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
    module, folder = peft_model(model, adapter_name), Path(folder)

    choose = partial(adapter_files, module, adapter_name, save_embedding_layers)
    live, described = together(f"preparing to save {folder}", choose, group)
    write_config = partial(_write_config, module, adapter_name)
    save_files(live, lambda _: described, Cut(_ONE_FILE, ADAPTER_FILE), folder, write_config, group)


@agreed("loading the adapter", group_of, CheckpointError)
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
        The report on loaded and other keys; the same on every rank.

    Raises:
        CheckpointError: As of `load_hf`, or the stored adapter has another config.
        ConfigurationError: The model has no such adapter.
    """
    module, folder = peft_model(model, adapter_name), Path(folder)
    own = module.peft_config[adapter_name]

    def open_adapter() -> WeightFiles:
        files = open_folder(folder, ADAPTER_FILE, None)
        check_config(read_json(folder / _CONFIG_FILE), own, folder / _CONFIG_FILE)
        return files

    files = replace(decided_by_first(open_adapter, f"opening {folder}", group), folder=folder)

    def match() -> Match:
        live = _all_live(module)
        described = _adapter_tensors(module, live, adapter_name, False)
        unknown = files.tensors.keys() - described.keys()
        if unknown and hasattr(module.get_base_model(), "get_input_embeddings"):  # they may be stored with the adapter
            more = _adapter_tensors(module, live, adapter_name, True)
            if unknown & more.keys():
                described = more
        names = {key: tensor.parts[0].key for key, tensor in described.items()}
        stored = {names.get(key, key): tensor for key, tensor in files.tensors.items()}
        wanted = set(names.values())
        return Match(nn.Module(), [tensor for tensor in live if tensor.name in wanted], stored)

    return load_matched(model, together(f"matching {folder} with the model", match, group), files, strict, group)


def adapter_files(
    module: Any, adapter_name: str, save_embedding_layers: bool = False
) -> tuple[list[LiveTensor], dict[str, FileTensor]]:
    """Return the live tensors of an adapter, and the file tensors that peft stores of them, by key in the file."""
    live = _all_live(module)
    described = _adapter_tensors(module, live, adapter_name, save_embedding_layers)
    wanted = {name for tensor in described.values() for name in tensor.names}
    return [tensor for tensor in live if tensor.name in wanted], described


def _adapter_tensors(
    module: Any, live: Sequence[LiveTensor], adapter_name: str, save_embedding_layers: bool
) -> dict[str, FileTensor]:
    """Return the file tensors that peft stores for an adapter, by key in the file."""
    from peft.utils import get_peft_model_state_dict

    with Followed({tensor.name: tensor.shape for tensor in live}) as followed:
        found = get_peft_model_state_dict(
            module,
            state_dict=dict(followed.tensors),
            adapter_name=adapter_name,
            save_embedding_layers=save_embedding_layers,
        )
    if not found:
        raise CheckpointError(f"adapter {adapter_name!r} stores nothing that could be taken from the model's weights")
    return {key: followed.file_tensor(tensor) for key, tensor in found.items()}


def _all_live(module: nn.Module) -> list[LiveTensor]:
    """List every tensor under each of its names: peft chooses one of the names of shared or tied weights."""
    return [
        replace(tensor, name=alias, aliases=(alias,)) for tensor in live_tensors(module) for alias in tensor.aliases
    ]


def peft_model(model: nn.Module, adapter_name: str) -> Any:
    """Return the peft model inside of wrappers; raise if it has no such adapter, or one that is not saved here."""
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


def _write_config(module: Any, adapter_name: str, folder: Path) -> None:
    """Write the config as peft's own `save_pretrained` does."""
    config = copy.deepcopy(module.peft_config[adapter_name])
    base = module.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


# ---- whether the same weights compute the same -----------------------------------------------------------------------


def check_config(stored: Any, config: Any, where: object) -> None:
    """Raise for a stored config with which the same weights compute another result than the model's adapter."""
    if not isinstance(stored, dict):
        raise CheckpointError(f"{where} is no adapter config")
    own = config.to_dict()
    kind, known = stored.get("peft_type"), {name: stored[name] for name in own.keys() & stored.keys()}
    if kind != own["peft_type"]:
        theirs = {"peft_type": kind}
    else:
        try:
            theirs = type(config)(**known).to_dict()  # older releases of peft do not know all fields
        except (TypeError, ValueError, ImportError) as error:
            raise CheckpointError(f"{where} is no {type(config).__name__} of the installed peft: {error}") from error
    for name, value in theirs.items():
        if _meaning(name, value) != _meaning(name, own[name]):
            raise CheckpointError(
                f"{where} has {name}={value!r}, and the model's adapter {name}={own[name]!r}, with which the "
                "same weights compute something else; make the adapter with the stored config"
            )
    for name in sorted(stored.keys() - own.keys()):
        meaning = _meaning(name, stored[name])
        if meaning is True or isinstance(meaning, str | list | dict):  # numbers are taken for those of options off
            raise CheckpointError(
                f"{where} has {name}={stored[name]!r}, which the installed peft does not know; install a peft that does"
            )


def _meaning(name: str, value: Any) -> Any:
    """Normalise a value for comparison: None for harmless, disabled and empty ones."""
    if name in _HARMLESS or "dropout" in name:
        return None
    if name in _INIT_FIELDS and (not isinstance(value, str) or value in _PLAIN_INITS):
        return None
    return value or None
