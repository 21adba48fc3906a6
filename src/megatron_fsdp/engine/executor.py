"""The executor: carries out the scheduler's operations, with streams, slots and buckets.

It never chooses what is gathered or reduced. It chooses when a bucket is waited for, and starts the outer reduction
then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from megatron_fsdp.comm.collectives import Work, make_comm_stream
from megatron_fsdp.engine.memory import Block, BlockPool, CommunicationPool, WeightMemory, weakly
from megatron_fsdp.engine.observer import PHASE_OF, BorrowedMemory, Observers, Phase, explain, explained
from megatron_fsdp.engine.plans import OUTER_REDUCTIONS, MemoryPlan, Use, outer_buffer_offsets
from megatron_fsdp.engine.schedule import Action, Operation, SyncScope
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.sharding.units import ROOT_UNIT

_UNSHARD, _WAIT, _RESHARD, _REDUCE, _FINALISE = Action  # looking these up for each operation takes time
_DIGEST_LIMIT = 2**61 - 1


@dataclass
class _Reduction:
    """A unit's reduction over the inner ranks in flight, and the memory it borrowed."""

    unit: Unit
    sync_scope: SyncScope
    works: list[tuple[Work, tuple[torch.Tensor, ...]]]  # and memory to be kept until they are waited for
    bucket: Block | None  # None: all gradients were reduced where they stay
    pool: BlockPool
    scratch: Block | None


class OptimizerInBackward(Protocol):
    """An optimizer that steps units during backward, as their gradients become final."""

    broken: str
    """The reason why no pass may begin until a checkpoint is loaded; empty if one may."""

    def check_forward(self, number: int) -> None:
        """Raise a ScheduleError if a forward may not begin after so many backwards."""

    def backward_begins(self, number: int) -> None:
        """Raise a ScheduleError if backward `number` may not begin."""

    def unit_reduces(self, unit: Unit) -> None:
        """Raise a ScheduleError if the unit was stepped already."""

    def unit_is_reduced(self, unit: Unit) -> None:
        """Step the parameters of a unit whose gradients are final."""

    def reset(self) -> None:
        """Stop; the model is reset."""


class DelayedGradients(Protocol):
    """The weight gradients that wait for the end of a backward."""

    def accumulate(self, weight: torch.Tensor) -> None:
        """Compute a weight's waiting gradients, and add the sum to its `.grad`."""

    def run(self) -> None:
        """Compute all waiting gradients into `.grad`."""

    def clear(self) -> None:
        """Drop all waiting gradients, after a backward that failed."""


class GradientCheck(ABC):
    """A check of every gradient of a backward, whose findings ranks compare when it ends.

    Attributes:
        is_done: No later backward needs to be checked.
        stops_steps: An optimizer must not use gradients before they are checked.
        sees_buckets: It is also shown each bucket before it is reduced, and begins and ends with a sync.
    """

    is_done = False
    stops_steps: ClassVar[bool] = True
    sees_buckets: ClassVar[bool] = False

    @abstractmethod
    def begin(self) -> None:
        """Begin a backward, or a sync outside of one; drop findings of an earlier one that failed."""

    @abstractmethod
    def record(self, name: str, grad: torch.Tensor) -> None:
        """Record the finding of a gradient, without a device sync."""

    @abstractmethod
    def conclude(self) -> None:
        """Compare findings over the ranks; one on any rank raises on all. Collective."""


class Executor:
    """Runs operations on the units of a model, in communication memory of a pool."""

    def __init__(
        self, units: Sequence[Unit], device: torch.device, memory_plan: MemoryPlan, pool: CommunicationPool
    ) -> None:
        self._units = units
        self.finalise: Callable[[], object]  # set by the engine; ends a backward whose reductions are done
        self.observers = Observers()
        # One stream per kind: a reduction must not wait behind gathers that are ahead of their use.
        self._gather_stream = make_comm_stream(device, "gather", self.observers)
        self._reduce_stream = make_comm_stream(device, "reduce", self.observers)
        self._outer_stream = make_comm_stream(device, "outer", self.observers)
        # Copies of offloaded state to the device and to the host, at the same time.
        self.coming_stream = make_comm_stream(device, "comes")
        self.going_stream = make_comm_stream(device, "goes")
        self._offloads = any(plan.offload for unit in units for plan in unit.group_plans)
        self.pool = pool
        self.weight_memory = WeightMemory(memory_plan.weights, pool)
        self.bucket_count = memory_plan.buckets  # may be set anew
        self.make_block_pools()
        self._borrowed: dict[int, Block] = {}  # the bucket that each unit fills, by its index
        self.operations_digest = 0  # of all gathers and reductions, which ranks compare at a sync
        self.optimizer_in_backward: OptimizerInBackward | None = None
        self.is_broken = False  # an operation failed, so the scheduler's state is wrong until a reset
        self.in_flight: deque[_Reduction] = deque()
        # unit, outer buffer, and works with the memory that has to be kept until they are waited for; oldest first
        self._outer_reductions: deque[tuple[int, Block | None, list[tuple[Work, tuple[torch.Tensor, ...]]]]] = deque()

    def make_block_pools(self) -> None:
        """Make the pools of buckets and scratch, sized for the current communication dtypes."""
        make_room = weakly(self._retire_oldest)  # See Note [Weak references]
        pool, modules = self.pool, [len(unit.modules) for unit in self._units]
        sizes = [unit.bucket_bytes for unit in self._units]
        root, others = sizes[: ROOT_UNIT + 1], sizes[ROOT_UNIT + 1 :]
        # The root is reduced last, but its bucket may fill from the first gradient on: in the pool of the others it
        # would hold back one of theirs for the whole backward.
        self._root_bucket = BlockPool(pool, Use.ROOT_BUCKET, 1, root, make_room)
        self._buckets = BlockPool(
            pool, Use.BUCKET, self.bucket_count, others, make_room, modules=modules[ROOT_UNIT + 1 :]
        )
        exchanged = [unit.scratch_bytes for unit in self._units]
        # one for each reduction that may be in flight while another bucket fills
        self._scratch = BlockPool(
            pool, Use.SCRATCH, max(1, self.bucket_count - 1), exchanged, make_room, modules=modules
        )
        outer_buffer = max(outer_buffer_offsets(unit.group_plans)[1] for unit in self._units)
        self._outer_buffers = BlockPool(pool, Use.OUTER_BUFFER, OUTER_REDUCTIONS, [outer_buffer], make_room)

    def set_bucket_count(self, count: int) -> None:
        """Change the number of units that fill a bucket or have one in reduction at a time."""
        self.retire_all()
        self.bucket_count = count
        self._buckets.set_count(count)
        self._scratch.set_count(max(1, count - 1))
        for unit in self._units:
            for each in unit.trained:
                each.gradients.bucket_views.clear()

    def run(self, operations: Iterable[Operation], sync_scope: SyncScope | None = None) -> None:
        """Carry out operations in order.

        `sync_scope`: how far gradients that are ready are reduced; None: as far as their unit's switches say.
        """
        observers = self.observers
        for action, unit_index, slot in operations:
            unit = self._units[unit_index]
            scope = (sync_scope or unit.sync_scope) if action is _REDUCE else SyncScope.NOWHERE
            # Only what is sent counts, so not a deferred reduction. See Note [What ranks agree on, and when].
            if action is _UNSHARD or (action is _REDUCE and scope is not SyncScope.NOWHERE):
                code = 2 * unit_index + (action is _REDUCE)
                self.operations_digest = (self.operations_digest * 1_000_003 + code) % _DIGEST_LIMIT
            # Set here and not in `except`: FINALISE takes it back when communication is over, and may raise after that.
            before, self.is_broken = self.is_broken, True
            try:
                if observers.active:
                    observers.begins(PHASE_OF[action], unit_index)
                self._carry_out(action, unit, slot, scope)
                if observers.active:
                    observers.ends(PHASE_OF[action], unit_index)
                self.is_broken = before
            except BaseException as error:
                if observers.active:
                    observers.fails(PHASE_OF[action], unit_index, error)
                explain(error, f"during {action.value!r} of unit {unit.label}", observers)
                raise

    def _carry_out(self, action: Action, unit: Unit, slot: int | None, sync_scope: SyncScope) -> None:
        if action is _UNSHARD:
            # An outer all-gather that is due writes what the inner one sends.
            unit.all_gather_outer(self._outer_stream)
            block = None
            if unit.block_bytes:
                block = self.weight_memory.borrow(unit.index, slot)
                self.observers.lends(BorrowedMemory.WEIGHTS, unit.index, block)
            unit.unshard(self._gather_stream, block, self.coming_stream)
        elif action is _WAIT:
            unit.wait_for_unshard()
        elif action is _RESHARD:
            unit.reshard(loses_memory=self.weight_memory.give_back(unit.index, slot))
        elif action is _REDUCE:
            # See Note [Why a unit is reduced when the next one begins] in `schedule.py`.
            self.reduce(unit, sync_scope)
        else:
            self.retire_all()
            self.is_broken = False  # `finalise` may raise, but communication is over
            self.finalise()

    @contextmanager
    def _communicating(self, phase: Phase, unit: Unit) -> Iterator[None]:
        """Report a phase around a block, and name the unit and phase in errors of its communication."""
        where = f"during {phase.value!r} of unit {unit.label}"
        with explained(where, self.observers), self.observers.during(phase, unit.index):
            yield

    def all_gather_outer(self) -> None:
        """Start to all-gather the compute weights of all units over the outer ranks, in place."""
        for unit in self._units:
            if unit.needs_outer_all_gather:
                with self._communicating(Phase.GATHER_OUTER, unit):
                    unit.all_gather_outer(self._outer_stream)

    def wait_for_outer(self) -> None:
        """Wait for the outer all-gathers of all units, used or not: their weights may be changed next."""
        with explained("while the gathers over the outer ranks are waited for", self.observers):
            for unit in self._units:
                unit.wait_for_outer()
        if self._offloads:
            self.coming_stream.settle()  # copies to the device read them; copies to the host have until backward ends

    def settle_offload(self) -> None:
        """Block the host until copies of offloaded state are done, so that it may read and write there."""
        # See Note [Offloaded state] in `memory.py`.
        if self._offloads:
            self.coming_stream.settle()
            self.going_stream.settle()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def open_bucket(self, unit: Unit, group_index: int) -> None:
        """Give a group memory for the gradients of this backward; may wait for a reduction to free a bucket."""
        with explained(f"while gradients of unit {unit.label} need memory", self.observers):
            self._fill(unit, group_index, unit.sync_scope)

    def _fill(self, unit: Unit, group_index: int, sync_scope: SyncScope) -> None:
        """Have a group fill its slice of the unit's bucket, or an unreduced gradient where reduction is deferred."""
        group = unit.groups[group_index]
        gradients = group.gradients
        assert gradients is not None
        if unit.defers(group_index, sync_scope) or gradients.has_unreduced_gradient:
            # What waits unreduced already has to be added to, whatever this backward would do by itself.
            gradients.begin(None)
            return
        may_fill_main = self.optimizer_in_backward is None and self.pool.plan is None
        if not (may_fill_main and gradients.fill_main(group.sharded)):
            gradients.begin(unit.slice_of(group_index, self._bucket(unit)))

    def reduce(self, unit: Unit, sync_scope: SyncScope) -> None:
        """Start to reduce all gradients of a unit; outside of the sync scope keep them unreduced."""
        if self.optimizer_in_backward is not None and sync_scope is not SyncScope.NOWHERE:
            self.optimizer_in_backward.unit_reduces(unit)
        reducing = []
        for each in unit.trained:
            if not each.group.reduces:
                continue
            # No gradient came on this rank, but one may have on another: every rank launches the same reductions, now
            # or later, of zeros here. See Note [What ranks agree on, and when] in `engine.py`.
            if not each.gradients.is_filling and not each.gradients.has_unreduced_gradient:
                self._fill(unit, each.number, sync_scope)
            if unit.defers(each.number, sync_scope):
                each.gradients.stop_filling()
            else:
                reducing.append(each)
        if sync_scope is SyncScope.NOWHERE:
            return
        if not all(each.gradients.fills_main for each in reducing):
            self._bucket(unit)
        scratch = self._scratch_for(unit)
        works = []
        # One collective per group, since groups differ in dtype, ranks or placements. Torch could launch them as one,
        # but only under NCCL and by a private context.
        for index, group, gradients in reducing:
            sent = gradients.main.local if gradients.fills_main else unit.slice_of(index, self._bucket(unit))
            received = unit.scratch_of(index, scratch)
            works.append(gradients.reduce(self._reduce_stream, sent, received, group.sharded, self.going_stream))
        # From here on the reduction owns the bucket; gradients that come later fill another.
        block = self._borrowed.pop(unit.index, None)
        self.in_flight.append(_Reduction(unit, sync_scope, works, block, self._pool(unit), scratch))
        # A head's bucket and scratch take more than the next units' weights, which are about to be gathered. The first
        # gradient of the next unit would wait for them anyway.
        while block is not None and self._pool(unit).is_long(block) and self._retire_oldest():
            pass

    def reduce_outer(self, unit: Unit) -> bool:
        """Start to reduce a unit's partly reduced gradients over the outer ranks; return False if there are none."""
        waiting = [each for each in unit.trained if each.gradients.has_partly_reduced]
        if not waiting:
            return False
        while len(self._outer_reductions) >= OUTER_REDUCTIONS:
            self._retire_outer()
        block = self._outer_buffers.borrow() if self._outer_buffers.held_bytes else None
        with self._communicating(Phase.REDUCE_OUTER, unit):
            started = [
                gradients.reduce_outer(
                    self._outer_stream, group.sharded, self.going_stream, unit.outer_buffer_of(index, block)
                )
                for index, group, gradients in waiting
            ]
        self._outer_reductions.append((unit.index, block, started))
        return True

    def _retire_outer(self) -> None:
        index, block, started = self._outer_reductions.popleft()
        with self._communicating(Phase.RETIRE, self._units[index]):
            for work, _memory in started:
                work.wait()
        if block is not None:
            self._outer_buffers.give_back(block)
        if self.optimizer_in_backward is not None:
            self.optimizer_in_backward.unit_is_reduced(self._units[index])

    def _pool(self, unit: Unit) -> BlockPool:
        return self._root_bucket if unit.index == ROOT_UNIT else self._buckets

    def _bucket(self, unit: Unit) -> Block:
        if unit.index not in self._borrowed:
            self._borrowed[unit.index] = self._pool(unit).borrow(unit.bucket_bytes)
            self.observers.lends(BorrowedMemory.BUCKET, unit.index, self._borrowed[unit.index])
        return self._borrowed[unit.index]

    def _scratch_for(self, unit: Unit) -> Block | None:
        if not unit.scratch_bytes:
            return None
        if unit.index == ROOT_UNIT:  # the last of a backward: free the other units' buckets first
            while self._retire_oldest():
                pass
            self._buckets.empty()
        scratch = self._scratch.borrow(unit.scratch_bytes)
        self.observers.lends(BorrowedMemory.SCRATCH, unit.index, scratch)
        return scratch

    def _retire_oldest(self) -> bool:
        """Wait for the oldest reduction and take its memory back; return False if none is in flight."""
        if not self.in_flight:
            return False
        reduction = self.in_flight.popleft()
        with self._communicating(Phase.RETIRE, reduction.unit):
            for work, _memory in reduction.works:
                work.wait()
        if reduction.bucket is not None:
            self.observers.takes_back(BorrowedMemory.BUCKET, reduction.unit.index, reduction.bucket)
            reduction.pool.give_back(reduction.bucket)
        if reduction.scratch is not None:
            self.observers.takes_back(BorrowedMemory.SCRATCH, reduction.unit.index, reduction.scratch)
            self._scratch.give_back(reduction.scratch)
        # Here, and not whenever the inner reduction happens to be done: waits are at the same places on every rank, so
        # that all launch the outer collectives in the same order.
        if reduction.sync_scope is SyncScope.EVERYWHERE:
            # Gradients are final here, or when the outer reduction is waited for.
            is_on_its_way = self.reduce_outer(reduction.unit)
            if self.optimizer_in_backward is not None and not is_on_its_way:
                self.optimizer_in_backward.unit_is_reduced(reduction.unit)
        return True

    def retire_all(self) -> None:
        """Wait for every reduction, and free all buckets and scratch."""
        while self._retire_oldest():
            pass
        while self._outer_reductions:
            self._retire_outer()
        # What follows a backward (an optimizer step, an evaluation) may need the memory.
        for pool in self._pools:
            pool.empty()
        self.settle_offload()

    # ---- after an exception, and for reports --------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop gradients in reduction and take all borrowed memory back."""
        self.observers.forget()
        self.is_broken = False
        self.operations_digest = 0  # ranks may have been stopped at different points
        # Collectives in flight cannot be called off: their memory is free only when they are done.
        self.retire_all()
        for unit in self._units:
            unit.wait_for_unshard()
            unit.expect_update()
            for each in unit.trained:
                each.gradients.stop_filling()  # unreduced gradients of earlier backwards stay
        self._borrowed.clear()
        for pool in self._pools:
            pool.reclaim()
            pool.empty()

    @property
    def _pools(self) -> tuple[BlockPool, ...]:
        return self._root_bucket, self._buckets, self._scratch, self._outer_buffers

    @property
    def transient_bytes(self) -> int:
        """Sum of the peaks of gathered weights, buckets and scratch, in bytes."""
        return self.weight_memory.peak_bytes + sum(pool.peak_bytes for pool in self._pools)

    @property
    def held_bytes(self) -> int:
        """Bytes that gathered weights, buckets and scratch take now."""
        return self.weight_memory.held_bytes + self.reduction_bytes

    @property
    def reduction_bytes(self) -> int:
        """Bytes that buckets and scratch take now."""
        return sum(pool.held_bytes for pool in self._pools)
