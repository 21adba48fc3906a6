"""The cheapest arrangement that fits: every sensible one is planned, and the fastest that fits is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.machine import Machine
from megatron_fsdp.plan.planning import Plan, plan_workload
from megatron_fsdp.plan.recompute import Recompute
from megatron_fsdp.plan.setup import ParallelRanks, Setup
from megatron_fsdp.plan.workload import Workload

_ALMOST = 1.02  # of the fastest: what is simpler wins


@dataclass(frozen=True)
class Recommendation:
    """What to choose.

    Attributes:
        plans: All that were tried, in the order in which they were tried: simple ones first.
        best: The simplest of those that fit and are at most 2 % slower than the fastest; None where none fits.
    """

    plans: tuple[Plan, ...]
    best: Plan | None

    @property
    def smallest(self) -> Plan:
        """The one that takes least memory."""
        return min(self.plans, key=lambda plan: plan.memory.peak_bytes)


def recommend(
    workload: Workload, setup: Setup, machine: Machine, recomputes: Sequence[Recompute] = ("none", "full")
) -> Recommendation:
    """Plan every strategy on every useful division of the data-parallel ranks, with and without recomputation.

    Args:
        workload: What one rank computes.
        setup: What is given: tensor, context, pipeline and expert ranks, dtypes, optimizer and the number of
            data-parallel ranks; strategies, the division into inner and outer ranks and recomputation are varied.
        machine: What it runs on.
        recomputes: The recomputations to try.

    Raises:
        ConfigurationError: No arrangement is possible at all.
    """
    profiles: dict[Recompute, ComputeProfile] = {}
    plans = []
    problems: list[str] = []
    for recompute in recomputes:
        for candidate in _candidates(setup, machine, recompute):
            try:
                plan = plan_workload(workload, candidate, machine, profiles.get(recompute))
            except ConfigurationError as error:
                problems.append(str(error))
                continue
            profiles[recompute] = plan.profile
            plans.append(plan)
    if not plans:
        raise ConfigurationError(f"nothing can be recommended, since no arrangement is possible: {problems[0]}")
    fitting = [plan for plan in plans if plan.fits]
    fastest = min((plan.step_s for plan in fitting), default=0.0)
    best = next((plan for plan in fitting if plan.step_s <= fastest * _ALMOST), None)
    return Recommendation(tuple(plans), best)


def _candidates(setup: Setup, machine: Machine, recompute: Recompute) -> Iterator[Setup]:
    """Flat strategies first, then hybrid ones with the sharding axis as long as a node, twice that, and so on."""
    data_ranks = setup.ranks.dp_shard * setup.ranks.dp_outer
    for strategy in ShardingStrategy:
        if setup.ranks.ep > 1 and strategy is not ShardingStrategy.optim_grads_params:
            continue  # experts that are divided over ranks are sharded with everything else
        yield setup.but(
            ranks=replace(setup.ranks, dp_shard=data_ranks, dp_outer=1),
            strategy=strategy,
            outer_strategy=ShardingStrategy.no_shard,
            recompute=recompute,
        )
    for inner in _inner_sizes(setup.ranks, machine, data_ranks):
        for outer in (ShardingStrategy.no_shard, ShardingStrategy.optim):
            yield setup.but(
                ranks=replace(setup.ranks, dp_shard=inner, dp_outer=data_ranks // inner),
                strategy=ShardingStrategy.optim_grads_params,
                outer_strategy=outer,
                recompute=recompute,
            )


def _inner_sizes(ranks: ParallelRanks, machine: Machine, data_ranks: int) -> Iterator[int]:
    """Divisors of the data-parallel ranks that fill whole nodes, from one node on in steps of two."""
    inner = max(1, machine.devices_per_node // (ranks.tp * ranks.cp))
    while inner < data_ranks:
        if data_ranks % inner == 0 and (inner * ranks.cp) % ranks.ep == 0 and inner > 1:
            yield inner
        inner *= 2
