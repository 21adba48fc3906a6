"""The factors of a gradient reduction.

Nothing else scales a gradient, but for `GradientReducer.factor`, which makes up for an average that a local sum did not
take, and `unite_gradients`, which averages what a loss outside of forward gives.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class GradientReduction:
    """The reduction of per-rank gradients to the gradient that the optimizer sees.

    The value is ``post_factor * op over the group of (pre_factor * gradient of the rank)``.
    """

    op: Literal["sum", "avg"]  # of each collective of the reduction
    pre_factor: float  # multiplies each rank's whole gradient, once, before the first collective
    post_factor: float  # multiplies the reduced result (or shard), once, after the last collective
    group_size: int = field(default=1, compare=False)  # ranks that an average is taken over
    scales_first: bool = field(default=False, compare=False)  # sums of every dtype are scaled before they travel
    # Whether the gradients of the ranks are added to the accumulated gradient one after another, as one process
    # adds those of its microbatches, and not first to each other.
    one_by_one: bool = False

    @property
    def adds_up(self) -> bool:
        """True if gradients are summed over ranks without a factor, as `calculate_per_token_loss` asks for."""
        return self.op == "sum" and self.pre_factor * self.post_factor == 1.0

    def for_dtype(self, comm_dtype: torch.dtype) -> "GradientReduction":
        """Return the same reduction in another communication dtype; float16 gradients are scaled before the sum."""
        factor = self.pre_factor * self.post_factor
        if comm_dtype == torch.float16:  # an averaging collective may add first and divide afterwards
            factor /= self.group_size if self.op == "avg" else 1
            return replace(self, op="sum", pre_factor=factor, post_factor=1.0, group_size=1)
        if self.op == "avg":
            return self
        factors = (factor, 1.0) if self.scales_first else (1.0, factor)
        return replace(self, op="sum", pre_factor=factors[0], post_factor=factors[1], group_size=1)


def gradient_reduction(
    dp_size: float,
    group_size: int,
    *,
    average_in_collective: bool,
    calculate_per_token_loss: bool,
    comm_dtype: torch.dtype,
    scales_first: bool = False,
) -> GradientReduction:
    """Return the reduce operation and the factors of a gradient reduction.

    Write ``g_r`` for the gradient of rank r, D for ``dp_size`` and G for ``group_size``. The wanted value is:

    * mean (default): ``sum_r(g_r) / D``, over all data-parallel ranks: inner times outer, and times context-parallel
      ranks where they are flattened into those axes. A hybrid reduction runs one collective per axis; G is the product
      of their sizes, ``op`` holds for each of them and the factors are applied once.
    * ``calculate_per_token_loss``: ``sum_r(g_r)``, no factor at all; the loss was divided by the global token count.
    * expert parameters: the sum runs over the G ranks that hold copies of the expert, but the factor stays that of the
      dense parameters, ``sum_r(g_r) / D``: the gradient of an expert's rank already adds up the tokens that the other
      ranks sent to it. So an average over the group must be multiplied by ``G / D``.

    How it is computed:

    * sum, then ``1 / D`` on the result: on a shard this is 1 / G of the work of scaling first.
    * sent in float16: ``1 / D`` first, then the sum, since the plain sum may leave the range of float16 (65504);
      also where the collective was to average, since some back ends add first and divide afterwards.
    * `scales_first` (`gradient_reduce_div_fusion=False`): ``1 / D`` first for every dtype, in the copy into the bucket;
      the sum cannot leave the range of a single gradient, and each summand is rounded once more.
    * ``average_in_collective``: the collective averages, which leaves ``G / D`` (1 for dense parameters).

    Accumulation over microbatches is a sum and has no factor; the caller divides the loss.
    """
    if calculate_per_token_loss:
        if average_in_collective:
            raise ConfigurationError(
                "average_in_collective=True contradicts calculate_per_token_loss=True, which asks for a plain sum; "
                "set one of them to False."
            )
        return GradientReduction("sum", 1.0, 1.0)
    if average_in_collective:
        return GradientReduction("avg", 1.0, group_size / dp_size, group_size).for_dtype(comm_dtype)
    return GradientReduction("sum", 1.0, 1.0 / dp_size, scales_first=scales_first).for_dtype(comm_dtype)
