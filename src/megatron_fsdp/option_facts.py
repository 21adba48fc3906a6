"""What options are told by: facts of a live model, as plain data. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.weight_plan import WeightAllocator


@dataclass(frozen=True)
class OptionFacts:
    """Facts of one model on one rank.

    Attributes:
        num_ranks: Data-parallel ranks of dense parameters.
        outer_ranks: Of the outer axis; 0: there is none.
        mesh_dims: Names of the mesh's dimensions.
        shard_dim: The one to shard over.
        outer_dim: The outer one.
        tp_dim: The tensor-parallel one.
        tensor_parallel: How many parameters tensor parallelism has cut.
        has_gather_group: Whether gathers run over a second group.
        has_expert_gather_group: The same for experts.
        has_expert_mesh: Whether experts have a mesh of their own.
        experts: How many parameters are experts'.
        device: Where the buffers live.
        strategy: On the sharding axis, 0 to 3.
        outer_strategy: On the outer axis.
        unit_modules: What was given as units, in words.
        unit_source: How units were found.
        units: Besides the root.
        uses_buckets: Whether these are buckets by size.
        init_meta: Of parameters on the meta device.
        policy: The dtypes asked for.
        narrow: Whether any gradient travels or accumulates in 16 bits.
        has_main_copy: Whether any main weight is memory of its own.
        overlap_grad_reduce: As asked for.
        overlap_param_gather: As asked for.
        reduces_early: Whether units are reduced during backward.
        gathers: Whether weights are gathered at all.
        sharded_weights: Whether weights are sharded at rest.
        auto_sync: Whether every backward ends with a sync.
        describes_state: Whether state dicts say which part of a tensor a rank holds.
        checks_finite: Whether gradients are checked for NaN.
        checks_large: For large values.
        averages: Whether the collective averages.
        exchanges: Whether reduce-scatters are built from an all-to-all and a local sum.
        sums_locally: Whether that was asked for.
        bucket_numel: Where parameters outside of units, or all of them, are cut; None: never.
        cut_groups: Whether they were cut.
        per_token: Whether gradients are summed without a factor.
        decouples: Whether gradients are shown as `decoupled_grad`.
        allocator: Of gathered weights.
        idle: Names of the arguments that were given for another allocator, and have no effect under the strategy.
        slots: How many units besides the root are gathered at a time.
        may_grow: Whether that number follows from prefetching.
        forward_depth: Units gathered ahead in forward.
        backward_depth: In backward.
        buckets: Buckets besides that of the root.
        communication_numel: Elements to communicate at once, as asked for.
        fine_grained: Whether modules inside units are units.
        verify_ranks_s: Seconds to wait for a rank in comparisons; 0.0: there are none.
        asks_usage: Whether ranks ask at every sync which parameters were used.
        scales_first: Whether gradients are scaled before they travel.
        fp32_patterns: Of parameters whose gradients accumulate in float32.
        gathers_at_once: Whether a parameter sync only starts gathers.
        gather_mode: When changed weights are gathered into buckets; None for units.
        numel_multiple: What the elements of every group are padded to a multiple of.
        delays_weights: Whether weight gradients are computed at the end of backward.
        fuses: Whether linears were asked to write weight gradients straight into buckets.
        fused_linears: How many do.
    """

    num_ranks: int
    outer_ranks: int
    mesh_dims: tuple[str, ...]
    shard_dim: str
    outer_dim: str | None
    tp_dim: str | None
    tensor_parallel: int
    has_gather_group: bool
    has_expert_gather_group: bool
    has_expert_mesh: bool
    experts: int
    device: str
    strategy: int
    outer_strategy: int
    unit_modules: str
    unit_source: str
    units: int
    uses_buckets: bool
    init_meta: bool | str
    policy: MixedPrecisionPolicy
    narrow: bool
    has_main_copy: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    reduces_early: bool
    gathers: bool
    sharded_weights: bool
    auto_sync: bool
    describes_state: bool
    checks_finite: bool
    checks_large: bool
    averages: bool
    exchanges: bool
    sums_locally: bool
    bucket_numel: int | None
    cut_groups: bool
    per_token: bool
    decouples: bool
    allocator: WeightAllocator
    idle: tuple[str, ...]
    slots: int
    may_grow: bool
    forward_depth: int
    backward_depth: int
    buckets: int
    communication_numel: int | None
    fine_grained: bool
    verify_ranks_s: float
    asks_usage: bool
    scales_first: bool
    fp32_patterns: tuple[str, ...]
    gathers_at_once: bool
    gather_mode: str | None
    numel_multiple: int
    delays_weights: bool
    fuses: bool
    fused_linears: int


@dataclass(frozen=True)
class Effect:
    """Whether an option has one, and which, or why not."""

    is_there: bool
    told: str


def has(told: str) -> Effect:
    """It has this effect."""
    return Effect(True, told)


def none(told: str) -> Effect:
    """It has none, for this reason."""
    return Effect(False, told)


Judge = Callable[[OptionFacts], Effect]
Read = Callable[[OptionFacts], object]


@dataclass(frozen=True)
class Option:
    """One option of a wrapper.

    Attributes:
        name: As the caller writes it.
        default: What leaving it out gives; or (facts) -> that, where it follows from something else.
        read: (facts) -> its value as it was applied.
        judge: (facts) -> its effect.
    """

    name: str
    default: object
    read: Read
    judge: Judge

    def default_in(self, facts: OptionFacts) -> object:
        """What leaving it out gives here."""
        return self.default(facts) if callable(self.default) else self.default
