"""Checks of gradients before they are reduced: NaN and infinity, values far larger than ever before, and copies.

The error on every rank names parameters and ranks. For NaN and infinity gradients are checked twice: as they arrive,
and before they are reduced. A sum of deferred microbatches, or the cast to the dtype of the main gradients or of the
communication, can turn finite values into infinity. Copies of a parameter on tensor-parallel ranks are checked in the
first backwards only, see `ReplicaCheck`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.comm.agreement import gather_over
from megatron_fsdp.comm.collectives import has_values
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.engine.executor import GradientCheck
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, LargeGradientError, NonFiniteGradientError, warn_caller
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.state.statistics import gather_rows

_SHOWN = 8


class CheckByName(GradientCheck):
    """A check with one finding for each parameter. Making one is collective.

    Args:
        labels: The unit or bucket of each parameter of this rank, by its name; an empty one is left out of messages.
            Expert-parallel ranks may have others, and another number.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.
        device: Where findings are kept.
    """

    dtype: torch.dtype  # of a finding

    def __init__(
        self, labels: Mapping[str, str], groups: Sequence[dist.ProcessGroup | None], device: torch.device
    ) -> None:
        self._groups = [group for group in groups if group is not None]
        self._own_index = {name: index for index, name in enumerate(labels)}
        self._own = tuple(f"{name} ({label})" if label else name for name, label in labels.items())
        # global rank and "name (label)" of each parameter, in the order of `gather_rows`
        self._everyone = gather_over(self._groups, (dist.get_rank() if self._groups else 0, self._own))
        most = max(len(names) for _, names in self._everyone)
        # of each parameter of this rank, in this backward, and padding
        self._found = torch.zeros(most, dtype=self.dtype, device=device)

    def begin(self) -> None:
        """Forget the findings."""
        self._found.zero_()

    def _ranks_by_name(self, flags: Sequence[Sequence[bool]]) -> dict[str, list[int]]:
        """Return the global ranks, ascending, that flagged each parameter; unflagged ones are left out."""
        found: dict[str, set[int]] = {}
        for (rank, names), of_rank in zip(self._everyone, flags, strict=True):
            for name, flag in zip(names, of_rank, strict=False):  # flags of fewer names are padded
                if flag:
                    found.setdefault(name, set()).add(rank)
        return {name: sorted(ranks) for name, ranks in found.items()}


def _first_few(findings: Iterable[str]) -> str:
    """Format the first findings, and the number of the others."""
    listed = list(findings)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return "; ".join(listed[:_SHOWN]) + more


# A gradient is unexpectedly large when its amax on some rank is above `factor` times the largest that any
# rank has seen of that parameter in the backwards before, all of them since the model was wrapped. So the limit never
# falls, and it rises with gradients that grow: learning-rate warm-up and weights that start at zero make them grow by a
# small factor at a time, which is no alarm. The first `history` backwards in which the parameter has a gradient other
# than zero are not judged, so that the limit does not depend on one microbatch. History is not saved with a checkpoint:
# a resumed run starts anew.
#
# A backward that raises, by this check or by that for NaN and infinity, leaves no trace in the history.

FACTOR = 100.0
"""Ordinary loss spikes raise gradients by less; a bad sample or a broken kernel, by far more."""

HISTORY = 10
"""Backwards. Fewer are one or two steps of most runs; more would miss the start of training, when it breaks."""


class LargeGradientCheck(CheckByName):
    """Records the amax of each gradient during backward; the ranks compare when it ends.

    Where experts of different ranks have the same local name, they share their history.

    Args:
        labels, groups, device: See `CheckByName`.
        factor: How many times the amax so far is too large; above 1.
        history: Backwards with a gradient other than zero before a parameter is judged; at least 1.
    """

    dtype = torch.float32

    def __init__(
        self,
        labels: Mapping[str, str],
        groups: Sequence[dist.ProcessGroup | None],
        device: torch.device,
        factor: float = FACTOR,
        history: int = HISTORY,
    ) -> None:
        super().__init__(labels, groups, device)
        self._factor, self._history = factor, history
        names = dict.fromkeys(name for _, of_rank in self._everyone for name in of_rank)
        self._index = {name: index for index, name in enumerate(names)}
        self._own_places = torch.tensor([self._index[name] for name in self._own], dtype=torch.int64, device=device)
        # Of all ranks, in all backwards that counted:
        self._largest = torch.zeros(len(names), dtype=torch.float32, device=device)
        self._count = torch.zeros(len(names), dtype=torch.int64, device=device)

    def record(self, name: str, grad: torch.Tensor) -> None:
        """Record the amax of a gradient, without a device sync."""
        if grad.numel():
            index = self._own_index[name]
            self._found[index] = torch.maximum(self._found[index], torch.linalg.vector_norm(grad, torch.inf))

    def conclude(self) -> None:
        """Compare amaxes over the ranks, and keep them. One all-reduce of 4 bytes per parameter, and one wait for it.

        Raises:
            LargeGradientError: The gradient of some rank is unexpectedly large; the message names parameters, ranks,
                values and the largest before, the one that grew most first. NaN is left to the check for it, infinity
                is large.
        """
        values = torch.zeros_like(self._largest)
        values[self._own_places] = self._found[: len(self._own)].nan_to_num(nan=0.0, posinf=torch.inf)
        for group in self._groups:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        most = (self._largest * self._factor).clamp(max=torch.finfo(torch.float32).max)  # infinity is above any limit
        limits = torch.where(self._count >= self._history, most, torch.inf)
        if has_values(values) and bool((values > limits).any()):
            raise LargeGradientError(self._message(limits))
        counts = values.isfinite() & (values > 0)
        self._largest = torch.where(counts, torch.maximum(self._largest, values), self._largest)
        self._count += counts

    def _message(self, limits: torch.Tensor) -> str:
        by_rank = gather_rows(self._groups, self._found).tolist()
        limit = dict(zip(self._index, limits.tolist(), strict=True))
        before = dict(zip(self._index, zip(self._largest.tolist(), self._count.tolist(), strict=True), strict=True))
        flags, found = [], dict.fromkeys(self._index, 0.0)
        for (_, names), values in zip(self._everyone, by_rank, strict=True):
            flags.append([value > limit[name] for name, value in zip(names, values, strict=False)])
            for name, value in zip(names, values, strict=False):
                found[name] = max(found[name], value)
        large = self._ranks_by_name(flags)
        shown = _first_few(
            f"{name} on rank {large[name]} has {found[name]:.4g}, and had at most {before[name][0]:.4g} in "
            f"{before[name][1]} backwards"
            for name in sorted(large, key=lambda name: found[name] / before[name][0], reverse=True)  # worst first
        )
        return (
            f"the gradients of {len(large)} parameters are unexpectedly large before reduction, more than "
            f"{self._factor:g} times the largest before: {shown} (global ranks, largest magnitudes); look at loss and "
            "data, then call zero_grad and go on or stop"
        )


class FiniteCheck(CheckByName):
    """Collects one flag per parameter during backward; the ranks compare them when it ends."""

    dtype = torch.uint8
    sees_buckets = True  # where deferred microbatches, or a cast, can turn finite values into infinity

    def record(self, name: str, grad: torch.Tensor) -> None:
        """Record a flag for a gradient with a value that is not finite, without a device sync."""
        self._found[self._own_index[name]] |= ~torch.isfinite(grad).all()

    def conclude(self) -> None:
        """Compare the flags over the ranks; NaN or infinity on some rank is an error on every rank."""
        by_rank = gather_rows(self._groups, self._found)
        if not has_values(by_rank) or not by_rank.any():
            return
        bad = self._ranks_by_name(by_rank.tolist())
        shown = _first_few(f"{name} on rank {ranks}" for name, ranks in bad.items())
        raise NonFiniteGradientError(
            f"the gradients of {len(bad)} parameters hold NaN or infinity before reduction: {shown} "
            "(global ranks); look at loss and learning rate, then call zero_grad and go on or stop"
        )


# The copies of a parameter that tensor-parallel ranks hold whole stay equal only while their gradients are. Where a
# rank has a part of a gradient that nobody sums, losses look the same on all ranks while the copies drift apart. So the
# first gradients are compared, by sums that a missing part changes by as much as the gradient is large, and kernels
# that add in any order by their rounding.

BACKWARDS = 10
"""The most backwards that are compared; fewer once each parameter had a gradient other than zero."""

_SUMS = 4  # of squares, and with signs of three patterns
_CHUNK_NUMEL = 1 << 20
_SIGN_BITS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)  # odd factors whose multiples have irregular bits (of xxHash)
_OF_LARGEST = 1e-3  # times the tolerance, of the largest gradient of the model: what is below is rounding of zero


class ReplicaCheck(GradientCheck):
    """Compares the gradients of parameters that tensor-parallel ranks hold whole, in the first backwards.

    Args:
        dtypes: The dtype of each such parameter, by name; the same on every rank.
        group: The tensor-parallel ranks.
        others: The groups that reach the other ranks of the model, so that all raise alike.
        device: Where sums are kept.
        warns: Names of parameters of which others may sum the gradients after backward: these are warned of.
    """

    stops_steps = False  # copies that have drifted for a step are no worse than an error without it

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        group: dist.ProcessGroup,
        others: Sequence[dist.ProcessGroup | None],
        device: torch.device,
        warns: Iterable[str] = (),
    ) -> None:
        self._group, self._others = group, [other for other in others if other is not None]
        self._index = {name: index for index, name in enumerate(dtypes)}
        self._warns = frozenset(warns)
        eps = [torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes.values()]
        self._tolerance = torch.tensor(eps, dtype=torch.float64, device=device).mul_(8).clamp_(min=1e-3)
        self._sums = torch.zeros(len(dtypes), _SUMS, dtype=torch.float64, device=device)
        self._has_come = torch.zeros(len(dtypes), dtype=torch.bool, device=device)
        self._left = BACKWARDS
        self.is_done = not dtypes

    def begin(self) -> None:
        """Forget the sums."""
        self._sums.zero_()

    def record(self, name: str, grad: torch.Tensor) -> None:
        """Record sums of a gradient, whose reduction over tensor-parallel ranks is over."""
        if name in self._index and has_values(grad):
            self._sums[self._index[name]] += _sums(grad)

    def conclude(self) -> None:
        """Compare the sums; one all-reduce of 64 bytes per parameter over each group.

        Raises:
            ConfigurationError: Gradients of a parameter differ; the message names parameters and norms.
        """
        if self.is_done:  # there is nothing to compare
            return
        both = torch.stack([-self._sums, self._sums])
        both[:, :, 0] = both[:, :, 0].abs().sqrt() * both[:, :, 0].sign()
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        spread, low, high = (both[0] + both[1]).amax(dim=-1), -both[0, :, 0], both[1, :, 0]
        floor = _OF_LARGEST * high.max()
        facts = torch.stack([spread - self._tolerance * (high + floor), high, -low])
        for group in self._others:
            dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=group)
        if not has_values(facts):
            return
        self._has_come |= facts[1] > 0
        self._left -= bool((facts[1] > 0).any())
        excess, highest, lowest = facts.tolist()
        self._judge({name: (-lowest[i], highest[i]) for name, i in self._index.items() if excess[i] > 0})
        self.is_done = self._left <= 0 or bool(self._has_come.all())

    def _judge(self, differing: Mapping[str, tuple[float, float]]) -> None:
        for is_error in (True, False):
            found = {name: norms for name, norms in differing.items() if (name not in self._warns) is is_error}
            if not found:
                continue
            shown = _first_few(
                f"{name} (norms from {low:.4g} to {high:.4g})" if low < high else name
                for name, (low, high) in found.items()
            )
            text = (
                f"{len(found)} parameters are whole on every tensor-parallel rank, but their gradients differ between "
                f"these ranks: {shown}; each rank seems to have a part of a sum, and the copies would drift apart. "
            )
            if is_error:
                raise ConfigurationError(
                    text + "Sum the gradient: in a tp_plan give the module the style 'replicated_with_grad_allreduce', "
                    "in a forward of your own use to_local(grad_placements=[Partial()]); or divide the parameter"
                )
            warn_caller(text + "Sum them after backward, unless your loop does (Megatron's finalize_model_grads)")


def _sums(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a gradient, and its sums with signs of each pattern; float64."""
    total = torch.zeros(_SUMS, dtype=torch.float64, device=grad.device)
    for number, chunk in enumerate(grad.detach().reshape(-1).split(_CHUNK_NUMEL)):
        values = chunk.to(torch.float64)
        places = torch.arange(values.numel(), device=grad.device) + number
        total[0] += values.square().sum()
        for index, bits in enumerate(_SIGN_BITS, start=1):
            total[index] += (values * (1 - 2 * ((places * bits >> 15) & 1))).sum()
    return total


def make_checks(
    units: Sequence[Unit],
    rank_meshes: Sequence[RankMesh],
    groups: Sequence[dist.ProcessGroup | None],
    device: torch.device,
    options: EngineOptions,
) -> list[GradientCheck]:
    """Make the checks that were asked for, and that of replicas on tensor-parallel ranks. Collective.

    `groups` together reach every rank of the model; the first of `rank_meshes` is that of dense parameters.
    """
    labels = {
        name: unit.label.strip("()")  # messages put it in parentheses
        for unit in units
        for group in unit.groups  # frozen ones too, which may be unfrozen
        for name in group.names
    }
    asked = {FiniteCheck: options.report_nan_in_param_grad, LargeGradientCheck: options.check_for_large_grads}
    checks: list[GradientCheck] = [kind(labels, groups, device) for kind, is_asked in asked.items() if is_asked]
    dense = rank_meshes[0]
    if dense.tensor_parallel_group is not None:
        checks.append(_replica_check(units, dense.tensor_parallel_group, dense.group, device))
    return checks


def _replica_check(
    units: Sequence[Unit], group: dist.ProcessGroup, others: dist.ProcessGroup | None, device: torch.device
) -> ReplicaCheck:
    """Make the check of parameters that tensor-parallel ranks hold whole; ranks have other experts, left out."""
    whole = {
        name: (part, param)
        for unit in units
        for found in unit.groups
        for name, part, param in zip(found.names, found.plan.parts, found.full, strict=True)
        if part is not None and not part.is_cut and not found.plan.rank_mesh.is_expert
    }
    summed_later = ("sequence_parallel", "average_gradients_across_tp_domain")  # Megatron's marks, after backward
    dtypes = {
        name: param.dtype
        for name, (part, param) in whole.items()
        if part.is_dtensor or not any(getattr(param, mark, False) for mark in summed_later)
    }
    warns = [name for name, (part, _) in whole.items() if not part.is_dtensor]
    return ReplicaCheck(dtypes, group, [others], device, warns)
