"""The scheduler of ranks that may skip units: every pass runs the collectives of all units, in one order.

Off, ranks have to call the same units. On, a rank whose data skip a unit (text beside a vision tower, an expert without
tokens, a layer that is dropped by chance) fills it in: it gathers the unit for the others, and in backward it reduces
zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fsdp.engine.schedule import Action, Operation, ScheduleConfig, Scheduler
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.sharding.units import ROOT_UNIT

# Note [Ranks that skip units]
#
# The events that the base class sees are the same on every rank: one forward and one backward of each unit in every
# pass, nested as the modules are, in an order that was fixed at wrap time. So its decisions (slots, prefetches,
# reductions) are the same, too. This rank's own calls are kept apart: they move the pass on to their unit, and a unit
# that was called before uses the weights that are still there, without an event.
#
# A backward visits calls in the reverse order of their forwards, so when the one of unit k begins, that of every unit
# behind it is over or never comes, unless k was called again after it.


@dataclass(frozen=True)
class UnitOrder:
    """The order in which all ranks run the collectives of units."""

    forward: tuple[int, ...]  # units besides the root, each before the units inside of it
    parents: tuple[int, ...]  # of each unit, the root first, the unit around it; the root's is itself
    labels: tuple[str, ...]

    @property
    def backward(self) -> tuple[int, ...]:
        """The units as a backward reaches them: the last first, each before the units inside of it."""
        inside: dict[int, list[int]] = {}
        for unit in self.forward:
            inside.setdefault(self.parents[unit], []).append(unit)
        found: list[int] = []
        waiting = inside.get(ROOT_UNIT, [])[:]
        while waiting:
            found.append(waiting.pop())
            waiting += inside.get(found[-1], [])
        return tuple(found)

    def is_around(self, outer: int, unit: int) -> bool:
        """Return True if `outer` is the unit, or one around it."""
        while unit not in (outer, ROOT_UNIT):
            unit = self.parents[unit]
        return unit == outer

    def __str__(self) -> str:
        """Format the order for messages."""
        return " -> ".join(self.labels[unit] for unit in self.forward)


class OrderedScheduler(Scheduler):
    """The scheduler of ranks that may skip units. See Note [Ranks that skip units]."""

    def __init__(self, config: ScheduleConfig, order: UnitOrder) -> None:
        super().__init__(config)
        self.order = order
        self._backward = order.backward
        self.takes_gradients = False  # some rank's forward of this pass has a backward
        self.filled_in = 0  # units that this rank gathered for the others only
        self._calls_running: list[int] = []  # this rank's own forwards, one inside another
        self._position = 0  # in the order, of the next unit in this pass
        self._called: set[int] = set()  # by this rank in this pass
        self._last_call_of: dict[int, int] = {}  # of each unit in the last pass that takes gradients
        self._begun_backward: set[int] = set()
        self._root_begun = False  # in this backward
        self.last_call = 0  # the number of this rank's last call, for a backward that has no call of its own
        self._first_valid = 0  # the first call with the present weights
        self._first_of_graph = 0  # the first call of the last pass that takes gradients

    # ---- forward ------------------------------------------------------------------------------------------------

    def forward_begins(self, unit: int) -> tuple[Operation, ...]:
        """Move the pass on to a unit: those in front of it that were skipped are gathered, too."""
        operations = self._moved_to(unit)
        self._calls_running.append(unit)
        return operations

    def _moved_to(self, unit: int) -> tuple[Operation, ...]:
        if self._in_backward:
            return () if unit == ROOT_UNIT else self._moved_back_to(unit, self.last_call + 1)
        if not self._calls_running:
            return self._begin_pass(unit)
        if unit in self._called or unit == ROOT_UNIT:
            return self._again(unit)
        if unit not in self.order.forward[self._position :]:
            raise ScheduleError(
                f"unit {self._name(unit)} was called after a unit behind it in the order {self.order}, in which ranks "
                "that may skip units gather them; give ranks_may_skip_units the modules in the order in which they are "
                "called"
            )
        operations: list[Operation] = []
        while unit not in self._called:
            operations += self._next()
            if self.order.forward[self._position - 1] == unit:
                self._called.add(unit)
                self.filled_in -= 1
        return self._checked(operations)

    def _begin_pass(self, unit: int) -> tuple[Operation, ...]:
        if unit != ROOT_UNIT:
            raise ScheduleError(
                f"unit {self._name(unit)} was called outside of a forward of the model; call the model, since ranks "
                "that may skip units have to know where its forward ends"
            )
        self._position = 0
        self._called.clear()
        if self.takes_gradients:
            self._first_of_graph = self.last_call + 1
            self._last_call_of.clear()
        return super().forward_begins(ROOT_UNIT)

    def _next(self) -> list[Operation]:
        """Begin the next unit of the pass, after the units that are not around it have ended."""
        unit = self.order.forward[self._position]
        while not self.order.is_around(self._forward_stack[-1], unit):
            super().forward_ends(self._forward_stack[-1], self.takes_gradients)
        self._position += 1
        self.filled_in += 1
        return list(super().forward_begins(unit))

    def _again(self, unit: int) -> tuple[Operation, ...]:
        """Use the weights of a unit that was gathered earlier in this pass, if they are still there."""
        if not self.is_gathered(unit):
            raise ScheduleError(
                f"unit {self._name(unit)} is needed again, and was resharded meanwhile; where ranks may skip units, it "
                "is gathered once in a pass: shard what lies between its calls as one unit with it (or give the "
                "wrapper a larger max_gathered_units)"
            )
        return self.weights_requested(unit)

    def forward_ends(
        self,
        unit: int,
        needs_backward: bool,  # noqa: ARG002 (ranks agree on it for the whole pass)
    ) -> tuple[int, tuple[Operation, ...]]:
        """End this rank's call; the root's end gathers the units that are left, also after one that failed."""
        while self._calls_running and self._calls_running.pop() != unit:
            pass
        self.last_call += 1
        if self._in_backward:
            return self.last_call, ()
        self._last_call_of[unit] = self.last_call
        operations: list[Operation] = []
        if not self._calls_running:
            while self._position < len(self.order.forward):
                operations += self._next()
            while self._forward_stack:
                super().forward_ends(self._forward_stack[-1], self.takes_gradients)
        return self.last_call, tuple(operations)

    # ---- backward -----------------------------------------------------------------------------------------------

    def backward_begins(
        self,
        unit: int,
        weights_version: int,
        reads_weights: bool = True,  # noqa: ARG002 (on some rank it does)
    ) -> tuple[Operation, ...]:
        """Move the backward on to a unit: those behind it that were skipped are gathered, and reduced with zeros."""
        if self._first_valid < weights_version < self._first_of_graph:
            raise ScheduleError(
                "backward reached a forward before the last one, which took gradients on some rank, too; where ranks "
                "may skip units, run the backward of each forward before the next one"
            )
        version = self._weights_version if weights_version > self._first_valid else -1  # refused by the base class
        operations = self._begin_root_backward(version)
        return operations if unit == ROOT_UNIT else operations + self._moved_back_to(unit, weights_version)

    def _begin_root_backward(self, version: int) -> tuple[Operation, ...]:
        if self._root_begun:
            return ()
        self._root_begun = True
        return super().backward_begins(ROOT_UNIT, version)

    def _moved_back_to(self, unit: int, call: int) -> tuple[Operation, ...]:
        """Move the backward on to the call of this number, or to a recomputation, which comes after all of them."""
        operations = self._begin_root_backward(self._weights_version)
        if unit in self._begun_backward:
            return operations + self._again(unit)
        waiting = [other for other in self._backward[: self._backward.index(unit)] if other not in self._begun_backward]
        if call <= self.last_call and any(self._last_call_of.get(other, call) < call for other in waiting):
            return operations + self._again(unit)  # it was called again, and theirs come before its turn
        self._begun_backward |= {*waiting, unit}
        behind = [operation for other in (*waiting, unit) for operation in self._backward_of(other)]
        return operations + self._checked(behind)

    def _backward_of(self, unit: int) -> tuple[Operation, ...]:
        return super().backward_begins(unit, self._weights_version)

    def gradient_arrives(self, unit: int) -> None:
        """Note the first gradient of a unit; raise if the unit was reduced already."""
        state = self._units[unit]
        if unit in self._begun_backward and state.reduced:
            raise ScheduleError(
                f"a gradient arrived for unit {self._name(unit)}, which was reduced already: where ranks may skip "
                "units, recompute each unit by itself, and call units in the order of ranks_may_skip_units"
            )
        super().gradient_arrives(unit)

    def backward_ends(self) -> tuple[Operation, ...]:
        """Reduce the remaining units; those that this rank's backward has not reached with gradients of zero."""
        operations = self._begin_root_backward(self._weights_version)
        for unit in self._backward:
            if unit not in self._begun_backward:
                operations += self._backward_of(unit)
        self._begun_backward.clear()
        self._root_begun = False
        return operations + super().backward_ends()

    # ---- between passes, and state --------------------------------------------------------------------------------

    def weights_changed(self) -> tuple[Operation, ...]:
        """Reshard all units; earlier forwards have no backward any more."""
        operations = super().weights_changed()
        self._first_valid = self.last_call
        return operations

    def reset(self) -> tuple[Operation, ...]:
        """Drop passes that were interrupted."""
        self._calls_running.clear()
        self._begun_backward.clear()
        self._last_call_of.clear()
        self._root_begun = False
        return super().reset()

    @property
    def note(self) -> str:
        """The sentence of `describe()`: the order, and the weights this rank has gathered for others only."""
        return (
            f"ranks may skip units, which are gathered in the order {self.order}; this rank has gathered "
            f"{self.filled_in:,} units only for others"
        )

    @property
    def in_forward(self) -> bool:
        """True if a forward (or recomputation) of this rank is running."""
        return bool(self._calls_running)

    def forward_depth(self, unit: int) -> int:
        """Return the number of the unit's running forwards, one inside another."""
        return self._calls_running.count(unit)

    def _name(self, unit: int) -> str:
        return self.order.labels[unit]

    def _checked(self, operations: Sequence[Operation]) -> tuple[Operation, ...]:
        """Raise if a unit would be resharded while this rank computes with it."""
        for action, unit, _ in operations:
            if action is Action.RESHARD and unit in self._calls_running:
                raise ScheduleError(
                    f"unit {self._name(unit)} would be resharded while it runs, since it calls units that are "
                    "registered outside of it; shard them as one unit with it (or give the wrapper a larger "
                    "max_gathered_units)"
                )
        return tuple(operations)
