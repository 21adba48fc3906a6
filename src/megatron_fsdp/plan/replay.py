"""A simulated training step: the engine's scheduler, driven by the events of a compute profile, on simulated wires.

The engine's own `Scheduler` decides what is gathered, reduced and released, and when; gathered weights and buckets live
in its own `WeightMemory` and `BucketPool`, on the meta device; its own layouts say what a collective sends. This file
adds a clock, and the order in which the executor borrows buckets and waits for reductions, which tests compare with the
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.engine.memory import Block, BucketPool, CommunicationPool, WeightMemory, pack_bytes
from megatron_fsdp.engine.schedule import ROOT, Action, Operation, Reach, Scheduler, SyncMode
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Exchange, Segment, unit_around
from megatron_fsdp.plan.machine import Machine
from megatron_fsdp.plan.setup import Backend, ParallelRanks, Setup
from megatron_fsdp.plan.sharded import PlannedModel, PlannedUnit, step_bytes
from megatron_fsdp.sharding.accounting import (
    OUTER_REDUCTIONS,
    GroupFootprint,
    exchange_scratch_bytes,
    outer_step_traffic,
    part_numel,
    passing_bytes,
    pending_bytes,
    persistent_bytes,
    step_traffic,
)
from megatron_fsdp.sharding.memory_plan import Use

INNER, OUTER = "dp_shard", "dp_outer"
_META = torch.device("meta")


@dataclass(frozen=True)
class Transfer:
    """One collective over "dp_shard" or "dp_outer": a gather of a unit's weights, or a reduction of its gradients."""

    axis: str
    is_gather: bool
    unit: int
    sent_bytes: int
    start_s: float
    end_s: float


class Wires:
    """The clock of the compute side, and a wire for each axis, whose collectives follow one another.

    `cost` is (axis, whether of experts, bytes that one rank sends) to seconds; waiting moves the clock.
    """

    def __init__(self, cost: Callable[[str, bool, int], float]) -> None:
        self._cost = cost
        self.now_s = self.exposed_s = 0.0
        self.transfers: list[Transfer] = []
        self._free_s = {INNER: 0.0, OUTER: 0.0}

    def send(self, axis: str, unit: int, sent_bytes: int, *, is_gather: bool, is_expert: bool = False) -> float:
        """Start a collective behind those of the same axis; return the time when it is done."""
        if not sent_bytes:
            return self.now_s
        start = max(self.now_s, self._free_s[axis])
        end = start + self._cost(axis, is_expert, sent_bytes)
        self._free_s[axis] = end
        self.transfers.append(Transfer(axis, is_gather, unit, sent_bytes, start, end))
        return end

    def wait(self, end_s: float) -> None:
        """Let the compute side wait until a time."""
        self.exposed_s += max(0.0, end_s - self.now_s)
        self.now_s = max(self.now_s, end_s)


@dataclass(frozen=True)
class Moment:
    """What one rank holds at one time of a step, beside what it holds at all times."""

    time_s: float  # since the step began
    label: str  # what happens, such as `F3>`, or `step` for the optimizer
    activation_bytes: int
    gathered_bytes: int
    bucket_bytes: int  # communication buckets and scratch
    gradient_bytes: int  # main gradients of the units that were reduced since gradients were cleared
    passing_bytes: int  # tensors of reductions on their way, gradients cast for the optimizer, what its step borrows

    @property
    def total_bytes(self) -> int:
        """All bytes held at this moment."""
        borrowed = self.gathered_bytes + self.bucket_bytes
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
        """The moment at which most is held; the first of equals."""
        return max(self.moments, key=lambda moment: moment.total_bytes)


def replay_step(
    model: PlannedModel,
    profile: ComputeProfile,
    machine: Machine,
    exchanges: Sequence[Exchange] = (),
    saved_microbatches: float = 0.0,
) -> ReplayedStep:
    """Replay two steps and describe the second, whose order of units is known and whose memory is all taken.

    Each microbatch waits for `exchanges`, and activations of `saved_microbatches` others are alive beside its own.
    """
    replay = _Replay(model, profile, machine, exchanges, saved_microbatches)
    replay.step()
    return replay.step()


# ---- what the collectives of a unit send, and what they allocate: by the engine's formulas --------------------------


def _allocated_across(group: GroupFootprint, setup: Setup) -> int:
    """Count the bytes that a group's reduction over the outer ranks allocates."""
    if not group.requires_grad:
        return 0
    on_wire = part_numel(group, setup.strategy) * group.grad_comm.itemsize
    allocated = on_wire if group.grad_comm != group.main_grads else 0
    if group.outer_shares and not group.is_whole:
        allocated += on_wire if setup.backend is Backend.GLOO else on_wire // group.outer_ranks
    return allocated


class _Unit:
    """The sizes of a unit's collectives and gradients, and their current state."""

    def __init__(self, index: int, unit: PlannedUnit, setup: Setup) -> None:
        groups, strategy = [plan.footprint(index) for plan in unit.groups], setup.strategy
        trained = [group for group in groups if group.requires_grad]
        exchanged = [group for group in trained if exchange_scratch_bytes([group], strategy)]
        held, deferred = persistent_bytes(groups, strategy), persistent_bytes(groups, strategy, deferred=True)
        self.index = index
        self.are_experts = [plan.spec.key.is_expert for plan in unit.groups]
        self.traffic = {
            INNER: [step_traffic([group], strategy) for group in groups],
            OUTER: [outer_step_traffic([group], strategy) for group in groups],
        }
        self.allocated_across = sum(_allocated_across(group, setup) for group in groups)
        self.gathered_bytes = pack_bytes([plan.gathered_bytes for plan in unit.groups])[1]
        self.reads_weights = not self.gathered_bytes or not all(
            plan.is_looked_up for plan in unit.groups
        )  # in backward
        self.bucket_bytes = pack_bytes([plan.bucket_bytes for plan in unit.groups])[1]
        self.main_bytes = held.main_grad
        self.whole_bytes = deferred.main_grad - held.main_grad
        self.pending_bytes = pending_bytes(groups, strategy, deferred=True)
        self.local_sum_bytes = passing_bytes(groups, strategy).local_sum
        self.exchanges_inner = setup.backend is Backend.GLOO and bool(exchanged)
        self.crosses = any(group.outer_ranks > 1 for group in trained)
        self.is_filling = self.is_deferred = self.is_pending = self.has_main = self.is_behind = False
        self.gathered_s = self.gathered_outer_s = 0.0


@dataclass(frozen=True)
class _Reduction:
    """A reduction over the inner ranks on its way, and the memory that it borrowed."""

    unit: _Unit
    reach: Reach
    end_s: float
    bucket: Block
    scratch: Block | None


class _Replay:
    """Executes the scheduler's operations on simulated wires, as the executor does on real ones."""

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
        self._units = tuple(_Unit(index, unit, setup) for index, unit in enumerate(model.units))
        self._index = {path: index for index, unit in enumerate(model.units) for path in unit.modules}
        self._owners = {
            info.name: self._units[index]
            for index, unit in enumerate(model.units)
            for group in unit.groups
            for info in group.spec.parameters
        }
        self._scheduler = Scheduler(model.memory.schedule)
        self._memory = CommunicationPool(_META, model.memory.pool)
        self._weights = WeightMemory(model.memory.weights, self._memory)
        buckets = model.memory.buckets
        self._root_bucket = self._pool(1, self._units[: ROOT + 1], Use.ROOT_BUCKET)
        self._buckets = self._pool(buckets, self._units[ROOT + 1 :], Use.BUCKET)
        self._scratch = self._pool(max(1, buckets - 1), self._units, Use.SCRATCH)
        self._pools = (self._root_bucket, self._buckets, self._scratch)
        self._borrowed: dict[int, Block] = {}
        self._in_flight: deque[_Reduction] = deque()
        self._crossing: deque[tuple[float, int]] = deque()
        self._mode = SyncMode()
        self._epochs: dict[int, int] = {}
        self._moments: list[Moment] = []
        self._passing_bytes = self._most_passing_bytes = self._cast_bytes = 0
        self._wires = Wires(self._collective_s)

    def _pool(self, count: int, units: Sequence[_Unit], use: Use) -> BucketPool:
        most = max((unit.bucket_bytes for unit in units), default=0)
        return BucketPool(count, most, self._memory.blocks(use), self._retire_oldest)

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
        passes = self._setup.optimizer.passes_per_param
        moved = 0
        for group, counts in self._model.updated(self._profile.used):
            precision = group.precision
            moved += sum(counts) * ((passes + 1) * precision.main_params.itemsize + precision.compute.itemsize)
        muon = self._model.muon
        return self._machine.compute_s(0, moved) + (0.0 if muon is None else muon.seconds(self._machine))

    def _note(self, label: str, activation_bytes: int) -> None:
        """Record the memory held now, with the peak of transient tensors since the last record."""
        self._moments.append(
            Moment(
                self._wires.now_s,
                label,
                activation_bytes,
                self._weights.held_bytes,
                sum(pool.held_bytes for pool in self._pools),
                sum(unit.main_bytes for unit in self._units if unit.has_main),
                self._most_passing_bytes + self._cast_bytes,
            )
        )
        self._most_passing_bytes = self._passing_bytes

    def _pass(self, num_bytes: int) -> None:
        """Allocate (or, with a negative count, free) shard-sized tensors."""
        self._passing_bytes += num_bytes
        self._most_passing_bytes = max(self._most_passing_bytes, self._passing_bytes)

    # ---- a step -------------------------------------------------------------------------------------------------

    def step(self) -> ReplayedStep:
        """Replay a step and describe it; nothing is on its way between two steps."""
        self._wires, self._moments, self._cast_bytes = Wires(self._collective_s), [], 0
        for unit in self._units:
            unit.has_main, unit.gathered_s, unit.gathered_outer_s = False, 0.0, 0.0
        for microbatch in range(self._setup.microbatches):
            self._mode = self._setup.mode(is_last=microbatch == self._setup.microbatches - 1)
            self._microbatch()
        borrowed = step_bytes(self._model, self._profile.used)
        self._pass(borrowed)
        self._note("step", 0)
        self._wires.now_s += self._optimizer_s()
        self._pass(-borrowed)
        self._most_passing_bytes = self._passing_bytes
        self._note("stepped", 0)
        self._run(self._scheduler.weights_changed())
        for unit in self._units:
            self._wires.wait(unit.gathered_outer_s)
            unit.is_behind = True
        return ReplayedStep(
            tuple(self._moments),
            tuple(self._wires.transfers),
            self._wires.now_s,
            self._setup.microbatches * sum(map(self._compute_s, self._profile.segments)),
            self._wires.exposed_s,
            self._weights.peak_bytes + sum(pool.peak_bytes for pool in self._pools),
        )

    def _microbatch(self) -> None:
        for segment in self._profile.segments:
            self._most_passing_bytes = self._passing_bytes
            self._event(segment.event, self._index[self._profile.unit_names[segment.unit]])
            self._note(str(segment), segment.begin_bytes + self._saved_bytes)
            self._wires.now_s += self._compute_s(segment)
            for name in segment.gradients:
                self._arrive(self._owners[name])
            if segment.peak_bytes > segment.begin_bytes:
                self._note(f"{segment}+", segment.peak_bytes + self._saved_bytes)

    def _event(self, event: Event, unit: int) -> None:
        scheduler = self._scheduler
        if event is Event.FORWARD_BEGINS:
            if not scheduler.in_forward and not scheduler.in_backward:
                for each in self._units:
                    self._gather_across(each)
            self._run(scheduler.forward_begins(unit))
        elif event is Event.FORWARD_ENDS:
            self._epochs[unit] = scheduler.forward_ends(unit, needs_backward=True)
            if not scheduler.in_forward and not scheduler.in_backward:
                for each in self._units:
                    self._wires.wait(each.gathered_outer_s)
        elif event is Event.BACKWARD_BEGINS:
            self._run(scheduler.backward_begins(unit, self._epochs[unit], self._units[unit].reads_weights))
        elif event is Event.BACKWARD_ENDS:
            self._run(scheduler.backward_ends())

    def _arrive(self, unit: _Unit) -> None:
        if not unit.is_filling:
            self._scheduler.gradient_arrives(unit.index)
            self._fill(unit, self._reach)

    @property
    def _reach(self) -> Reach:
        return self._mode.reach(self._setup.strategy >= 2)

    def _run(self, operations: Iterable[Operation]) -> None:
        for action, index, slot in operations:
            unit = self._units[index]
            if action is Action.GATHER:
                self._gather(unit, slot)
            elif action is Action.WAIT:
                self._wires.wait(max(unit.gathered_outer_s, unit.gathered_s))
            elif action is Action.RELEASE:
                self._weights.give_back(index)
            elif action is Action.REDUCE:
                self._reduce(unit, self._reach)
            else:
                self._finish_backward()

    # ---- weights ------------------------------------------------------------------------------------------------

    def _gather_across(self, unit: _Unit) -> None:
        """All-gather over the outer axis what the last optimizer step changed."""
        if unit.is_behind:
            unit.is_behind = False
            unit.gathered_outer_s = max(unit.gathered_outer_s, self._send(OUTER, unit, is_gather=True))

    def _gather(self, unit: _Unit, slot: int | None) -> None:
        self._gather_across(unit)
        if unit.gathered_bytes:
            self._weights.take(unit.index, slot)
        self._wires.wait(unit.gathered_outer_s)
        unit.gathered_s = max(unit.gathered_s, self._send(INNER, unit, is_gather=True))

    def _send(self, axis: str, unit: _Unit, *, is_gather: bool) -> float:
        """Start the collectives of all groups; return the time when the last one is done."""
        return max(
            (
                self._wires.send(
                    axis,
                    unit.index,
                    traffic.gather_bytes if is_gather else traffic.reduce_bytes,
                    is_gather=is_gather,
                    is_expert=is_expert,
                )
                for traffic, is_expert in zip(unit.traffic[axis], unit.are_experts, strict=True)
            ),
            default=0.0,
        )

    # ---- gradients ----------------------------------------------------------------------------------------------

    def _fill(self, unit: _Unit, reach: Reach) -> None:
        """Give a unit's gradients memory: a bucket, or whole gradients where reduction is deferred."""
        unit.is_filling = True
        if unit.is_deferred:
            return
        if reach is Reach.NOWHERE:
            unit.is_deferred = True
            self._pass(unit.whole_bytes)
        else:
            self._bucket(unit)

    def _bucket(self, unit: _Unit) -> Block:
        if unit.index not in self._borrowed:
            self._borrowed[unit.index] = self._pool_of(unit).borrow(unit.bucket_bytes)
        return self._borrowed[unit.index]

    def _pool_of(self, unit: _Unit) -> BucketPool:
        return self._root_bucket if unit.index == ROOT else self._buckets

    def _reduce(self, unit: _Unit, reach: Reach) -> None:
        if reach is Reach.NOWHERE:
            if not unit.is_filling:
                self._fill(unit, reach)
            unit.is_filling = False
            return
        bucket = self._bucket(unit)
        scratch = self._scratch_for(unit)
        if unit.is_deferred:
            self._pass(-unit.whole_bytes)
        unit.is_filling = unit.is_deferred = False
        if not unit.crosses:
            unit.has_main = True
        elif not unit.is_pending:
            unit.is_pending = True
            self._pass(unit.pending_bytes)
        end_s = self._send(INNER, unit, is_gather=False)
        del self._borrowed[unit.index]
        self._in_flight.append(_Reduction(unit, reach, end_s, bucket, scratch))

    def _scratch_for(self, unit: _Unit) -> Block | None:
        if not unit.exchanges_inner:
            return None
        if unit.index == ROOT:
            while self._retire_oldest():
                pass
            self._buckets.empty()
        return self._scratch.borrow(unit.bucket_bytes)

    def _retire_oldest(self) -> bool:
        """Wait for the oldest reduction; return False where none is in flight."""
        if not self._in_flight:
            return False
        done = self._in_flight.popleft()
        self._wires.wait(done.end_s)
        if self._setup.backend is Backend.GLOO:  # one local sum after another
            self._pass(done.unit.local_sum_bytes)
            self._pass(-done.unit.local_sum_bytes)
        self._pool_of(done.unit).give_back(done.bucket)
        if done.scratch is not None:
            self._scratch.give_back(done.scratch)
        if done.reach is Reach.EVERYWHERE:
            self._reduce_across(done.unit)
        return True

    def _reduce_across(self, unit: _Unit) -> None:
        if not unit.is_pending:
            return
        while len(self._crossing) >= OUTER_REDUCTIONS:
            self._finish_crossing()
        unit.is_pending, unit.has_main = False, True
        self._pass(unit.allocated_across)
        end_s = self._send(OUTER, unit, is_gather=False)
        self._crossing.append((end_s, unit.allocated_across + unit.pending_bytes))

    def _finish_crossing(self) -> None:
        end_s, allocated = self._crossing.popleft()
        self._wires.wait(end_s)
        self._pass(-allocated)

    def _retire_all(self) -> None:
        while self._retire_oldest():
            pass
        while self._crossing:
            self._finish_crossing()
        for pool in self._pools:
            pool.empty()

    def _finish_backward(self) -> None:
        """Finish the reductions in flight, and sync gradients if this microbatch does."""
        self._retire_all()
        if not self._mode.syncs:
            return
        for unit in reversed(self._units):
            if unit.is_deferred:
                self._reduce(unit, Reach.EVERYWHERE)
            else:
                self._reduce_across(unit)
        self._retire_all()
        self._cast_bytes = passing_bytes(self._model.footprints, self._setup.strategy).cast_grads


# ---- collectives of model parallelism -------------------------------------------------------------------------------


def groups_of(ranks: ParallelRanks) -> Mapping[str, tuple[int, int]]:
    """Return for each axis the ranks of a group and the distance of its neighbours in the numbering of all ranks.

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
) -> dict[tuple[Event, str], float]:
    """Add up the seconds of exchanges by the event of the unit that waits for them."""
    found: dict[tuple[Event, str], float] = {}
    for exchange in exchanges:
        event = Event.BACKWARD_BEGINS if exchange.in_backward else Event.FORWARD_BEGINS
        key = event, unit_around(exchange.unit, profile.unit_names)
        found[key] = found.get(key, 0.0) + exchange.count * exchange_s(exchange, setup, machine)
    return found
