"""The tensors of a live model that belong in a checkpoint, under any wrappers and adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.foreign import boxes_here
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

Piece = tuple[Box, torch.Tensor]

_TORCH_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_COPIES = {"modules_to_save", "original_module", "token_adapter", "trainable_tokens_delta"}
"""Modules of peft that hold whole copies of base weights."""


@dataclass(frozen=True)
class LiveTensor:
    """A parameter or persistent buffer of an unwrapped model; several names, the first among them, where it is tied."""

    name: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def as_saved(self) -> torch.Tensor:
        """The tensor as checkpoints have it: of experts divided over ranks, this rank's part of all experts."""
        owner = getattr(self.tensor, "_megatron_fsdp_model", None)
        return self.tensor if owner is None else owner.checkpoint_view(self.name, self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return tuple(self.as_saved.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the main weight."""
        return self.tensor.dtype

    @property
    def is_saved_here(self) -> bool:
        """Whether this rank saves its boxes."""
        tensor = self.as_saved
        return not isinstance(tensor, UnevenDTensor) or tensor.shard_frame.description.is_saved_here

    def pieces(self) -> list[Piece]:
        """Return this rank's non-empty boxes of the global tensor with views of their elements.

        Collective for DTensors that are not of this library.
        """
        tensor = self.as_saved.detach()
        if tensor.device.type == "meta":
            raise CheckpointError(f"{self.name} is on the meta device; initialise the model before loading or saving")
        if not isinstance(tensor, DTensor):
            return [(Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor)] if tensor.numel() else []
        if isinstance(tensor, UnevenDTensor) and tensor.shard_frame.problem is not None:
            raise CheckpointError(tensor.shard_frame.problem)
        local, boxes = tensor._local_tensor, [box for box in boxes_here(tensor) if box.numel]
        if len(boxes) <= 1:
            return [(box, local.view(box.lengths)) for box in boxes]
        parts = local.view(-1).split([box.numel for box in boxes])
        return [(box, part.view(box.lengths)) for box, part in zip(boxes, parts, strict=True)]


def keep_pieces(pieces: Sequence[Piece], full: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into its memory."""
    for box, view in pieces:
        view.copy_(full[box.indices])


# ---- the model inside of wrappers ------------------------------------------------------------------------------------


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of our wrapper and torch's; a model whose only child is called `module` is no wrapper."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {type(model).__name__}; give an nn.Module, sharded or not")
    while True:
        if hasattr(model, "parameter_groups") and not all(
            hasattr(param, "_megatron_fsdp_model") for param in model.parameters()
        ):
            raise ConfigurationError(
                "the model shows full parameters at the moment (inside of a forward, or of full_parameters_context); "
                "load and save outside of that"
            )
        inner = getattr(model, "module", None)
        # Ours cannot be imported into this layer, so it is known by its method.
        is_wrapper = isinstance(model, _TORCH_WRAPPERS) or hasattr(type(model), "install_optimized_model_weights")
        if not is_wrapper or not isinstance(inner, nn.Module):
            return model
        model = inner


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module that torch's `fully_shard` may have wrapped: `LlamaModel`, not `FSDPLlamaModel`."""
    kinds: Any = type(module).__mro__
    found: type[nn.Module] = next(kind for kind in kinds if not issubclass(kind, FSDPModule))
    return found


@contextlib.contextmanager
def with_own_classes(module: nn.Module) -> Iterator[None]:
    """Restore the modules' own classes inside the block: transformers looks conversions up by class name."""
    changed: list[tuple[Any, type]] = [(part, type(part)) for part in module.modules() if isinstance(part, FSDPModule)]
    for part, _ in changed:
        part.__class__ = own_class(part)
    try:
        yield
    finally:
        for part, kind in changed:
            part.__class__ = kind


def install_weights(model: nn.Module, tensors: list[LiveTensor]) -> None:
    """Update the compute weights from the main weights that were written."""
    owners = [getattr(live.tensor, "_megatron_fsdp_model", None) for live in tensors]
    installs = {id(owner.self_reference()): owner for owner in owners if owner is not None}
    for owner in installs.values():
        owner.install_optimized_model_weights()
    install: Any = getattr(model, "install_optimized_model_weights", None)
    if not installs and install is not None:
        install()


# ---- its tensors -----------------------------------------------------------------------------------------------------


def live_tensors(module: nn.Module) -> list[LiveTensor]:
    """List parameters and persistent buffers of an unwrapped model, each once, in the order of its modules."""
    names: dict[int, list[str]] = {}
    first: dict[int, tuple[torch.Tensor, bool]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        lasting = {name: each for name, each in part._buffers.items() if name not in part._non_persistent_buffers_set}
        for name, tensor in chain(part._parameters.items(), lasting.items()):
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
                first.setdefault(id(tensor), (tensor, name in part._parameters))
    told: Any = getattr(module, "all_tied_weights_keys", None)
    tied = told if isinstance(told, dict) else ()  # names that transformers leaves out of files
    found = []
    for key, (tensor, is_parameter) in first.items():
        own = [name for name in names[key] if name not in tied] or names[key]
        found.append(LiveTensor(own[0], tuple(names[key]), tensor, is_parameter))
    return found


def base_tensors(module: nn.Module) -> tuple[nn.Module, list[LiveTensor]]:
    """Return an unwrapped model and its tensors; of a peft model the base, with its names before wrapping."""
    if not getattr(module, "peft_config", None):
        return module, live_tensors(module)
    peft_model: Any = module
    base, tuner_prefix = module, "lora_"
    if hasattr(module, "get_base_model"):  # not where transformers' own add_adapter put them in
        base = peft_model.get_base_model()
        tuner_prefix = str(getattr(peft_model.base_model, "prefix", tuner_prefix))
    added: set[str] = set()  # what adapters have added to layers, as peft's layers list them
    for name, part in base.named_modules():
        listed: Any = (getattr(part, "adapter_layer_names", ()), getattr(part, "other_param_names", ()))
        added.update(f"{name}.{own}" for names in listed if isinstance(names, tuple) for own in names)
    found = []
    for tensor in live_tensors(base):
        parts = tensor.name.split(".")
        if _COPIES.intersection(part for alias in tensor.aliases for part in alias.split(".")):
            raise ConfigurationError(
                f"{tensor.name}: adapters with modules_to_save or trainable tokens hold copies of base weights; load "
                "the base model before adding the adapters"
            )
        is_added = any(".".join(parts[:count]) in added for count in range(1, len(parts) + 1))
        if not is_added and not any(part.startswith(tuner_prefix) for part in parts):
            aliases = tuple(_without_base_layer(alias) for alias in tensor.aliases)
            found.append(replace(tensor, name=_without_base_layer(tensor.name), aliases=aliases))
    return base, found


def _without_base_layer(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")
