"""The norm of all gradients, and clipping by it: one small collective per axis that gradients are shared out over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.placement import Placement
from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.unit.param_group import ParameterGroup

_Groups = tuple[dist.ProcessGroup, ...]


def clip_gradients(engine: Engine, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        engine: Whose gradients.
        max_norm: The largest norm allowed; infinity only measures.
        norm_type: The p of the p-norm, positive; infinity for the largest absolute value.

    Returns:
        The norm before clipping, a float32 (float64 for float64 gradients) scalar, the same on every rank.

    Raises:
        ConfigurationError: `norm_type` is not positive.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type} is not a norm; give a positive number or infinity.")
    grads = [param.grad for group in engine.groups() for param in group.sharded if param.grad is not None]
    local = [_local(grad) for grad in grads]
    norm = _total_norm(engine, norm_type)
    if math.isfinite(max_norm) and local:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(local, factor.to(local[0].device))
    return norm


def _total_norm(engine: Engine, norm_type: float) -> torch.Tensor:
    """Sum what is shared out over ranks; count what ranks hold copies of once."""
    pieces: dict[_Groups, list[torch.Tensor]] = {}
    for group in engine.groups():
        if group.gradients is None:
            continue
        for index, param in enumerate(group.sharded):  # the keys are the same on all ranks, gradient or not
            found = pieces.setdefault(_shared_out_over(group, index, engine.domain_of(group)), [])
            if param.grad is not None:
                found.append(_local(param.grad))
    if not pieces:
        return torch.zeros((), dtype=torch.float32, device=engine.device)
    powers = {groups: _power(tensors, norm_type, engine.device) for groups, tensors in pieces.items()}
    return _combine(powers, norm_type)


def _combine(powers: dict[_Groups, torch.Tensor], norm_type: float) -> torch.Tensor:
    """Reduce each sum over its groups; sums that share a group travel together."""
    is_max = math.isinf(norm_type)
    wide = torch.float64 if any(power.dtype == torch.float64 for power in powers.values()) else torch.float32
    powers = {groups: power.to(wide) for groups, power in powers.items()}
    for over in dict.fromkeys(group for groups in powers for group in groups):
        together = [groups for groups in powers if over in groups]
        stacked = torch.stack([powers[groups] for groups in together])
        dist.all_reduce(stacked, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=over)
        powers.update(zip(together, stacked.unbind(), strict=True))
    total = torch.stack(list(powers.values()))
    return total.max() if is_max else total.sum() ** (1.0 / norm_type)


def _shared_out_over(group: ParameterGroup, index: int, domain: Domain) -> _Groups:
    """The groups of ranks that hold different pieces of one gradient."""
    plan = group.plan
    over = [
        axis.group
        for axis, placement in zip(plan.axes, plan.placements.main_grad, strict=True)
        if placement is Placement.SHARD and axis.group is not None
    ]
    part = plan.parts[index]
    if part is not None and part.is_cut:
        over.append(part.mesh.get_group())
    if plan.spec.key.is_expert:
        over += domain.foreign_groups
    return tuple(over)


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _power(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |x|^p over all tensors; the largest |x| for infinity; 0 for none."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    if not filled:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(wide) for norm in torch._foreach_norm(filled, norm_type, dtype=wide)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
