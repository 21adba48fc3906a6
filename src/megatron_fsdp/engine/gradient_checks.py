"""Checks of gradients before they are reduced: NaN and infinity, and values far larger than ever before.

The error on every rank names parameters and ranks. For NaN and infinity gradients are checked twice: as they arrive,
and before they are reduced. A sum of deferred microbatches, or the cast to the dtype of the main gradients or of the
communication, can turn finite values into infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.comm.agreement import gather_over
from megatron_fsdp.comm.axis import has_values
from megatron_fsdp.errors import ConfigurationError, LargeGradientError, NonFiniteGradientError

_SHOWN = 8


class NamedRanks:
    """The parameters of every rank. Making one is collective.

    Args:
        labels: The unit or bucket of each parameter of this rank, by its name; nothing is said of an empty one.
            Expert-parallel ranks may have others, and another number.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.
    """

    def __init__(self, labels: Mapping[str, str], groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._groups = [group for group in groups if group is not None]
        self.own = tuple(f"{name} ({label})" if label else name for name, label in labels.items())
        # global rank and "name (label)" of each parameter, in `gather`'s order
        self.everyone = gather_over(self._groups, (dist.get_rank() if self._groups else 0, self.own))
        self.most = max(len(of_rank) for _, of_rank in self.everyone)  # parameters of the rank with the most

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather the values of every rank, (ranks, most); `mine` is (most,) on each. Collective."""
        gathered = mine
        for group in self._groups:
            parts = [torch.empty_like(gathered) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, gathered, group=group)
            gathered = torch.cat(parts)
        return gathered.view(len(self.everyone), -1)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest over all ranks, elementwise and in place; the same on every rank. Collective."""
        for group in self._groups:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values

    def ranks_by_name(self, flags: Sequence[Sequence[bool]]) -> dict[str, list[int]]:
        """Return the global ranks, ascending, that flagged each parameter; unflagged ones are left out."""
        found: dict[str, set[int]] = {}
        for (rank, names), of_rank in zip(self.everyone, flags, strict=True):
            for name, flag in zip(names, of_rank, strict=False):  # flags of fewer names are padded
                if flag:
                    found.setdefault(name, set()).add(rank)
        return {name: sorted(ranks) for name, ranks in found.items()}


def first_few(findings: Iterable[str]) -> str:
    """Format the first findings, and how many more there are."""
    listed = list(findings)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return "; ".join(listed[:_SHOWN]) + more


# A gradient is unexpectedly large when its largest magnitude on some rank is above `factor` times the largest that any
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


class LargeGradientCheck:
    """Records the largest magnitude of each gradient during backward; the ranks compare when it ends.

    Where experts of different ranks have the same local name, they share their history.

    Args:
        labels: The unit or bucket of each parameter, for messages; see `NamedRanks`.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.
        device: Device of the magnitudes.
        factor: How many times the largest magnitude so far is too large; above 1.
        history: Backwards with a gradient other than zero before a parameter is judged; at least 1.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        groups: Sequence[dist.ProcessGroup | None],
        device: torch.device,
        factor: float = FACTOR,
        history: int = HISTORY,
    ) -> None:
        if not factor > 1.0 or history < 1:
            raise ConfigurationError(
                f"a check for large gradients got factor={factor} and history={history}; factor has to be above 1 and "
                "history at least 1"
            )
        self._factor = factor
        self._history = history
        self._own_index = {name: index for index, name in enumerate(labels)}
        self._ranks = NamedRanks(labels, groups)
        self._seen = torch.zeros(self._ranks.most, dtype=torch.float32, device=device)  # of this rank, in this backward
        known = dict.fromkeys(name for _, of_rank in self._ranks.everyone for name in of_rank)
        self._index = {name: index for index, name in enumerate(known)}
        self._own = torch.tensor([self._index[name] for name in self._ranks.own], dtype=torch.int64, device=device)
        # Of all ranks, in all backwards that counted:
        self._largest = torch.zeros(len(known), dtype=torch.float32, device=device)
        self._count = torch.zeros(len(known), dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Begin a backward; drop what an earlier one, which may have failed, has left."""
        self._seen.zero_()

    def record(self, name: str, grad: torch.Tensor) -> None:
        """Record the largest magnitude of a gradient, without a device sync."""
        if grad.numel():
            index = self._own_index[name]
            largest = torch.linalg.vector_norm(grad, torch.inf)
            self._seen[index] = torch.maximum(self._seen[index], largest)

    def conclude(self) -> None:
        """Compare over the ranks, then remember. One all-reduce of 4 bytes per parameter, and one wait for it.

        Raises:
            LargeGradientError: The gradient of some rank is unexpectedly large; the message names parameters, ranks,
                values and the largest before, the one that grew most first. NaN is left to the check for it, infinity
                is large.
        """
        values = torch.zeros_like(self._largest)
        values[self._own] = self._seen[: len(self._own)].nan_to_num(nan=0.0, posinf=torch.inf)
        self._ranks.largest(values)
        most = (self._largest * self._factor).clamp(max=torch.finfo(torch.float32).max)  # infinity is above any limit
        limits = torch.where(self._count >= self._history, most, torch.inf)
        if has_values(values) and bool((values > limits).any()):
            raise LargeGradientError(self._message(limits))
        counts = values.isfinite() & (values > 0)
        self._largest = torch.where(counts, torch.maximum(self._largest, values), self._largest)
        self._count += counts

    def _message(self, limits: torch.Tensor) -> str:
        by_rank = self._ranks.gather(self._seen).tolist()
        largest, count, limit = self._largest.tolist(), self._count.tolist(), limits.tolist()
        flags, found = [], dict.fromkeys(self._index, 0.0)
        for (_, names), seen in zip(self._ranks.everyone, by_rank, strict=True):
            flags.append([value > limit[self._index[name]] for name, value in zip(names, seen, strict=False)])
            for name, value in zip(names, seen, strict=False):
                found[name] = max(found[name], value)
        large = self._ranks.ranks_by_name(flags)
        worst_first = sorted(large, key=lambda name: found[name] / largest[self._index[name]], reverse=True)
        shown = first_few(
            f"{name} on rank {large[name]} has {found[name]:.4g}, and had at most {largest[self._index[name]]:.4g} in "
            f"{count[self._index[name]]} backwards"
            for name in worst_first
        )
        return (
            f"the gradients of {len(large)} parameters are unexpectedly large before reduction, more than "
            f"{self._factor:g} times the largest before: {shown} (global ranks, largest magnitudes); look at loss and "
            "data, then call zero_grad and go on or stop"
        )


class FiniteCheck:
    """Collects one flag per parameter during backward; the ranks compare them when it ends."""

    def __init__(
        self, labels: Mapping[str, str], groups: Sequence[dist.ProcessGroup | None], device: torch.device
    ) -> None:
        self._own_index = {name: index for index, name in enumerate(labels)}
        self._ranks = NamedRanks(labels, groups)
        self._flags = torch.zeros(self._ranks.most, dtype=torch.bool, device=device)

    def begin(self) -> None:
        """Begin a backward, or a sync outside of one; drop what an earlier one that failed has left."""
        self._flags.zero_()

    def record(self, name: str, grad: torch.Tensor) -> None:
        """Record whether a gradient holds a value that is not finite, without a device sync."""
        self._flags[self._own_index[name]] |= ~torch.isfinite(grad).all()

    def conclude(self) -> None:
        """Compare the flags over the ranks; NaN or infinity on some rank is an error on every rank."""
        by_rank = self._ranks.gather(self._flags.to(torch.uint8)).bool().cpu()
        if has_values(by_rank) and bool(by_rank.any()):
            raise NonFiniteGradientError(self._message(by_rank.tolist()))

    def _message(self, by_rank: Sequence[Sequence[bool]]) -> str:
        bad = self._ranks.ranks_by_name(by_rank)
        shown = first_few(f"{name} on rank {ranks}" for name, ranks in bad.items())
        return (
            f"the gradients of {len(bad)} parameters hold NaN or infinity before reduction: {shown} "
            "(global ranks); look at loss and learning rate, then call zero_grad and go on or stop"
        )
