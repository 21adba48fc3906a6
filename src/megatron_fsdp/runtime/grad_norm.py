"""The norm of all gradients, and clipping by it: one small collective for the whole model."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import ConfigurationError, NonFiniteNormError
from megatron_fsdp.runtime.engine import Engine


def clip_gradients(engine: Engine, max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        engine: Whose gradients.
        max_norm: The largest norm allowed; infinity only measures.
        norm_type: The p of the p-norm, positive; infinity for the largest absolute value.
        error_if_nonfinite: Raise where the norm is NaN or infinite, in place of scaling by it.

    Returns:
        The norm before clipping, a float32 (float64 for float64 gradients) scalar, the same on every rank.

    Raises:
        ConfigurationError: `norm_type` is not positive.
        NonFiniteNormError: The norm is not finite, on every rank; gradients are as they were.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type} is not a norm; give a positive number or infinity.")
    grads = [grad for group in engine.groups() for grad in group.grads() if grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = _total_norm(engine, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteNormError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; clear "
            "them and go on, or pass error_if_nonfinite=False to scale by it all the same"
        )
    if math.isfinite(max_norm) and local:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(local, factor.to(local[0].device))
    return norm


def _total_norm(engine: Engine, norm_type: float) -> torch.Tensor:
    """Sum what is sharded over ranks; count what every rank holds whole once."""
    device = engine.units[0].groups[0].plan.device if engine.units[0].groups else torch.device("cpu")
    sharded: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    axis = None
    for group in engine.groups():
        device, axis = group.plan.device, group.plan.axis
        for grad in group.grads():
            if grad is not None:
                piece = grad.to_local() if isinstance(grad, DTensor) else grad
                (sharded if group.grads_sharded else whole).append(piece)
    is_max = math.isinf(norm_type)
    part = _power(sharded, norm_type, device)
    if axis is not None and axis.group is not None:
        dist.all_reduce(part, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=axis.group)
    rest = _power(whole, norm_type, device)
    if is_max:
        return torch.maximum(part, rest)
    return (part + rest) ** (1.0 / norm_type)


def _power(tensors: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |x|^p over all tensors; the largest |x| for infinity; 0 for none."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in filled) else torch.float32
    if not filled:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(wide) for norm in torch._foreach_norm(filled, norm_type, dtype=wide)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
