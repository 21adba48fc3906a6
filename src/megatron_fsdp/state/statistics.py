"""Statistics and digests of parameters and gradients from their shards: one small collective per set of ranks.

Before it, ranks agree that all have had memory for their part.

*Statistics*: each rank describes its shards by nine numbers per tensor; these are gathered and merged on every rank in
rank order:

    mean = sum(n_r * mean_r) / n        m2 = sum(m2_r) + sum(n_r * (mean_r - mean)^2)

(Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979), which
keeps the accuracy of two passes. Everything is computed in float64; padding is no part of any shard.

*Digests*: 64 bits that depend on every bit of the whole tensors, and on no cut. Each element is read as an integer,
times an odd weight that its tensor's name and its place decide; the digest is the sum modulo 2**64. So the ranks'
digests add up, whatever the shards and the strategy. A change of a single bit always changes it; changes of several do,
but for one in about 2**64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import Groups, all_agree
from megatron_fsdp.comm.fingerprint import digest
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.sharding.placement import Placement
from megatron_fsdp.sharding.units import ROOT_UNIT

ProcessGroups = tuple[dist.ProcessGroup, ...]

_COLUMNS = 9  # numel, finite, mean, m2, sum of squares, min, max, zeros, NaN


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor, or of all together.

    Mean, std, norm, min and max are over finite elements; without any the norm is 0.0 and the others are NaN.
    """

    numel: int
    mean: float
    std: float  # of the population: divided by the count, as `torch.std(correction=0)`
    norm: float  # 2-norm
    min: float
    max: float
    zero_fraction: float  # of all elements; NaN where there are none
    nan_count: int
    inf_count: int


@dataclass(frozen=True)
class ModelStatistics:
    """Statistics of all parameters or gradients; the same on every rank."""

    # by canonical name of the parameter; a tied one once, gradients that are None not at all
    tensors: dict[str, TensorStatistics]
    total: TensorStatistics  # of all elements together


Locals = Callable[[ParameterGroup], Sequence[torch.Tensor | None]]
"""Returns this rank's part of each parameter of a group, or of its gradient."""


def _weights(group: ParameterGroup) -> list[torch.Tensor]:
    return [group.weights.main.local_shard(index) for index in range(len(group.sharded))]


def _grads(group: ParameterGroup) -> list[torch.Tensor | None]:
    return [None if grad is None else local_of(grad) for grad in group.grads()]


def parameter_statistics(engine: Engine) -> ModelStatistics:
    """Compute the statistics of all main weights. Collective.

    Traffic: 72 bytes per parameter tensor and rank, none where every rank holds everything. Memory: the largest shard
    a few times in float64.
    """
    return _statistics(engine, _weights)


def gradient_statistics(engine: Engine) -> ModelStatistics:
    """Compute the statistics of the gradients of trainable parameters. Collective; costs as `parameter_statistics`."""
    return _statistics(engine, _grads)


def _statistics(engine: Engine, locals_of: Locals) -> ModelStatistics:
    rows: dict[ProcessGroups, list[torch.Tensor]] = {}
    names: dict[ProcessGroups, list[str | None]] = {}  # None where there is no tensor
    merged: dict[str, torch.Tensor] = {}
    with engine.observers.during(Phase.WHOLE, ROOT_UNIT):
        with all_agree("computing statistics", calling_together(engine)):
            for group in engine.groups():
                for index, local in enumerate(locals_of(group)):
                    ranks = shared_out_over(group, index)
                    rows.setdefault(ranks, []).append(_row(local, group.plan.device))
                    names.setdefault(ranks, []).append(None if local is None else group.names[index])
        for ranks, own in rows.items():
            gathered = zip(names[ranks], gather_rows(ranks, torch.stack(own)).unbind(1), strict=True)
            merged.update((name, found) for name, found in gathered if name is not None)
    every = torch.cat(list(merged.values())) if merged else torch.zeros(0, _COLUMNS, dtype=torch.float64)
    return ModelStatistics({name: _merge(found) for name, found in merged.items()}, _merge(every))


def gather_rows(groups: Sequence[dist.ProcessGroup], rows: torch.Tensor) -> torch.Tensor:
    """All-gather a tensor whose shape is the same on every rank, as (ranks, *shape) on the CPU. Collective."""
    gathered = rows.unsqueeze(0)
    for group in groups:
        parts = [torch.empty_like(gathered) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, gathered, group=group)
        gathered = torch.cat(parts)
    return gathered.cpu()


@torch.no_grad()
def _row(local: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Compute the row of one local shard, (columns,) in float64 on the device of its group, without a device sync."""
    if local is None or local.numel() == 0:
        return torch.zeros(_COLUMNS, dtype=torch.float64, device=device)
    values = (torch.view_as_real(local) if local.is_complex() else local).reshape(-1).double()
    is_finite = torch.isfinite(values)
    count = is_finite.sum(dtype=torch.float64)
    finite = torch.where(is_finite, values, 0.0)
    mean = finite.sum() / count.clamp(min=1.0)
    deviation = torch.where(is_finite, values - mean, 0.0)
    return torch.stack(
        [
            torch.full_like(count, values.numel()),
            count,
            mean,
            deviation.square().sum(),
            finite.square().sum(),
            torch.where(is_finite, values, math.inf).min(),
            torch.where(is_finite, values, -math.inf).max(),
            (values == 0).sum(dtype=torch.float64),
            values.isnan().sum(dtype=torch.float64),
        ]
    )


def _merge(rows: torch.Tensor) -> TensorStatistics:
    """Merge the rows of disjoint shards, (shards, columns), into one."""
    numels, counts, means, m2s, squares, minima, maxima, zeros, nans = rows.unbind(1)
    numel, count, nan_count = int(numels.sum()), counts.sum().item(), int(nans.sum())
    if count == 0:
        mean = std = low = high = math.nan
    else:
        mean = ((counts * means).sum() / count).item()
        std = math.sqrt((m2s.sum() + (counts * (means - mean).square()).sum()).item() / count)
        low, high = minima[counts > 0].min().item(), maxima[counts > 0].max().item()
    return TensorStatistics(
        numel=numel,
        mean=mean,
        std=std,
        norm=math.sqrt(squares.sum().item()),
        min=low,
        max=high,
        zero_fraction=zeros.sum().item() / numel if numel else math.nan,
        nan_count=nan_count,
        inf_count=numel - int(count) - nan_count,
    )


def parameter_digests(engine: Engine) -> dict[str, str]:
    """Return the digest of the main weights of each unit. Collective: 8 bytes per unit."""
    return _digests(engine, _weights)


def gradient_digests(engine: Engine) -> dict[str, str]:
    """Return the digest of the gradients of each unit, as `parameter_digests`; None adds nothing."""
    return _digests(engine, _grads)


def _digests(engine: Engine, locals_of: Locals) -> dict[str, str]:
    labels = [unit.label for unit in engine.units]
    sums: dict[ProcessGroups, torch.Tensor] = {(): torch.zeros(len(labels), dtype=torch.int64, device=engine.device)}
    with engine.observers.during(Phase.WHOLE, ROOT_UNIT):
        with all_agree("computing digests", calling_together(engine)):
            for position, unit in enumerate(engine.units):
                for group in unit.groups:
                    for index, local in enumerate(locals_of(group)):
                        over = shared_out_over(group, index)
                        found = sums.setdefault(over, torch.zeros_like(sums[()]))
                        if local is not None:
                            start, _ = group.plan.layout.range_in(index, group.plan.main_region)
                            found[position] += digest(local, group.names[index], start)
        for over, found in sums.items():
            for ranks in over:
                dist.all_reduce(found, group=ranks)
    total = torch.stack(list(sums.values())).sum(0)
    return {label: f"{value & (1 << 64) - 1:016x}" for label, value in zip(labels, total.tolist(), strict=True)}


def calling_together(engine: Engine) -> Groups:
    """Return the groups of the ranks that call together; None is this one alone, where each holds everything."""
    is_cut = any(shared_out_over(group, index) for group in engine.groups() for index in range(len(group.names)))
    return engine.reaching_all if is_cut else (None,)


def shared_out_over(group: ParameterGroup, index: int) -> ProcessGroups:
    """Return the process groups over which a main weight, or its gradient after the sync, has to be reduced.

    Along each the ranks hold different shards; all other ranks hold copies. The same on every rank. For experts the
    groups along which experts differ are among them.
    """
    plan = group.plan
    over = [
        axis.group
        for axis, placement in zip(plan.axes, plan.placements.main_weight, strict=True)
        if placement is Placement.SHARD and axis.group is not None
    ]
    part = plan.parts[index]
    if part is not None and part.is_cut:
        over.append(part.mesh.get_group())
    over += plan.rank_mesh.foreign_groups
    return tuple(over)


def local_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the local tensor."""
    return grad._local_tensor if isinstance(grad, DTensor) else grad
