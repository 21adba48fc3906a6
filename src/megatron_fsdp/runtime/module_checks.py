"""What keeps a model from being sharded, told before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.runtime.blueprint import check_can_initialise

EMPTY = "empty"
"""Value of `init_meta`: parameters on the meta device get memory, and their values from the caller afterwards."""


def check_not_wrapped(module: object) -> None:
    """Refuse what is no model, and models that another wrapper takes care of already; no communication.

    Raises:
        ConfigurationError: The model, or a module in it, is sharded or replicated by torch or by this package.
        TypeError: It is no model.
    """
    if not isinstance(module, nn.Module):
        given = f"the class {module.__name__}" if isinstance(module, type) else f"an object of {type(module).__name__}"
        raise TypeError(f"{given} was given where a model is wanted; give a torch.nn.Module")
    for name, part in module.named_modules():
        at = f" at {name}" if name else ""
        if isinstance(part, DistributedDataParallel):
            raise ConfigurationError(
                f"the model{at} is in torch's DistributedDataParallel, which replicates what is to be sharded here; "
                "give the module inside it (.module)"
            )
        if isinstance(part, FSDPModule | FullyShardedDataParallel):
            by = "FSDP2 (torch's fully_shard)" if isinstance(part, FSDPModule) else "FullyShardedDataParallel (FSDP1)"
            raise ConfigurationError(
                f"the model{at} is sharded by {by} already; leave that out and give the plain model"
            )


def check_module(module: nn.Module, init_meta: bool | str = False) -> None:
    """Refuse models that cannot be sharded; no communication.

    Args:
        module: The model.
        init_meta: As in `Switches`.

    Raises:
        ConfigurationError: No parameters, parameters without memory or on several devices, or already sharded.
    """
    check_not_wrapped(module)
    params = dict(module.named_parameters())
    if not params:
        raise ConfigurationError(f"{type(module).__name__} has no parameters; there is nothing to shard")
    sharded = [name for name, param in params.items() if hasattr(param, "_megatron_fsdp_model")]
    if sharded:
        raise ConfigurationError(
            f"the model is sharded already ({len(sharded)} of {len(params)} parameters, such as {sharded[0]}); wrap a "
            "model once"
        )
    lazy = [name for name, param in params.items() if isinstance(param, UninitializedParameter)]
    if lazy:
        raise ConfigurationError(
            f"{len(lazy)} parameters are not initialised yet (such as {lazy[0]}); run one forward before sharding, so "
            "that lazy modules know their shapes"
        )
    _check_meta(module, params, init_meta)
    devices = sorted({str(param.device) for param in params.values() if not param.is_meta})
    if len(devices) > 1:
        examples = ", ".join(
            f"{next(name for name, param in params.items() if str(param.device) == device)} on {device}"
            for device in devices
        )
        raise ConfigurationError(
            f"parameters lie on {len(devices)} devices ({examples}); move the model to one device first"
        )


def _check_meta(module: nn.Module, params: Mapping[str, nn.Parameter], init_meta: bool | str) -> None:
    if init_meta not in (True, False, EMPTY):
        raise ConfigurationError(
            f"init_model_with_meta_device={init_meta!r}; give True, False, or {EMPTY!r} for shards that are filled "
            "afterwards"
        )
    if init_meta == EMPTY:
        return
    if init_meta:
        check_can_initialise(module)
        return
    for kind, tensors in (("parameters", params), ("buffers", dict(module.named_buffers()))):
        meta = [name for name, tensor in tensors.items() if tensor.is_meta]
        if meta:
            raise ConfigurationError(
                f"{len(meta)} of {len(tensors)} {kind} are on the meta device (such as {meta[0]}) and "
                "init_model_with_meta_device is False; set it to let modules initialise themselves, or materialise "
                "the model first"
            )
