"""The scheduler: a state machine, events in, operations out. It never touches a tensor, a stream or a rank.

Events are methods: a unit's forward begins or ends, its backward begins, its first gradient arrives, the backward is
over, the weights changed. Each returns a tuple of operations for an executor. Unit 0 is the root: its forward
surrounds those of the others, so it stays gathered until the weights change, or until the backward ends where its
memory is freed.

Two notes below say why it decides as it does: [Slots and saved views], and [Why a unit is reduced when the next one
begins].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.sharding.units import ROOT_UNIT

# Note [Slots and saved views]
#
# Where compute weights are sharded, unsharded units live in a fixed number of *slots*. A unit keeps the slot of its
# first all-gather, because autograd saves views of the gathered weights, and backward must find the same bytes in the
# same place: a pool that hands out any free buffer gives wrong gradients without an error. An unsharded unit that is
# not in use stays in its slot until another unit needs it, and is resharded then, so the units used last in forward are
# still there when backward begins.
#
# Saved views share the version counters of the full parameters. A reshard raises these, and an unshard into the same
# memory sets them back, so a backward that no hook has announced raises instead of reading another unit's weights.

# Note [Why a unit is reduced when the next one begins]
#
# Backward visits nodes in exactly the reverse order of their creation, so when the backward of unit k begins, that of
# every other unit outside k is over: its weights may be resharded, and a gradient that has not come will not come. That
# is when a unit is reduced, and not when its last gradient arrives: which gradients arrive may depend on data, and the
# order of collectives must not.


@dataclass(frozen=True)
class ScheduleConfig:
    """Facts about a model and a strategy by which the scheduler decides; units are numbered, the root is 0."""

    trainable: tuple[bool, ...]  # for each unit, root first, whether it has parameters that take gradients
    gathers: bool = True  # whether weights must be made full before use: gathered from ranks, or copied from the host
    # full weights exist only while unsharded (strategy 3, or offloaded); else each unit's full buffer stays
    shares_slots: bool = True
    slots: int = 2  # units other than the root that can be gathered at a time, at least 1
    forward_prefetch_units: int = 1  # how many units to gather ahead in forward
    backward_prefetch_units: int = 1  # how many units to gather ahead in backward
    reduces_early: bool = True  # a unit is reduced when the backward of the next one begins; else when all are over
    # units with storage of their own (as in FSDP1): they take a slot as a limit on unsharded units, not as memory
    resized: frozenset[int] = frozenset()
    # units that are not counted in slots, and never resharded to make room
    without_slot: frozenset[int] = frozenset()
    resharded_after_backward: frozenset[int] = frozenset()  # when a backward is over, because their memory is freed
    # those resharded after the backward that is predicted to be the last before the weights change; memory is freed
    resharded_before_step: frozenset[int] = frozenset()


class RecordedOrder:
    """The order of one kind of pass (forward or backward): recorded each time, predicted for the next time.

    A pass is predicted from the last one that began with the same unit: a part of the model may be called by itself
    between whole passes. The first pass predicts nothing. A pass that leaves the recorded order predicts nothing more
    until it ends; its own order is what the next pass is compared with.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, list[int]] = {}  # by the first unit
        self._expected: list[int] = []
        self._current: list[int] = []
        self._on_track = True

    def begin(self) -> None:
        """Start a pass."""
        self._current = []
        self._on_track = True

    def end(self) -> None:
        """End the pass; the units that it needed are expected in the next one that begins alike."""
        if self._current:
            self._recorded[self._current[0]] = self._current
        self._current = []

    def note(self, unit: int) -> None:
        """Record that `unit` is needed now (a repeat of the unit needed last is not a new need)."""
        if self._current and self._current[-1] == unit:
            return
        position = len(self._current)
        if not position:
            self._expected = self._recorded.get(unit, [])
        self._on_track = self._on_track and position < len(self._expected) and self._expected[position] == unit
        self._current.append(unit)

    def includes(self, unit: int) -> bool:
        """Return True if the pass needed a unit already."""
        return unit in self._current

    def upcoming(self, count: int) -> tuple[int, ...]:
        """Return the next `count` units, nearest first; empty once the pass has left the recorded order."""
        if not self._on_track or not self._current:
            return ()
        position = len(self._current)
        return tuple(self._expected[position : position + count])


class StepLength:
    """The number of backwards between two changes of the weights; each step predicts the next one.

    Ranks run the same backwards, so they predict the same. Where a step is longer or shorter than the one before it,
    the prediction is wrong once.
    """

    def __init__(self) -> None:
        self._expected = 0  # nothing is known of the first step
        self._backwards = 0

    def note_backward(self) -> bool:
        """Count a backward; return True if it is expected to be the last of its step."""
        self._backwards += 1
        return self._backwards == self._expected

    def note_step(self) -> None:
        """Begin a new step, since the weights have changed; without a backward before it that was no step."""
        self._expected = self._backwards or self._expected
        self._backwards = 0


class SyncScope(Enum):
    """Extent of a backward's reduction: none, over the inner ranks, or over all."""

    NOWHERE = "nowhere"  # accumulated on this rank, whole, as by `no_sync` of DDP
    INSIDE = "inside"  # over the inner ranks; the outer ones wait for the sync
    EVERYWHERE = "everywhere"


@dataclass
class SyncMode:
    """The switches that decide when gradients are reduced: after every backward, at the last microbatch, or by call."""

    auto_sync: bool = True  # reduce and attach gradients after every backward
    is_last_microbatch: bool | None = None  # what the user said of the next backward; None where nothing was said
    defer_all: bool = False  # inside `no_sync`: reduce nothing, keep full sums

    @property
    def syncs(self) -> bool:
        """True if the end of the next backward is a gradient sync."""
        return not self.defer_all and (self.auto_sync or bool(self.is_last_microbatch))

    def sync_scope(self, accumulates_shards: bool) -> SyncScope:
        """Return the sync scope of the next backward.

        `accumulates_shards`: they are held as shards between syncs (strategies 2 and 3), so they have to be reduced
        over the inner ranks each time unless everything is deferred.
        """
        if self.syncs:
            return SyncScope.EVERYWHERE
        return SyncScope.INSIDE if accumulates_shards and not self.defer_all else SyncScope.NOWHERE

    @contextmanager
    def changed(
        self, *, auto_sync: bool | None = None, is_last_microbatch: bool | None = None, defer_all: bool | None = None
    ) -> Iterator[None]:
        """Change switches inside a block and restore them afterwards."""
        before = dict(vars(self))
        given = {"auto_sync": auto_sync, "is_last_microbatch": is_last_microbatch, "defer_all": defer_all}
        vars(self).update({name: value for name, value in given.items() if value is not None})
        try:
            yield
        finally:
            vars(self).update(before)


class Action(Enum):
    """Kind of an operation."""

    UNSHARD = "unshard"  # start to all-gather the weights into the slot
    WAIT = "wait"  # make the gathered weights usable by compute
    RESHARD = "reshard"  # the gathered weights are no longer valid; their slot may be overwritten
    REDUCE = "reduce"  # missing gradients are zero; start to reduce (or, deferred, keep) the bucket
    FINALISE = "finalise"  # the backward is over: wait for reductions, set gradients


class Operation(NamedTuple):
    """One instruction for the executor."""

    action: Action
    unit: int
    slot: int | None = None  # that the unit is unsharded into, or whose memory is freed when it is resharded

    def __str__(self) -> str:
        """Format for tests and traces, such as `unshard3@1`."""
        if self.action is Action.FINALISE:
            return "finalise"
        return f"{self.action.value}{self.unit}" + (f"@{self.slot}" if self.slot is not None else "")


class Residence(Enum):
    """State of a unit's full compute weights."""

    SHARDED = "sharded"  # not gathered, or stale
    UNSHARDING = "unsharding"
    READY = "ready"


_UNSHARD, _WAIT, _RESHARD, _REDUCE, _FINALISE = Action  # looking these up takes longer than most decisions
_SHARDED, _UNSHARDING, _READY = Residence
_NEXT = {_SHARDED: (_UNSHARDING,), _UNSHARDING: (_READY, _SHARDED), _READY: (_SHARDED,)}
"""The legal transitions of a unit; one that was unsharded for nothing is resharded without being used."""


@dataclass
class _UnitState:
    index: int
    residence: Residence = Residence.SHARDED
    slot: int | None = None  # that of its first gather
    open_forwards: int = 0  # forwards whose backward has not begun
    in_backward: bool = False  # its backward has begun in the current backward pass
    reduced: bool = True  # nothing to reduce since its backward last began
    callers: set[int] = field(default_factory=set)  # units whose forward was seen to call this unit's

    def become(self, residence: Residence) -> None:
        """Change the residence; raise a ScheduleError with the number of the unit if the transition is illegal."""
        if residence not in _NEXT[self.residence]:
            raise ScheduleError(f"unit {self.index} is {self.residence.value} and cannot become {residence.value}")
        self.residence = residence


@dataclass
class _SlotState:
    unit: int | None = None
    last_used: int = 0


@dataclass
class Scheduler:
    """Decides which units are unsharded, waited for, resharded and reduced, and in which order."""

    config: ScheduleConfig
    _units: list[_UnitState] = field(init=False)
    _slots: list[_SlotState] = field(init=False)
    _forward_stack: list[int] = field(init=False, default_factory=list)
    _backward_unit: int | None = field(init=False, default=None)  # its weights are in use by backward
    _begun: list[int] = field(init=False, default_factory=list)  # units whose backward began, in that order
    _weights_version: int = field(init=False, default=0)
    _in_pass: bool = field(init=False, default=False)  # a forward pass, between forwards of several roots, too
    _in_backward: bool = field(init=False, default=False)
    _clock: int = field(init=False, default=0)
    _forward_order: RecordedOrder = field(init=False, default_factory=RecordedOrder)
    _backward_order: RecordedOrder = field(init=False, default_factory=RecordedOrder)
    _step_length: StepLength = field(init=False, default_factory=StepLength)

    def __post_init__(self) -> None:
        self._units = [_UnitState(index) for index in range(len(self.config.trainable))]
        self._slots = [_SlotState() for _ in range(self.config.slots if self.config.shares_slots else 0)]

    # ---- events -------------------------------------------------------------------------------------------------

    def forward_begins(self, unit: int) -> tuple[Operation, ...]:
        """Prepare a unit's forward, in a forward pass or in a recomputation inside backward."""
        state = self._units[unit]
        if self._in_backward:
            if self._backward_unit not in state.callers:
                self._backward_unit = None  # that unit is recomputed, too, before its backward computes
        else:
            # Where several modules have no unit above them, their forwards are one pass, until one is called again.
            if not self._forward_stack and (not self._in_pass or self._forward_order.includes(unit)):
                self._end_forward_pass()
                self._forward_order.begin()
                self._in_pass = True
            # Without the root, which calls every unit, and without the unit itself, whose module may call itself.
            state.callers.update(caller for caller in self._forward_stack if caller not in (ROOT_UNIT, unit))
        self._forward_stack.append(unit)
        if self._in_backward:
            return self._need(unit, self._backward_order, self.config.backward_prefetch_units)
        return self._need(unit, self._forward_order, self.config.forward_prefetch_units)

    def forward_ends(self, unit: int, needs_backward: bool) -> tuple[int, tuple[Operation, ...]]:
        """End a unit's forward, also one that failed; `needs_backward`: it will have a backward.

        Returns the version of the weights that it used, to be handed to `backward_begins`, and operations.
        """
        # An exception may have ended forwards inside of this one without a call.
        while self._forward_stack and self._forward_stack.pop() != unit:
            pass
        state = self._units[unit]
        if not self._in_backward:
            state.open_forwards += needs_backward
        elif self._backward_unit not in state.callers:
            # A checkpointed forward ran without a graph, so it was not counted: this recomputation will have the
            # backward.
            if needs_backward and state.open_forwards == 0 and not (self._begun and self._begun[-1] == unit):
                state.open_forwards = 1
            if unit != ROOT_UNIT:
                self._backward_unit = unit  # the unit recomputed last is the one whose backward comes next
        return self._weights_version, ()

    def backward_begins(self, unit: int, weights_version: int, reads_weights: bool = True) -> tuple[Operation, ...]:
        """Prepare the backward of one forward of a unit; one that reads no weights, as a lookup's, gathers none.

        Raises:
            ScheduleError: The weights have changed since that forward.
        """
        if weights_version != self._weights_version:
            raise ScheduleError(
                "backward reached a forward that ran before the weights were changed; its gradients would mix two "
                "versions of the weights, so run backward before the optimizer step"
            )
        operations: list[Operation] = []
        state = self._units[unit]
        if not self._in_backward:
            self._in_backward = True
            self._end_forward_pass()
            self._backward_order.begin()
        if unit != ROOT_UNIT:
            # See Note [Why a unit is reduced when the next one begins].
            callers = state.callers  # which are still running
            ended = [other for other in self._begun if other != unit and other not in callers]
            self._begun = [other for other in self._begun if other != unit and other in callers] + [unit]
            operations += [operation for other in ended for operation in self._reduce_if_due(other)]
            self._backward_unit = unit
        state.in_backward, state.reduced = True, False
        if reads_weights:
            operations += self._need(unit, self._backward_order, self.config.backward_prefetch_units)
        state.open_forwards = max(0, state.open_forwards - 1)
        return tuple(operations)

    def gradient_arrives(self, unit: int) -> None:
        """Note the first gradient of a unit since its last reduction.

        Raises:
            ScheduleError: The unit's weights were not gathered, so that the gradient cannot be right.
        """
        state = self._units[unit]
        absent = self.config.gathers and state.residence is _SHARDED
        if absent and not state.in_backward:
            raise ScheduleError(
                "a gradient arrived for a unit whose backward was never announced, so its weights were not gathered; "
                "its forward must return its tensors in tuples, lists, dicts, dataclasses or classes registered with "
                "torch.utils._pytree"
            )
        self._in_backward = True
        state.in_backward, state.reduced = True, False

    def gradients_ready(self, unit: int) -> tuple[Operation, ...]:
        """Reduce a unit declared complete by hand; not the root, nor where units are reduced at the end."""
        if not self.config.reduces_early or unit == ROOT_UNIT:
            return ()
        self._units[unit].reduced = True
        return (Operation(_REDUCE, unit),)

    def backward_ends(self) -> tuple[Operation, ...]:
        """Reduce the remaining units, from the last to the root, and finish: autograd has nothing left to do."""
        at_once, freed = self.config.resharded_after_backward, frozenset[int]()
        if self._in_backward and self._step_length.note_backward():
            freed = self.config.resharded_before_step
        done = [unit for unit in sorted(at_once | freed) if unit not in self._forward_stack]
        operations = [operation for unit in done for operation in self._reshard(unit, frees_slot=unit in freed)]
        # By number and not in the order of the pass: all ranks reduce alike, whatever gradients came.
        for unit in range(len(self._units) - 1, -1, -1):
            state = self._units[unit]
            began = state.in_backward or (unit == ROOT_UNIT and self._in_backward)
            if began and self.config.trainable[unit] and (unit == ROOT_UNIT or not state.reduced):
                operations.append(Operation(_REDUCE, unit))
            state.in_backward, state.reduced = False, True
        if self._in_backward:
            self._backward_order.end()
        self._in_backward, self._backward_unit = False, None
        self._begun.clear()
        return (*operations, Operation(_FINALISE, ROOT_UNIT))

    def prefetch_requested(self, unit: int) -> tuple[Operation, ...]:
        """Unshard a unit ahead of its forward if there is a slot for it."""
        return tuple(self._unshard(unit, spare=range(len(self._units)), must=False)) if self.config.gathers else ()

    def weights_requested(self, unit: int) -> tuple[Operation, ...]:
        """Unshard a unit that is needed now, outside of its forward, and wait for it."""
        if not self.config.gathers:
            return ()
        operations = self._unshard(unit, spare=(unit,), must=True)
        if self._units[unit].residence is _UNSHARDING:
            operations.append(Operation(_WAIT, unit))
            self._units[unit].become(_READY)
        return tuple(operations)

    def reshard_requested(self, unit: int) -> tuple[Operation, ...]:
        """Reshard a unit that a caller does not need any more, unless it is in use."""
        in_use = unit == self._backward_unit or unit in self._forward_stack or (unit == ROOT_UNIT and self._in_backward)
        return () if in_use or not self.config.shares_slots else tuple(self._reshard(unit))

    def weights_changed(self) -> tuple[Operation, ...]:
        """Reshard all units, since main weights are newer: each is unsharded again before its next use."""
        if self._forward_stack:
            raise ScheduleError("the weights were changed inside a forward; change them between forward passes")
        self._end_forward_pass()
        self._weights_version += 1
        self._step_length.note_step()
        for state in self._units:
            state.open_forwards = 0
        return self.weights_may_have_changed()

    def weights_may_have_changed(self) -> tuple[Operation, ...]:
        """Reshard all units between passes: a replayed graph may have changed weights, and unsharded units are unknown.

        Forwards whose backward has not begun stay as they are: their weights are gathered again for it.
        """
        return tuple(operation for unit in range(len(self._units)) for operation in self._reshard(unit))

    def reset(self) -> tuple[Operation, ...]:
        """Drop passes that were interrupted; every unit is sharded afterwards.

        What was recorded (order of units, slots) is dropped as well: ranks may have been stopped at different points,
        and have to decide alike from here on.
        """
        self._forward_stack.clear()
        self._backward_unit = None
        self._begun.clear()
        self._in_backward = False
        self._forward_order, self._backward_order = RecordedOrder(), RecordedOrder()
        self._in_pass = False
        self._step_length = StepLength()
        for state in self._units:
            state.in_backward, state.reduced = False, True
        operations = self.weights_changed()
        for state in self._units:
            state.slot = None
        self._slots = [_SlotState() for _ in range(self.config.slots if self.config.shares_slots else 0)]
        return operations

    def look_ahead(self, depth: int, may_grow: bool) -> None:
        """Change the number of units to unshard ahead, in both directions, to at most the slots besides the one in use.

        Where it `may_grow`, slots are added for them; slots are never removed.
        """
        slots = max(self.config.slots, depth + 1) if may_grow else self.config.slots
        if self.config.shares_slots:
            depth = min(depth, slots - 1)
            self._slots += [_SlotState() for _ in range(slots - len(self._slots))]
        self.config = replace(self.config, slots=slots, forward_prefetch_units=depth, backward_prefetch_units=depth)

    def set_reshard(self, unit: int, after_forward: bool, after_backward: bool) -> None:
        """Allow or forbid eviction of a unit with its own storage after forward, and resharding when backward ends."""
        one, config = frozenset({unit}), self.config
        if unit in config.resized:
            at_end, free = config.resharded_after_backward, config.without_slot
            at_end = at_end | one if after_backward else at_end - one
            if unit != ROOT_UNIT:  # `fsdp2/state.py` reshards the root after its forward
                free = free - one if after_forward else free | one
            self.config = replace(config, resharded_after_backward=at_end, without_slot=free)

    def set_trainable(self, units: Sequence[Sequence[bool]]) -> None:
        """Change which parameters take gradients."""
        self.config = replace(self.config, trainable=tuple(map(any, units)))

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def note(self) -> str:
        """A sentence for reports; empty without one."""
        return ""

    @property
    def in_backward(self) -> bool:
        """True if a backward pass is running."""
        return self._in_backward

    @property
    def in_forward(self) -> bool:
        """True if a forward (or recomputation) of some unit is running."""
        return bool(self._forward_stack)

    def is_gathered(self, unit: int) -> bool:
        """Return True if a unit's weights are gathered, or on their way."""
        return not self.config.gathers or self._units[unit].residence is not _SHARDED

    def forward_depth(self, unit: int) -> int:
        """Return the number of the unit's running forwards, one inside another."""
        return self._forward_stack.count(unit)

    def _end_forward_pass(self) -> None:
        if self._in_pass:
            self._forward_order.end()
        self._in_pass = False

    # ---- decisions ----------------------------------------------------------------------------------------------

    def _need(self, unit: int, order: RecordedOrder, depth: int) -> tuple[Operation, ...]:
        """Unshard the unit (unless it is unsharded), then those expected next, then wait for the unit."""
        # Recorded in every pass, and predicts the next one; a pass that leaves it unshards on demand until it ends.
        order.note(unit)
        self._clock += 1
        if not self.config.gathers:
            return ()
        upcoming = order.upcoming(depth)
        state = self._units[unit]
        # First what is needed now: all-gathers run in the order in which they are launched.
        operations = self._unshard(unit, spare=(unit,), must=True)
        for position, ahead in enumerate(upcoming):
            # It must not evict what is needed sooner.
            if self._units[ahead].residence is _SHARDED:
                operations += self._unshard(ahead, spare=(unit, *upcoming[: position + 1]), must=False)
        if state.residence is _UNSHARDING:
            operations.append(Operation(_WAIT, unit))
            state.become(_READY)
        if state.slot is not None:
            self._slots[state.slot].last_used = self._clock
        return tuple(operations)

    def _reduce_if_due(self, unit: int) -> list[Operation]:
        """Reduce a unit whose backward has ended, even if some of its gradients never came."""
        state = self._units[unit]
        done = state.reduced or state.open_forwards > 0 or not self.config.trainable[unit]
        if done or not self.config.reduces_early:
            return []
        state.reduced = True
        return [Operation(_REDUCE, unit)]

    def _unshard(self, unit: int, spare: Collection[int], must: bool) -> list[Operation]:
        state = self._units[unit]
        if state.residence is not _SHARDED:
            return []
        operations: list[Operation] = []
        if unit != ROOT_UNIT and self.config.shares_slots and unit not in self.config.without_slot:
            slot = self._choose_slot(unit, spare, must)
            if slot is None:
                return []
            # Only now is the unit that was in the slot resharded. See Note [Slots and saved views].
            if (occupant := self._slots[slot].unit) is not None:
                operations += self._reshard(occupant)
            self._slots[slot] = _SlotState(unit, self._clock)
            state.slot = slot
        state.become(_UNSHARDING)
        operations.append(Operation(_UNSHARD, unit, state.slot))
        return operations

    def _choose_slot(self, unit: int, spare: Collection[int], must: bool) -> int | None:
        """Return the unit's own slot if possible, else an empty or the least recently used one; a new one if `must`."""
        # See Note [Slots and saved views].
        own = None if unit in self.config.resized else self._units[unit].slot
        if own is not None and self._can_evict(own, spare):
            return own
        # A prefetch waits until its own slot is free. A unit that is needed now takes another, unless saved views bind
        # it.
        if own is not None and (not must or self._units[unit].open_forwards > 0):
            if not must:
                return None
            tenant = self._slots[own].unit
            if tenant not in self.config.resized:
                raise ScheduleError(
                    f"unit {unit} is needed while unit {tenant}, which shares its memory, is in use, and an earlier "
                    "forward of it still waits for its backward; run that backward first"
                )
            # The tenant's memory is its own: it may be counted in any other slot.
            other = self._free_slot(spare, must=True)
            assert other is not None
            self._slots[own], self._slots[other] = self._slots[other], self._slots[own]
            self._units[tenant].slot = other
            return own
        return self._free_slot(spare, must)

    def _free_slot(self, spare: Collection[int], must: bool) -> int | None:
        """Return an empty or the least recently used slot; a new one if `must`."""
        free = [slot for slot in range(len(self._slots)) if self._can_evict(slot, spare)]
        # Several units may be in use at once, as where one calls another.
        if not free and must:
            self._slots.append(_SlotState())
            return len(self._slots) - 1
        return min(
            free, key=lambda slot: (self._slots[slot].unit is not None, self._slots[slot].last_used), default=None
        )

    def _can_evict(self, slot: int, spare: Collection[int]) -> bool:
        unit = self._slots[slot].unit
        if unit is None:
            return True
        callers = self._units[self._backward_unit].callers if self._backward_unit is not None else ()
        if unit in callers and self._units[unit].in_backward:
            return False  # its backward continues after that of the unit it called
        return unit not in spare and unit not in self._forward_stack and unit != self._backward_unit

    def _reshard(self, unit: int, frees_slot: bool = False) -> list[Operation]:
        state = self._units[unit]
        if state.residence is _SHARDED:
            return []
        # An all-gather in flight would still write into the slot.
        operations = [Operation(_WAIT, unit)] if state.residence is _UNSHARDING else []
        state.become(_SHARDED)
        if state.slot is not None and self._slots[state.slot].unit == unit:
            self._slots[state.slot].unit = None
        return [*operations, Operation(_RESHARD, unit, state.slot if frees_slot else None)]
