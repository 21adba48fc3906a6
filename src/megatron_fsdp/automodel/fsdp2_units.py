"""How FSDP2 is laid over a model: every layer a unit, the rest the root, and who gathers whom ahead of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_by_layers(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: CPUOffloadPolicy | None,
    layer_policy: MixedPrecisionPolicy | None = None,
    stays_gathered: bool = False,
) -> list[list[FSDPModule]]:
    """Shard each member of each list of layers, and the rest (embeddings, last norm, head) as the root; in place.

    Args:
        model: Tensor-parallel already, where it is to be.
        mesh: 1-D, or 2-D with the copies first.
        mp_policy: Dtypes.
        layer_policy: Those of the layers, where they differ from the root's.
        offload_policy: None: parameters stay on the device.
        stays_gathered: Keep layers gathered from forward to backward, as pipelines want it, whose microbatches would
            gather them again and again.

    Returns:
        The units of each list, in order.
    """
    options: dict[str, Any] = {"mesh": mesh}
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    lists = [list(found.children()) for found in lists_of_layers(model)]
    for layers in lists:
        for layer in layers:
            is_next_in_backward = layer is layers[-1]
            reshards = not (stays_gathered or is_next_in_backward)
            fully_shard(layer, mp_policy=layer_policy or mp_policy, reshard_after_forward=reshards, **options)
    fully_shard(model, mp_policy=mp_policy, reshard_after_forward=False, **options)
    model.register_forward_pre_hook(_make_room_outside_of_inference_mode, prepend=True)
    model.register_forward_hook(_shard_again_without_backward)
    return [[layer for layer in layers if isinstance(layer, FSDPModule)] for layers in lists]


def policy_between_layers(mp_policy: MixedPrecisionPolicy, has_autocast: bool) -> MixedPrecisionPolicy:
    """Dtypes of layers, where `mp_policy` is that of the whole model.

    Under FSDP2 each unit casts its own outputs. With float32 outputs of the last layer and a head that computes in
    bfloat16, the head would fail, so the layers hand on what they compute in; the next one would cast it back anyway.
    Under autocast, which makes products fit, they hand on `output_dtype`: that is how the residual stream is kept in
    float32.
    """
    if has_autocast or mp_policy.output_dtype is None:
        return mp_policy
    return dataclasses.replace(mp_policy, output_dtype=mp_policy.param_dtype)


def _make_room_outside_of_inference_mode(model: nn.Module, _: Any) -> None:
    """Let the first forward under `torch.inference_mode` not make memory that training cannot write to afterwards."""
    if not torch.is_inference_mode_enabled() or getattr(model, "_has_room", False):
        return
    with torch.inference_mode(mode=False):
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                unit.reshard()
    settable: Any = model
    settable._has_room = True


def _shard_again_without_backward(model: nn.Module, *_: Any) -> None:
    """After evaluation, give back what stays gathered for a backward.

    FSDP2 leaves the root and the last layer gathered: `model.parameters()` then shows whole tensors, and an optimizer
    that is built on them would train nothing.
    """
    if not torch.is_grad_enabled():
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def lists_of_layers(module: nn.Module) -> Iterator[nn.ModuleList | nn.ModuleDict]:
    """The outermost lists of modules that have a forward of their own: not lists of lists, and none inside layers."""
    for child in module.children():
        holds_lists = any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in child.children())
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not holds_lists:
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from lists_of_layers(child)


def chain_prefetches(units: Sequence[FSDPModule], forward_depth: int, backward_depth: int) -> None:
    """Let each unit gather the next ones of its list: in forward those behind it, in backward those before it.

    Args:
        units: In forward order.
        forward_depth: How many; 0: as FSDP2 does by itself.
        backward_depth: The same in backward.
    """
    for index, unit in enumerate(units):
        if forward_depth and (ahead := list(units[index + 1 : index + 1 + forward_depth])):
            unit.set_modules_to_forward_prefetch(ahead)
        if backward_depth and (behind := list(reversed(units[max(index - backward_depth, 0) : index]))):
            unit.set_modules_to_backward_prefetch(behind)
