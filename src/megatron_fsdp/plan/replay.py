"""A simulated training step: the engine's scheduler and executor, driven by a compute profile, on simulated links.

The engine's own `Scheduler` decides what is gathered, reduced and resharded, and when; its own `Executor` carries that
out, with gathered weights and buckets on the meta device; its own layouts give the bytes of a collective. This file
adds a clock, and units whose collectives take time instead of being launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch

from megatron_fsdp.engine.executor import Executor
from megatron_fsdp.engine.memory import CommunicationPool
from megatron_fsdp.engine.plans import GroupPlan, pack_bytes
from megatron_fsdp.engine.schedule import Action, Operation, Scheduler, SyncMode, SyncScope
from megatron_fsdp.engine.unit import TrainedGroup
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Exchange, Segment
from megatron_fsdp.plan.machine import Machine
from megatron_fsdp.plan.setup import ParallelRanks, Setup
from megatron_fsdp.plan.sharded import PlannedModel, PlannedUnit, cast_bytes, held_bytes, host_step_s, step_bytes

INNER, OUTER = "dp_shard", "dp_outer"
_META = torch.device("meta")
_SUM_ITEMSIZE = torch.float32.itemsize  # local sums are at least this wide


@dataclass(frozen=True)
class Transfer:
    """One collective over "dp_shard" or "dp_outer": a gather of a unit's weights, or a reduction of its gradients."""

    axis: str
    is_gather: bool
    unit: int
    sent_bytes: int
    start_s: float
    end_s: float


class Links:
    """The clock of the compute side, and a link per axis, whose collectives follow one another.

    `cost` maps (axis, is of experts, bytes that one rank sends) to seconds; waiting advances the clock.
    """

    def __init__(self, cost: Callable[[str, bool, int], float]) -> None:
        self._cost = cost
        self.restart()

    def restart(self) -> None:
        """Restart at time 0, with nothing in flight."""
        self.now_s = self.exposed_s = 0.0
        self.transfers: list[Transfer] = []
        self._free_s = {INNER: 0.0, OUTER: 0.0}

    def send(self, axis: str, unit: int, sent_bytes: int, *, is_gather: bool, is_expert: bool = False) -> float:
        """Start a collective behind those of the same axis; return its end time."""
        if not sent_bytes:
            return self.now_s
        start = max(self.now_s, self._free_s[axis])
        self._free_s[axis] = end = start + self._cost(axis, is_expert, sent_bytes)
        self.transfers.append(Transfer(axis, is_gather, unit, sent_bytes, start, end))
        return end

    def wait(self, end_s: float) -> None:
        """Advance the compute side to a time."""
        self.exposed_s += max(0.0, end_s - self.now_s)
        self.now_s = max(self.now_s, end_s)


@dataclass(frozen=True)
class Moment:
    """The memory of one rank at one time of a step, beside its constant memory."""

    time_s: float  # since the step began
    label: str  # the event, such as `F3>`, or `step` for the optimizer
    activation_bytes: int
    gathered_bytes: int  # weights, and their kept transposed copies
    reduction_bytes: int  # communication buckets and scratch
    gradient_bytes: int  # main gradients of the units that were reduced since gradients were cleared
    passing_bytes: int  # tensors of reductions on their way, gradients cast for the optimizer, memory of its step

    @property
    def total_bytes(self) -> int:
        """All bytes held at this moment."""
        borrowed = self.gathered_bytes + self.reduction_bytes
        return self.activation_bytes + borrowed + self.gradient_bytes + self.passing_bytes


@dataclass(frozen=True)
class ReplayedStep:
    """One step in the steady state."""

    moments: tuple[Moment, ...]  # in order of time
    transfers: tuple[Transfer, ...]  # all collectives, in order of their start; times since the step began
    seconds: float  # from the first event to the end of the optimizer's step
    compute_s: float  # of these, forward and backward
    exposed_s: float  # of these, waiting for collectives
    borrowed_bytes: int  # the most that gathered weights, buckets and scratch took, each at a time

    @property
    def peak(self) -> Moment:
        """The moment of peak memory; the first of equals."""
        return max(self.moments, key=lambda moment: moment.total_bytes)


def replay_step(
    model: PlannedModel,
    profile: ComputeProfile,
    machine: Machine,
    exchanges: Sequence[Exchange] = (),
    saved_microbatches: float = 0.0,
) -> ReplayedStep:
    """Replay two steps and describe the second, whose order of units is known and whose memory is allocated.

    Each microbatch waits for `exchanges`, and activations of `saved_microbatches` others are alive besides its own.
    """
    replay = _Replay(model, profile, machine, exchanges, saved_microbatches)
    replay.step()
    return replay.step()


# ---- a unit, as the executor sees it: bytes of its collectives, by the engine's plans of its groups ------------------


def _sent_bytes(group: GroupPlan, axis: str, *, is_gather: bool) -> int:
    """Count the bytes that a rank sends over an axis to gather a group's weights, or to reduce its gradients."""
    if axis == INNER:
        ranks, is_cut = group.axis.num_ranks, group.needs_all_gather
        weights, gradients = group.sent_bytes, group.bucket_bytes
    else:  # an inner rank's part
        ranks, is_cut = group.axes[0].num_ranks, group.gathers_outer and group.requires_grad
        weights, gradients = group.sent_bytes // group.axis.num_ranks, group.outer_buffer_bytes
    if is_gather:
        return weights - weights // ranks if is_cut else 0
    passes = 1 if is_cut else 2  # an all-reduce is a reduce-scatter and an all-gather
    return passes * (gradients - gradients // ranks)


def _allocated_across(group: GroupPlan) -> int:
    """Count the bytes that a group's reduction over the outer ranks allocates."""
    outer_buffer = group.outer_buffer_bytes
    allocated = outer_buffer if group.precision.grad_comm != group.precision.main_grads else 0
    if group.gathers_outer:
        allocated += group.received_bytes or outer_buffer // group.axes[0].num_ranks
    return allocated


class _Passing:
    """Transient bytes of shard size, and their peak since the last look."""

    def __init__(self) -> None:
        self._now = self._most = 0

    def add(self, num_bytes: int) -> None:
        """Allocate bytes, or free them with a negative count."""
        self._now += num_bytes
        self._most = max(self._most, self._now)

    def look(self) -> int:
        """Return the peak since the last look, and reset it."""
        most, self._most = self._most, self._now
        return most


_Started = tuple[SimpleNamespace, tuple[()]]
"""A reduction in flight, which `wait` ends, and no memory to keep for it."""


class _Unit:
    """The executor's view of a unit: one group and its gradients stand for all groups of the unit.

    The methods are those of `engine.unit.Unit` and `engine.gradients`; they put collectives on links instead of
    launching them, and count bytes instead of holding tensors.
    """

    def __init__(self, index: int, unit: PlannedUnit, links: Links, passing: _Passing) -> None:
        self.index, self.label, self._links, self._passing = index, unit.name, links, passing
        self.sync_scope = SyncScope.EVERYWHERE  # set for each microbatch
        self.modules, self.group_plans = unit.modules, unit.groups
        groups = unit.groups
        trained = [group for group in groups if group.requires_grad]
        exchanged = [group for group in trained if group.exchanges_inner]
        outer = [group for group in trained if group.outer_buffer_bytes]
        self.groups, self.gradients, self.sharded, self.reduces = (self,), self, (), bool(trained)
        self.trained = (TrainedGroup(0, cast(Any, self), cast(Any, self)),)
        self.reduces_outer = bool(outer)
        self._messages = {
            (axis, is_gather): [
                (_sent_bytes(group, axis, is_gather=is_gather), group.rank_mesh.is_expert) for group in groups
            ]
            for axis in (INNER, OUTER)
            for is_gather in (False, True)
        }
        self.block_bytes = pack_bytes([group.gathered_bytes for group in groups])[1]
        self.bucket_bytes = pack_bytes([group.bucket_bytes for group in groups])[1]
        self.scratch_bytes = pack_bytes([group.scratch_bytes for group in groups])[1]
        self.reads_weights = not (self.block_bytes and all(group.is_looked_up for group in groups))  # in backward
        _, _, self.main_bytes = held_bytes(trained)
        self.cast_bytes = sum(map(cast_bytes, trained))
        self._whole_bytes = sum(group.layout.numel * group.precision.main_grads.itemsize for group in trained)
        self._pending_bytes = sum(group.inner_region.numel * group.precision.main_grads.itemsize for group in outer)
        self._across_bytes = sum(map(_allocated_across, trained))
        narrow = [group for group in exchanged if group.precision.grad_comm.itemsize < _SUM_ITEMSIZE]
        self._local_sum_bytes = max((group.inner_region.numel * _SUM_ITEMSIZE for group in narrow), default=0)
        kept = [info for group in groups if group.keeps_transposed for info in group.spec.parameters]
        self.transposable = {info.name: prod(info.shape) for info in kept}
        self.transposed: dict[str, int] = {}  # bytes of codes that are kept transposed, by name
        self._in_place = all(group.reduces_in_place for group in trained)
        # on a CPU the main gradient is allocated when a reduction is waited for
        self._is_late = not self._in_place and any(group.axis.exchanges_pairwise for group in trained)
        self.main, self.local = self, object()  # the main gradient, and a stand-in for its memory
        self.is_filling = self.has_unreduced_gradient = self.has_partly_reduced = self.has_main = False
        self.fills_main = False
        self.needs_outer_all_gather = False
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, without gradients."""
        self.has_main, self._gathered_s = False, {INNER: 0.0, OUTER: 0.0}

    def _send(self, axis: str, *, is_gather: bool) -> float:
        """Start the collectives of all groups; return the time at which the last one ends."""
        send = partial(self._links.send, axis, self.index, is_gather=is_gather)
        messages = self._messages[axis, is_gather]
        return max((send(sent, is_expert=is_expert) for sent, is_expert in messages), default=0.0)

    def _gather(self, axis: str) -> None:
        self._gathered_s[axis] = max(self._gathered_s[axis], self._send(axis, is_gather=True))

    # ---- weights ------------------------------------------------------------------------------------------------

    def all_gather_outer(self, _stream: object) -> None:
        """All-gather the last optimizer step's changes over the outer axis."""
        if self.needs_outer_all_gather:
            self.needs_outer_all_gather = False
            self._gather(OUTER)

    def wait_for_outer(self) -> None:
        self._links.wait(self._gathered_s[OUTER])

    def unshard(self, _stream: object, _block: object, _copy_stream: object) -> None:
        self.wait_for_outer()
        self._gather(INNER)

    def defers(self, _group_index: int, sync_scope: SyncScope) -> bool:
        """Return True if gradients are kept unreduced."""
        return sync_scope is SyncScope.NOWHERE

    def wait_for_unshard(self) -> None:
        self._links.wait(max(self._gathered_s.values()))

    def reshard(self, loses_memory: bool) -> None:  # noqa: ARG002
        self.transposed.clear()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def slice_of(self, _position: int, block: object) -> object:
        return block

    outer_buffer_of = scratch_of = slice_of

    def fill_main(self, _sharded: object) -> bool:
        """Begin to fill the main gradient; return False if it has a bucket, or memory already."""
        fills = self._in_place and not self.has_main
        if fills:
            self.begin(self.local)
        return fills

    def begin(self, bucket: object) -> None:
        """Allocate gradients: a bucket, the main gradient, or whole gradients if reduction is deferred."""
        self.is_filling, self.fills_main = True, bucket is self.local
        self.has_main |= self.fills_main
        if bucket is None and not self.has_unreduced_gradient:
            self.has_unreduced_gradient = True
            self._passing.add(self._whole_bytes)

    def stop_filling(self) -> None:
        self.is_filling = False

    def reduce(self, *_memory: object) -> _Started:
        """Reduce over the inner ranks."""
        if self.has_unreduced_gradient:
            self._passing.add(-self._whole_bytes)
        self.is_filling = self.has_unreduced_gradient = self.fills_main = False
        if not self.reduces_outer:
            self.has_main |= not self._is_late
        elif not self.has_partly_reduced:
            self.has_partly_reduced = True
            self._passing.add(self._pending_bytes)
        end_s = self._send(INNER, is_gather=False)

        def wait() -> None:
            self._links.wait(end_s)
            self.has_main |= not self.reduces_outer
            self._passing.add(self._local_sum_bytes)
            self._passing.add(-self._local_sum_bytes)

        return SimpleNamespace(wait=wait), ()

    def reduce_outer(self, _stream: object, _sharded: object, _copy_stream: object, block: object) -> _Started:
        """Reduce over the outer ranks; a block of the pool replaces an allocation."""
        self.has_partly_reduced, self.has_main = False, self.has_main or not self._is_late
        allocated = self._across_bytes if block is None else 0
        self._passing.add(allocated)
        end_s = self._send(OUTER, is_gather=False)

        def wait() -> None:
            self._links.wait(end_s)
            self.has_main = True
            self._passing.add(-allocated - self._pending_bytes)

        return SimpleNamespace(wait=wait), ()


# ---- a step ---------------------------------------------------------------------------------------------------------


class _Replay:
    """A replay: the scheduler gets the events of a profile, and the executor carries out its decisions."""

    def __init__(
        self,
        model: PlannedModel,
        profile: ComputeProfile,
        machine: Machine,
        exchanges: Sequence[Exchange],
        saved_microbatches: float,
    ) -> None:
        self._model, self._profile, self._machine = model, profile, machine
        self._setup = setup = model.setup
        self._ranks_of = groups_of(setup.ranks)
        self._exchange_s = _waits(profile, () if setup.overlap_exchanges else exchanges, setup, machine)
        self._saved_bytes = int(profile.kept_bytes * saved_microbatches)
        self._passing, self._links = _Passing(), Links(self._collective_s)
        self._units = [_Unit(index, unit, self._links, self._passing) for index, unit in enumerate(model.units)]
        self._at = {
            path: unit for unit, planned in zip(self._units, model.units, strict=True) for path in planned.modules
        }
        self._owners = {
            info.name: unit for unit in self._units for group in unit.group_plans for info in group.spec.parameters
        }
        self._scheduler = Scheduler(model.memory.schedule)
        pool = CommunicationPool(_META, model.memory.pool)
        self._executor = Executor(cast(Any, self._units), _META, model.memory, pool)
        # The engine sets it, and there is none here.
        self._executor.finalise = self._finalise
        self._mode = SyncMode()
        self._epochs: dict[int, int] = {}

    # ---- durations and memory -----------------------------------------------------------------------------------

    def _collective_s(self, axis: str, is_expert: bool, sent_bytes: int) -> float:
        group = "experts" if is_expert and axis == INNER else axis
        return self._machine.collective_s(sent_bytes, *self._ranks_of[group])

    def _compute_s(self, segment: Segment) -> float:
        fast = segment.product_flops if self._setup.fp8 else 0
        own = self._machine.compute_s(segment.flops, segment.moved_bytes, segment.operators, fast)
        return own + self._exchange_s.get((segment.event, self._profile.unit_names[segment.unit]), 0.0)

    def _optimizer_s(self) -> float:
        """Estimate the time of the optimizer's step and of installing the new weights."""
        passes = self._setup.optimizer.passes_per_param + 1
        moved = sum(
            shard.numel * (passes * shard.precision.main_params.itemsize + shard.precision.compute.itemsize)
            for shard in self._model.local_shards()
            if not shard.is_offloaded
        )
        muon = self._model.muon
        elsewhere = host_step_s(self._model, self._machine)
        return self._machine.compute_s(0, moved) + elsewhere + (0.0 if muon is None else muon.seconds(self._machine))

    def _note(self, label: str, activation_bytes: int) -> None:
        """Record the memory held now, with the peak of transient tensors since the last record."""
        self._moments.append(
            Moment(
                self._links.now_s,
                label,
                activation_bytes,
                self._executor.weight_memory.held_bytes + sum(sum(each.transposed.values()) for each in self._units),
                self._executor.reduction_bytes,
                sum(unit.main_bytes for unit in self._units if unit.has_main),
                self._passing.look() + self._cast_bytes,
            )
        )

    # ---- the events ---------------------------------------------------------------------------------------------

    def step(self) -> ReplayedStep:
        """Replay a step and describe it; nothing is in flight between two steps."""
        self._links.restart()
        self._moments: list[Moment] = []
        self._cast_bytes = 0
        for unit in self._units:
            unit.begin_step()
        for microbatch in range(self._setup.microbatches):
            self._mode = self._setup.mode(is_last=microbatch == self._setup.microbatches - 1)
            for unit in self._units:
                unit.sync_scope = self._mode.sync_scope(self._setup.strategy.shards_gradients)
            for segment in self._profile.segments:
                self._segment(segment)
        borrowed = step_bytes(self._model)
        self._passing.add(borrowed)
        self._note("step", 0)
        self._links.now_s += self._optimizer_s()
        self._passing.add(-borrowed)
        self._passing.look()
        for unit in self._units:
            unit.transposed.clear()
        self._note("stepped", 0)
        self._executor.run(self._scheduler.weights_changed())
        for unit in self._units:
            unit.wait_for_outer()
            unit.needs_outer_all_gather = True
        return ReplayedStep(
            tuple(self._moments),
            tuple(self._links.transfers),
            self._links.now_s,
            self._setup.microbatches * sum(map(self._compute_s, self._profile.segments)),
            self._links.exposed_s,
            self._executor.transient_bytes,
        )

    def _segment(self, segment: Segment) -> None:
        self._passing.look()
        self._event(segment.event, self._at[self._profile.unit_names[segment.unit]])
        self._note(str(segment), segment.begin_bytes + self._saved_bytes)
        self._links.now_s += self._compute_s(segment)
        for owner in (self._owners[name] for name in segment.gradients):
            if not owner.is_filling:
                self._scheduler.gradient_arrives(owner.index)
                self._executor.open_bucket(cast(Any, owner), 0)
        for name in segment.multiplied:
            owner = self._owners[name]
            if name in owner.transposable:
                owner.transposed[name] = owner.transposable[name]
        if segment.peak_bytes > segment.begin_bytes:
            self._note(f"{segment}+", segment.peak_bytes + self._saved_bytes)

    def _event(self, event: Event, unit: _Unit) -> None:
        """Pass an event to the scheduler, like the engine's hooks."""
        scheduler = self._scheduler
        if event is Event.FORWARD_BEGINS:
            if not scheduler.in_forward and not scheduler.in_backward:
                self._executor.all_gather_outer()
            self._executor.run(scheduler.forward_begins(unit.index))
        elif event is Event.FORWARD_ENDS:
            self._epochs[unit.index] = scheduler.forward_ends(unit.index, needs_backward=True)[0]
            if not scheduler.in_forward and not scheduler.in_backward:
                self._executor.wait_for_outer()
        elif event is Event.BACKWARD_BEGINS:
            self._executor.run(scheduler.backward_begins(unit.index, self._epochs[unit.index], unit.reads_weights))
        elif event is Event.BACKWARD_ENDS:
            self._executor.run(scheduler.backward_ends())

    def _finalise(self) -> None:
        """Sync gradients if this microbatch does, after the reductions in flight."""
        if not self._mode.syncs:
            return
        for unit in reversed(self._units):
            if unit.has_unreduced_gradient:
                self._executor.run((Operation(Action.REDUCE, unit.index),))
            else:
                self._executor.reduce_outer(cast(Any, unit))
        self._executor.retire_all()
        self._cast_bytes = sum(unit.cast_bytes for unit in self._units)


# ---- collectives of model parallelism -------------------------------------------------------------------------------


def groups_of(ranks: ParallelRanks) -> Mapping[str, tuple[int, int]]:
    """Return the ranks of a group and the distance of its neighbours in the numbering of all ranks, for each axis.

    Ranks are numbered along tp first, then along cp and dp_shard, dp_outer, pp. Experts are divided over neighbours of
    the sharding axis ("ep"); the ranks that shard the parameters of one expert are further apart ("experts").
    """
    stride = ranks.tp
    outer = stride * ranks.inner
    return {
        "tp": (ranks.tp, 1),
        "cp": (ranks.cp, stride),
        "ep": (ranks.ep, stride),
        "experts": (ranks.inner // ranks.ep, stride * ranks.ep),
        INNER: (ranks.inner, stride),
        OUTER: (ranks.dp_outer, outer),
        "pp": (2 if ranks.pp > 1 else 1, outer * ranks.dp_outer),
    }


def exchange_s(exchange: Exchange, setup: Setup, machine: Machine) -> float:
    """Estimate the seconds of one collective of model parallelism."""
    cost = machine.all_to_all_s if exchange.axis == "ep" else machine.collective_s
    return cost(exchange.sent_bytes, *groups_of(setup.ranks)[exchange.axis])


def _waits(
    profile: ComputeProfile, exchanges: Iterable[Exchange], setup: Setup, machine: Machine
) -> Mapping[tuple[Event, str], float]:
    """Add up the seconds of exchanges by the event at which a unit waits; by default the root."""
    found: dict[tuple[Event, str], float] = {}
    for exchange in exchanges:
        around = (unit for unit in profile.unit_names if unit and f"{exchange.unit}.".startswith(f"{unit}."))
        key = Event.BACKWARD_BEGINS if exchange.in_backward else Event.FORWARD_BEGINS, next(around, "")
        found[key] = found.get(key, 0.0) + exchange.count * exchange_s(exchange, setup, machine)
    return found
