"""Full tensors out of sharded ones, for checks, exports and people. Collective: every rank has to take part."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.buffer.flat_buffer import FlatBuffer, full_view
from megatron_fsdp.placement import Placement
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.unit.param_group import ParameterGroup


def full_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """All main weights, whole, by canonical name; copies, in their main dtype, group after group.

    Returns:
        On every rank the same tensors. Peak memory: what is returned and one group.
    """
    result: dict[str, torch.Tensor] = {}
    for group in engine.groups():
        full = gather_buffer(group.weights.main)
        for index, name in enumerate(group.names):
            result[name] = full_view(group.plan.layout, full, index).clone()
    return result


def full_gradients(engine: Engine) -> dict[str, torch.Tensor | None]:
    """What every trainable parameter shows as its gradient, whole, by canonical name; None where it is None."""
    result: dict[str, torch.Tensor | None] = {}
    for group in engine.groups():
        if group.gradients is None:
            continue
        full = gather_buffer(_gradient_buffer(group))
        for index, (name, grad) in enumerate(zip(group.names, group.grads(), strict=True)):
            result[name] = None if grad is None else full_view(group.plan.layout, full, index).clone()
    return result


def gather_buffer(buffer: FlatBuffer) -> torch.Tensor:
    """The full buffer (numel,), gathered where it is sharded, else the local tensor itself."""
    if buffer.placement is not Placement.SHARD:
        return buffer.local
    full = torch.empty(buffer.layout.numel, dtype=buffer.local.dtype, device=buffer.local.device)
    work = buffer.axis.all_gather(full, buffer.local)
    if work is not None:
        work.wait()
    return full


def _gradient_buffer(group: ParameterGroup) -> FlatBuffer:
    plan = group.plan
    main = group.weights.main
    assert group.gradients is not None
    buffer = FlatBuffer(plan.layout, plan.axis, main.placement, group.gradients.shown_dtype, plan.device)
    for index, grad in enumerate(group.grads()):
        if isinstance(grad, DTensor):
            buffer.piece(index).copy_(grad.to_local())
    return buffer
