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
        full = gather_buffer(group, group.weights.main)
        for index, name in enumerate(group.names):
            result[name] = _whole(group, full, index)
    return result


def full_gradients(engine: Engine) -> dict[str, torch.Tensor | None]:
    """What every trainable parameter shows as its gradient, whole, by canonical name; None where it is None."""
    result: dict[str, torch.Tensor | None] = {}
    for group in engine.groups():
        if group.gradients is None:
            continue
        full = gather_buffer(group, _gradient_buffer(group))
        for index, (name, grad) in enumerate(zip(group.names, group.grads(), strict=True)):
            result[name] = None if grad is None else _whole(group, full, index)
    return result


def gather_buffer(group: ParameterGroup, buffer: FlatBuffer) -> torch.Tensor:
    """A buffer that lies as main weights do, whole (numel,): gathered where it is sharded, else the local tensor."""
    local = buffer.local
    for axis, placement in zip(group.plan.axes, group.plan.placements.main_weight, strict=True):
        if placement is Placement.SHARD and axis.num_ranks > 1:  # outermost first: it was cut last
            full = torch.empty(axis.num_ranks * local.numel(), dtype=local.dtype, device=local.device)
            work = axis.all_gather(full, local)
            if work is not None:
                work.wait()
            local = full
    return local


def _whole(group: ParameterGroup, full: torch.Tensor, index: int) -> torch.Tensor:
    """A copy of tensor `index` of a gathered buffer, put together from the parts of tensor-parallel ranks."""
    value = full_view(group.plan.layout, full, index).clone()
    part = group.plan.parts[index]
    return value if part is None else part.whole(value)


def _gradient_buffer(group: ParameterGroup) -> FlatBuffer:
    plan = group.plan
    assert group.gradients is not None
    buffer = FlatBuffer(plan.layout, group.weights.main.region, group.gradients.shown_dtype, plan.device)
    for index, grad in enumerate(group.grads()):
        if isinstance(grad, DTensor):
            buffer.piece(index).copy_(grad.to_local())
    return buffer
