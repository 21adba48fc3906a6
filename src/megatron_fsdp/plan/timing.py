"""From a machine's figures to the durations that a replay needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Segment
from megatron_fsdp.plan.machine import Machine
from megatron_fsdp.plan.memory import step_bytes
from megatron_fsdp.plan.planned_model import PlannedModel
from megatron_fsdp.plan.replay import StepCosts
from megatron_fsdp.plan.setup import ParallelRanks, Setup
from megatron_fsdp.plan.wires import Cost, Wire
from megatron_fsdp.plan.workload import Exchange, Workload, unit_around
from megatron_fsdp.sharding.accounting import passing_bytes
from megatron_fsdp.sharding.placement import Placement

Group = tuple[int, int]
"""(ranks of a group, distance of its neighbours in the numbering of all ranks)."""


def groups_of(ranks: ParallelRanks) -> Mapping[str, Group]:
    """How the ranks of each axis lie: neighbours along tp, then along cp and dp_shard, dp_outer, pp.

    Experts are divided over neighbours of the sharding axis ("ep"), and what divides the parameters of one expert are
    ranks that are so much further apart ("experts").
    """
    stride = ranks.tp
    outer = stride * ranks.inner
    return {
        "tp": (ranks.tp, 1),
        "cp": (ranks.cp, stride),
        "ep": (ranks.ep, stride),
        "experts": (ranks.inner // ranks.ep, stride * ranks.ep),
        "inner": (ranks.inner, stride),
        "outer": (ranks.dp_outer, outer),
        "pp": (2 if ranks.pp > 1 else 1, outer * ranks.dp_outer),
    }


def step_costs(model: PlannedModel, profile: ComputeProfile, workload: Workload, machine: Machine) -> StepCosts:
    """The durations of one rank on a machine.

    Args:
        model: Its units.
        profile: Its compute.
        workload: Its exchanges.
        machine: What it runs on.
    """
    groups = groups_of(model.setup.ranks)

    def transfer(wire: Wire, sent_bytes: int, is_expert: bool) -> float:
        name = "outer" if wire is Wire.OUTER else "experts" if is_expert else "inner"
        return machine.collective_s(sent_bytes, *groups[name])

    waits = _exchange_seconds(workload.exchanges, profile.unit_names, model.setup, machine)

    def compute(segment: Segment) -> float:
        own = machine.compute_s(segment.flops, segment.moved_bytes, segment.operators)
        unit = profile.unit_names[segment.unit]
        if segment.event is Event.FORWARD_BEGINS:
            own += waits.get((unit, False), 0.0)
        elif segment.event is Event.BACKWARD_BEGINS:
            own += waits.get((unit, True), 0.0)
        return own

    setup = model.setup
    elements = model.optimizer_elements(profile.used)
    moved = sum(setup.optimizer.passes_per_param * part.elements * part.itemsize for part in elements)
    moved += sum(part.elements * (part.itemsize + part.compute_itemsize) for part in elements)
    return StepCosts(
        transfer,
        compute,
        optimizer_s=machine.compute_s(0, moved),
        cast_gradient_bytes=passing_bytes(model.footprints, setup.strategy).cast_grads,
        optimizer_bytes=step_bytes(model, profile.used),
        saved_microbatches=saved_microbatches(setup, workload.stage),
    )


def saved_microbatches(setup: Setup, stage: int) -> int:
    """Microbatches of which a pipeline stage keeps activations besides those of the one that it computes.

    Under 1F1B stage s of p starts p - s microbatches before the first backward (Narayanan et al., Efficient Large-Scale
    Language Model Training, 2021).
    """
    return min(setup.ranks.pp - stage, setup.microbatches) - 1


def _exchange_seconds(
    exchanges: Sequence[Exchange], unit_names: Sequence[str], setup: Setup, machine: Machine
) -> dict[tuple[str, bool], float]:
    """Seconds that forward and backward of each unit wait for collectives of model parallelism."""
    groups = groups_of(setup.ranks)
    found: dict[tuple[str, bool], float] = {}
    for exchange in exchanges:
        seconds = machine.collective_s(exchange.sent_bytes, *groups[exchange.axis])
        unit = unit_around(exchange.unit, unit_names)
        for in_backward, count in enumerate(exchange.runs(setup.recompute)):
            key = (unit, bool(in_backward))
            found[key] = found.get(key, 0.0) + count * seconds
    return found


def tokens_where_hidden(
    model: PlannedModel, profile: ComputeProfile, workload: Workload, machine: Machine
) -> float | None:
    """Tokens per rank and microbatch from which communication of the sharding axis can hide behind compute.

    From then on each unit computes longer than its neighbours' weights and gradients travel: a forward than the next
    gather, a backward than a gather and a reduction. The time of compute is taken to be in proportion to the tokens, as
    it is to samples of the same length. Large ends of a model are left out, as the root is: they come once in a pass,
    and an embedding computes next to nothing. None where nothing travels.
    """
    costs = step_costs(model, profile, workload, machine.but({"operator_s": 0.0}))  # starting takes no more for more
    sharded = model.setup.strategy == 3
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}
    is_backward = False
    for segment in profile.segments:
        is_backward |= segment.event is Event.BACKWARD_BEGINS
        times = backward if is_backward else forward
        times[segment.computing] = times.get(segment.computing, 0.0) + costs.compute(segment)
    needed = []
    for index, unit in enumerate(model.units):
        if not index or unit.is_end:
            continue
        gather = sum(_gather_s(group, costs.transfer) for group in unit.groups)
        reduce = sum(_reduce_s(group, costs.transfer) for group in unit.groups)
        if forward.get(index):
            needed.append(gather / forward[index])
        if backward.get(index):
            needed.append((gather * sharded + reduce) / backward[index])
    longest = max(needed, default=0.0)
    return longest * workload.tokens if longest else None


def _gather_s(group: GroupPlan, transfer: Cost) -> float:
    if not group.needs_all_gather:
        return 0.0
    sent = _sent(group.layout.numel * group.precision.compute.itemsize, group.axis.num_ranks)
    return transfer(Wire.INNER, sent, group.spec.key.is_expert)


def _reduce_s(group: GroupPlan, transfer: Cost) -> float:
    if not group.requires_grad or group.axis.num_ranks == 1:
        return 0.0
    times = 1 if group.placements.main_grad[-1] is Placement.SHARD else 2
    return transfer(Wire.INNER, times * _sent(group.bucket_bytes, group.axis.num_ranks), group.spec.key.is_expert)


def _sent(full_bytes: int, ranks: int) -> int:
    return full_bytes - full_bytes // ranks
