"""Find gradients that are far larger than ever before, before they are reduced, and say on every rank whose they are.

A gradient is unexpectedly large when its largest magnitude on some rank is above `factor` times the largest that any
rank has seen of that parameter in the backwards before, all of them since the model was wrapped. So the limit never
falls, and it rises with gradients that grow: learning-rate warm-up and weights that start at zero make them grow by a
small factor at a time, which is no alarm. The first `history` backwards in which the parameter has a gradient other
than zero are not judged, so that the limit does not hang on one microbatch. History is not saved with a checkpoint: a
resumed run starts anew.

A backward that raises, by this check or by that for NaN and infinity, leaves no trace in the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.real_values import has_values
from megatron_fsdp.errors import ConfigurationError, LargeGradientError
from megatron_fsdp.runtime.named_ranks import NamedRanks, first_few

FACTOR = 100.0
"""Ordinary spikes of a loss raise gradients by less; a bad sample or a broken kernel, by far more."""

HISTORY = 10
"""Backwards. Fewer are one or two steps of most runs; more would leave the begin of training, when it breaks, alone."""


class LargeGradientCheck:
    """Notes the largest magnitude of each gradient during backward; the ranks compare when it ends.

    Where experts of different ranks have the same local name, they share their history.

    Args:
        names: Every trainable parameter of this rank; expert-parallel ranks may have others, and another number.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.
        device: Where the magnitudes live.
        labels: The unit or bucket of each parameter, for messages.
        factor: How many times the largest magnitude so far is too large; above 1.
        history: Backwards with a gradient other than zero before a parameter is judged; at least 1.

    Raises:
        ConfigurationError: `factor` or `history` is out of range.
    """

    def __init__(
        self,
        names: Sequence[str],
        groups: Sequence[dist.ProcessGroup | None],
        device: torch.device,
        labels: Mapping[str, str] | None = None,
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
        self._position = {name: index for index, name in enumerate(names)}
        self._ranks = NamedRanks(names, labels, groups)
        self._seen = torch.zeros(self._ranks.most, dtype=torch.float32, device=device)  # of this rank, in this backward
        known = dict.fromkeys(name for _, of_rank in self._ranks.everyone for name in of_rank)
        self._place = {name: index for index, name in enumerate(known)}
        self._own = torch.tensor([self._place[name] for name in self._ranks.own], dtype=torch.int64, device=device)
        # Of all ranks, in all backwards that counted:
        self._largest = torch.zeros(len(known), dtype=torch.float32, device=device)
        self._count = torch.zeros(len(known), dtype=torch.int64, device=device)

    def begin(self) -> None:
        """A backward begins; what an earlier one has left, which may have failed, is forgotten."""
        self._seen.zero_()

    def look_at(self, name: str, grad: torch.Tensor) -> None:
        """Note the largest magnitude of a gradient; nothing is read back."""
        if grad.numel():
            position = self._position[name]
            largest = torch.linalg.vector_norm(grad, torch.inf)
            self._seen[position] = torch.maximum(self._seen[position], largest)

    def conclude(self) -> None:
        """Compare over the ranks, then remember. One all-reduce of 4 bytes for each parameter, and one wait for it.

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
        flags, found = [], dict.fromkeys(self._place, 0.0)
        for (_, names), seen in zip(self._ranks.everyone, by_rank, strict=True):
            flags.append([value > limit[self._place[name]] for name, value in zip(names, seen, strict=False)])
            for name, value in zip(names, seen, strict=False):
                found[name] = max(found[name], value)
        large = self._ranks.ranks_by_name(flags)
        worst_first = sorted(large, key=lambda name: found[name] / largest[self._place[name]], reverse=True)
        told = first_few(
            f"{name} on rank {large[name]} has {found[name]:.4g}, and had at most {largest[self._place[name]]:.4g} in "
            f"{count[self._place[name]]} backwards"
            for name in worst_first
        )
        return (
            f"the gradients of {len(large)} parameters are unexpectedly large before reduction, more than "
            f"{self._factor:g} times the largest before: {told} (global ranks, largest magnitudes); look at loss and "
            "data, then call zero_grad and go on or stop"
        )
