"""Adapters of peft on a model on the meta device.

Adapters are added before the model is made parallel, so that they are divided and sharded with their layers; no weight
has a value then. After the base is filled, the adapters' values are drawn in a copy of the model on the meta device, in
which only they have memory, and every rank keeps its part of them.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from megatron_fsdp.checkpoint.hf.live import LiveTensor, install_weights, keep_local, live_tensors, unwrap
from megatron_fsdp.comm.fingerprint import same_random_numbers
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require

_COPY, _ORIGINAL = ".modules_to_save.", ".original_module."


def add_adapters(model: nn.Module, peft_config: Any) -> nn.Module:
    """Add adapters to a model on the meta device and freeze the rest; random generators are not advanced.

    Returns the `PeftModel`. Adapters have the dtype that peft gives them (float32 if the model has less) and no final
    values yet: `fill_adapters` gives them.
    """
    peft: Any = require("peft", "peft_config")
    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigurationError(f"peft_config is a {type(peft_config).__name__}; give a configuration of peft")
    if peft_config.is_prompt_learning:
        raise ConfigurationError(
            f"peft_config is a {type(peft_config).__name__}, which trains a prompt; give one that adds weights to "
            "layers, such as LoraConfig"
        )
    with torch.random.fork_rng(devices=[]):
        made = _with_adapters(model, peft_config)
    from_weights = [
        name for name, param in made.named_parameters() if param.requires_grad and param.is_meta and _COPY not in name
    ]
    if from_weights:
        raise ConfigurationError(_needs_weights(peft_config, f"{from_weights[0]} has no value without them"))
    return made


def _with_adapters(model: nn.Module, peft_config: Any) -> nn.Module:
    """Build a peft model in which only the adapters have memory and values."""
    import peft

    try:
        with _KeepValues():
            made: nn.Module = peft.get_peft_model(model, copy.deepcopy(peft_config))
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(_needs_weights(peft_config, " ".join(str(error).split()))) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"peft does not take this configuration: {' '.join(str(error).split())}") from error
    return made


def _needs_weights(peft_config: Any, reason: str) -> str:
    return (
        f"this {type(peft_config).__name__} computes first values of adapters from the base model's weights, which are "
        f"read after sharding ({reason[:200]}); call peft.get_peft_model on a model of transformers that has its "
        "weights, and give that to a manager"
    )


class _KeepValues(TorchFunctionMode):
    """Keeps tensors with values in place: peft moves adapters to the device of their layer, here meta."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and not args[0].is_meta:
            here = args[0].device
            args = [here if _is_meta_device(value) else value for value in args]
            kwargs = {name: here if _is_meta_device(value) else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_meta_device(value: Any) -> bool:
    return value == "meta" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "meta"


@contextlib.contextmanager
def without_copies(*models: nn.Module) -> Iterator[None]:
    """Present peft models as their bases inside the block, for loading: copies replace the original modules."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    for module in map(unwrap, models):
        if getattr(module, "peft_config", None):
            from peft.utils import ModulesToSaveWrapper

            for parent in list(module.modules()):
                for name, child in parent._modules.items():
                    if isinstance(child, ModulesToSaveWrapper):
                        swapped.append((parent, name, child))
                        parent._modules[name] = child.get_submodule("original_module")
    try:
        yield
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child


def fill_adapters(model: nn.Module, meta_model: nn.Module, peft_config: Any, device: torch.device) -> None:
    """Give adapters the first values that peft would draw in one process; collective over all ranks.

    `meta_model` is the base on the meta device, before adapters were added; it is consumed. Random states are sent on
    `device`; values are drawn on the CPU.
    """
    groups = [dist.group.WORLD] if dist.group.WORLD is not None else []
    with same_random_numbers(groups, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # given already, when the adapters were added
        drawn = _with_adapters(meta_model, peft_config)
    module = unwrap(model)
    values = {name: param.detach() for name, param in drawn.named_parameters() if not param.is_meta}
    buffers = {name: buffer for name, buffer in drawn.named_buffers() if not buffer.is_meta}
    tensors = [live for live in live_tensors(module) if live.is_parameter]
    by_name = {alias: live for live in tensors for alias in live.aliases}
    filled = []
    with torch.no_grad():
        for live in tensors:
            value = next((values[alias] for alias in live.aliases if alias in values), None)
            if value is None and (original := _original_of(live, by_name)) is not None:
                value = original.tensor.detach()
                value = value.full_tensor() if isinstance(value, DTensor) else value
            if value is not None:
                keep_local(live.local_boxes(), value)
                filled.append(live)
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    install_weights(model, filled)


def _original_of(live: LiveTensor, by_name: dict[str, LiveTensor]) -> LiveTensor | None:
    """Return the weight of which a trained copy of a module was made."""
    for alias in live.aliases:
        before, found, after = alias.partition(_COPY)
        if found:
            return by_name.get(before + _ORIGINAL + after.partition(".")[2])
    return None
