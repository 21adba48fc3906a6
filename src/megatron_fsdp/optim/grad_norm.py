"""The norm of all gradients, and clipping by it: one small collective per axis that gradients are sharded over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_fsdp.comm.agreement import Companion
from megatron_fsdp.comm.collectives import has_values
from megatron_fsdp.dtensor.reduction import largest
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import ConfigurationError, NonFiniteNormError
from megatron_fsdp.sharding.units import ROOT_UNIT
from megatron_fsdp.state.statistics import ProcessGroups, local_of, shared_out_over


def clip_gradients(engine: Engine, max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Returns the norm before clipping, a float32 (float64 for float64 gradients) scalar, the same on every rank. Where
    `error_if_nonfinite` lets every rank raise, gradients are as they were.
    """
    dense = engine.rank_meshes[0]
    asked = compared_arguments(
        [*(axis.group for axis in dense.axes), dense.tensor_parallel_group],
        lambda: _check(engine, max_norm, norm_type),
        max_norm=max_norm,
        norm_type=norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    norm_type = norm_type if asked.error is None else 2.0
    shards = _local_shards(engine)
    with engine.observers.during(Phase.NORM, ROOT_UNIT):
        if engine.is_deterministic and norm_type == 2.0:
            norm = exact_norm(shards, engine.device, asked)
        else:
            norm = _total_norm(shards, norm_type, engine.device, asked)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteNormError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; clear "
            "them and go on, or pass error_if_nonfinite=False to scale by it all the same"
        )
    local = [shard for found in shards.values() for shard in found]
    if math.isfinite(max_norm) and local:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if not (factor.is_cpu and has_values(factor) and factor.item() == 1.0):  # reading it costs no device sync
            for device in dict.fromkeys(shard.device for shard in local):  # more than one where a part is offloaded
                torch._foreach_mul_([shard for shard in local if shard.device == device], factor.to(device))
    return norm


def compared_arguments(
    groups: Sequence[dist.ProcessGroup | None], check: Callable[[], None], **given: float | torch.Tensor | str
) -> Companion:
    """Check the arguments of a call that clips; return a `Companion` that compares them over the groups."""
    facts, error = dict[str, str](), None
    try:
        check()
        facts = {name: value if isinstance(value, str) else f"{float(value)}" for name, value in given.items()}
    except Exception as met:  # noqa: BLE001 - told in the collective that the others are in
        error = met
    return Companion("clip_grad_norm_", facts, tuple(group for group in groups if group is not None), error)


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Raise if the limit or the order of the norm is not valid."""
    for name, value in {"max_norm": max_norm, "norm_type": norm_type}.items():
        if not isinstance(value, int | float | torch.Tensor):
            raise ConfigurationError(f"{name}={value!r} is a {type(value).__name__}; give a number")
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type} is not a norm; give a positive number or infinity")
    if not max_norm >= 0:
        raise ConfigurationError(
            f"max_norm={max_norm} is not a limit; give 0 or more (infinity only measures the norm)"
        )


def _check(engine: Engine, max_norm: float, norm_type: float) -> None:
    engine.refuse_late("clip_grad_norm_")
    check_clipping(max_norm, norm_type)
    if engine.is_deterministic and norm_type not in (2.0, math.inf):
        raise ConfigurationError(
            f'norm_type={norm_type} of a model with deterministic="world": only norms 2 and infinity are the same bits '
            "on any number of ranks; give one of them"
        )


def _local_shards(engine: Engine) -> dict[ProcessGroups, list[torch.Tensor]]:
    """Collect this rank's elements of the gradients, by the groups they are sharded over.

    The keys and their order are the same on all ranks, gradient or not.
    """
    shards: dict[ProcessGroups, list[torch.Tensor]] = {}
    for group in engine.groups():
        if group.gradients is None:
            continue
        for index, grad in enumerate(group.grads()):
            found = shards.setdefault(shared_out_over(group, index), [])
            if grad is not None:
                found.append(local_of(grad))
    return shards


def _total_norm(
    shards: dict[ProcessGroups, list[torch.Tensor]],
    norm_type: float,
    device: torch.device,
    asked: Companion | None = None,
) -> torch.Tensor:
    """Compute the norm of all gradients; replicas count once."""
    found = shards or {(): []}
    powers = {groups: sum_of_powers(tensors, norm_type, device) for groups, tensors in found.items()}
    return combine_powers(powers, norm_type, asked)


def combine_powers(
    powers: dict[ProcessGroups, torch.Tensor], norm_type: float, asked: Companion | None = None
) -> torch.Tensor:
    """Reduce each sum over its groups, and return the norm of all of them, the same on all ranks of the groups.

    `powers` are `sum_of_powers` of the shards here, by the groups that they are sharded over; at least one, all on the
    device that the groups communicate from. The keys and their order are the same on all ranks of a group. Sums that
    share a group travel together in one all-reduce, and so does what compares the arguments of the call.
    """
    is_max = math.isinf(norm_type)
    wide = torch.float64 if any(power.dtype == torch.float64 for power in powers.values()) else torch.float32
    found = {groups: power.to(wide) for groups, power in powers.items()}
    known: torch.Tensor | float = 1.0
    if asked is not None:
        # Another rank may ask for another norm; so what all send first is a sum of the same length.
        sent = {groups: torch.zeros_like(power) if is_max else power for groups, power in found.items()}
        *sums, marks = _over_ranks([*sent.items(), (asked.groups, asked.marks(next(iter(sent.values()))))])
        known = asked.check(marks).to(wide)
    if is_max:
        total = torch.stack(_over_ranks(list(found.items()), is_max=True)).max()
    else:
        total = torch.stack(sums if asked is not None else _over_ranks(list(found.items()))).sum() ** (1.0 / norm_type)
    return total * known


def _over_ranks(values: Sequence[tuple[ProcessGroups, torch.Tensor]], is_max: bool = False) -> list[torch.Tensor]:
    """Reduce each tensor over its groups; those that share a group travel together in one all-reduce."""
    found = [value for _, value in values]
    for over in dict.fromkeys(group for groups, _ in values for group in groups):
        places = [place for place, (groups, _) in enumerate(values) if over in groups]
        together = torch.cat([found[place].reshape(-1) for place in places])
        if is_max:
            together = largest(together, (over,))
        else:
            dist.all_reduce(together, group=over)
        parts = together.split([found[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part.view_as(found[place])
    return found


# A float sum depends on its order, and where shards end decides the order. A sum of integers does not: squares are
# rounded to 2**-50 of a power of four above the largest one, and added as integers. The last 52 bits of the float64
# 2**52 + n are the integer n, and the others are the same for all of them: added 2**12 times in an int64 they vanish.

_BITS = 50  # of a square
_ROW = 1 << 12  # squares that are added in one int64
_LOW_BITS = 31  # sums of rows are added in two parts: up to 2**31 rows fit


def exact_norm(
    shards: dict[ProcessGroups, list[torch.Tensor]], device: torch.device, asked: Companion | None = None
) -> torch.Tensor:
    """Compute the 2-norm of all elements, with the same bits however they are sharded."""
    runs = {groups: _runs(tensors) for groups, tensors in shards.items()}
    largest = _total_norm(runs, math.inf, device, asked)
    if not shards:
        return largest
    exponent = torch.frexp(largest.nan_to_num(nan=1.0, posinf=1.0)).exponent
    exponent = exponent.clamp(min=-900)  # else the scale of the smallest float64 would be infinite
    scale = torch.ldexp(torch.ones((), dtype=torch.float64, device=device), _BITS // 2 - exponent)
    sums = {groups: _sum_of_squares(tensors, scale) for groups, tensors in runs.items()}
    high, low = torch.stack(_over_ranks(list(sums.items()))).sum(0).double()
    norm = ((high * 2.0**_LOW_BITS + low).sqrt() / scale).to(largest.dtype)
    return torch.where(largest.isfinite(), norm, largest)


def _sum_of_squares(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Add the rounded squares of all elements times `scale`, each below 2**50; (2,) int64: high and low bits."""
    rows = [torch.zeros(1, dtype=torch.int64, device=scale.device)]
    at_once = 1 << 15 if scale.is_cpu else 1 << 24  # in float64 a quarter MiB, which stays in a CPU's cache
    for block in itertools.chain.from_iterable(tensor.split(at_once) for tensor in tensors if tensor.numel()):
        whole_rows = F.pad(block, (0, -block.numel() % _ROW)) if block.numel() % _ROW else block
        squares = whole_rows.to(scale.device, torch.float64, copy=True).mul_(scale).square_().add_(2.0**52)
        rows.append(squares.view(torch.int64).view(-1, _ROW).sum(1))
    sums = torch.cat(rows)
    return torch.stack([(sums >> _LOW_BITS).sum(), (sums & ((1 << _LOW_BITS) - 1)).sum()])


def _runs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join tensors that lie one behind the other in memory, as the gradients of a group do; views (n,).

    Empty ones stay, as their dtype decides that of the norm on all ranks; they come first.
    """
    runs: list[tuple[torch.Tensor, int]] = []  # the first tensor of each, and the elements of all
    for tensor in sorted((each.detach().reshape(-1) for each in tensors), key=torch.Tensor.data_ptr):
        first, numel = runs[-1] if runs else (tensor, -1)
        is_next = tensor.data_ptr() == first.data_ptr() + numel * first.itemsize and tensor.dtype is first.dtype
        if is_next and tensor.untyped_storage()._cdata == first.untyped_storage()._cdata:
            runs[-1] = first, numel + tensor.numel()
        else:
            runs.append((tensor, tensor.numel()))
    return [first.as_strided((numel,), (1,)) for first, numel in runs]


def sum_of_powers(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum |x|^p over all tensors; the largest |x| for infinity; 0 for none."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    if not filled:
        return torch.zeros((), dtype=wide, device=device)
    found: Sequence[torch.Tensor]
    if math.isinf(norm_type) and all(tensor.is_cpu and tensor.is_floating_point() for tensor in filled):
        # Torch's own infinity norm takes 20 times as long on a CPU.
        found = [torch.stack(torch.aminmax(tensor)).abs().max() for tensor in filled]
    else:
        found = torch._foreach_norm(filled, norm_type, dtype=wide)
    norms = torch.stack([norm.to(device, wide) for norm in found])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
