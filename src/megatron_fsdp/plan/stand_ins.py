"""Units that take no memory and communicate with nobody, for the engine's own executor to drive.

What the executor asks of a unit is answered here with the layouts of the planned groups and a simulated wire: starting
a collective notes when it will be done, and waiting moves the clock. Orders, memory for gathered weights, buckets and
scratch are the executor's and the scheduler's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.engine.memory import Block, pack_bytes
from megatron_fsdp.plan.setup import Backend
from megatron_fsdp.plan.wires import Wire, Wires
from megatron_fsdp.sharding.placement import Placement, held_region

_NOTHING = torch.empty(0, device="meta")
_SUM_ITEMSIZE = torch.float32.itemsize


@dataclass
class PassingMemory:
    """Shard-sized tensors that come and go with reductions.

    Attributes:
        now_bytes: Alive now.
        peak_bytes: The most that was alive since `forget_peak`.
    """

    now_bytes: int = 0
    peak_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Some more are made."""
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def give_back(self, num_bytes: int) -> None:
        """They are gone."""
        self.now_bytes -= num_bytes

    def forget_peak(self) -> None:
        """Start a new peak."""
        self.peak_bytes = self.now_bytes


class PlannedTicket:
    """A simulated collective; waiting for it moves the clock to its end."""

    def __init__(self, wait: Callable[[], None], finish: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait
        self._finish = finish

    def wait(self) -> None:
        """Once."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
            self._finish()


@dataclass
class PlannedGradients:
    """What the executor asks of a group's gradients."""

    plan: GroupPlan
    wires: Wires
    backend: Backend
    passing: PassingMemory
    unit: int
    is_filling: bool = False
    has_deferred: bool = False
    has_pending: bool = False
    has_main: bool = False

    @property
    def main_bytes(self) -> int:
        """Of the main gradient: from the first reduction of a step until gradients are cleared."""
        numel = held_region(self.plan.layout.numel, self.plan.placements.main_grad, self.plan.axes).numel
        return numel * self.plan.precision.main_grads.itemsize if self.has_main else 0

    def needs_bucket(self, defer: bool) -> bool:
        """As the engine's."""
        return not defer and not self.has_deferred

    def begin(self, bucket: torch.Tensor | None) -> None:
        """As the engine's; deferred sums are a whole gradient in the main gradients' dtype."""
        if bucket is None and not self.has_deferred:
            self.has_deferred = True
            self.passing.take(self._whole_bytes)
        self.is_filling = True

    def keep(self) -> None:
        """As the engine's."""
        self.is_filling = False

    def forget_buckets(self) -> None:
        """Nothing was noted."""

    @property
    def _whole_bytes(self) -> int:
        return self.plan.layout.numel * self.plan.precision.main_grads.itemsize

    @property
    def inner_numel(self) -> int:
        """Elements that the reduction over the inner ranks leaves here."""
        return self.plan.inner_gradient_region.numel

    @property
    def scatters_inside(self) -> bool:
        """Whether it leaves each inner rank a part of its own."""
        return self.inner_numel < self.plan.layout.numel

    @property
    def crosses(self) -> bool:
        """Whether the outer ranks reduce after that."""
        return len(self.plan.axes) > 1 and self.plan.axes[0].num_ranks > 1

    def reduce(self, _lane: object, _bucket: torch.Tensor, _scratch: torch.Tensor | None, _params: object) -> Any:
        """Send over the inner axis."""
        if self.has_deferred:
            self.has_deferred = False
            self.passing.give_back(self._whole_bytes)
        self.is_filling = False
        full_bytes = self.plan.layout.numel * self.plan.precision.grad_comm.itemsize
        inner = self.plan.axis
        times = 1 if self.scatters_inside else 2
        sent = times * (full_bytes - full_bytes // inner.num_ranks)
        result_bytes = self._result_bytes()
        self.has_main |= not self.crosses
        if self.crosses and not self.has_pending:
            self.has_pending = True
            self.passing.take(self._pending_bytes)
        if self.backend is Backend.NCCL:
            self.passing.take(result_bytes)
        wait = self.wires.send(Wire.INNER, "reduce", self.unit, sent if inner.num_ranks > 1 else 0, self._is_expert)

        def finish() -> None:
            if self.backend.is_on_cpu:
                self.passing.take(result_bytes)
            self.passing.give_back(result_bytes)

        return PlannedTicket(wait, finish)

    def reduce_outer(self, _lane: object, _params: object) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Send over the outer axis."""
        self.has_pending, self.has_main = False, True
        outer = self.plan.axes[0]
        wire_bytes = self.inner_numel * self.plan.precision.grad_comm.itemsize
        scatters = self.plan.placements.main_grad[0] is Placement.SHARD
        sent = (1 if scatters else 2) * (wire_bytes - wire_bytes // outer.num_ranks)
        extra = wire_bytes if self.plan.precision.grad_comm != self.plan.precision.main_grads else 0
        if scatters:
            extra += wire_bytes if self.backend is Backend.GLOO else wire_bytes // outer.num_ranks
        self.passing.take(extra)
        wait = self.wires.send(Wire.OUTER, "reduce across", self.unit, sent, self._is_expert)
        return PlannedTicket(wait, lambda: self.passing.give_back(extra + self._pending_bytes)), ()

    @property
    def _is_expert(self) -> bool:
        return self.plan.spec.key.is_expert

    @property
    def _pending_bytes(self) -> int:
        return self.inner_numel * self.plan.precision.main_grads.itemsize

    def _result_bytes(self) -> int:
        """What a reduction over the inner ranks allocates: its output, or on gloo a sum wider than what came in."""
        if not self.scatters_inside or self.plan.axis.num_ranks == 1:
            return 0
        itemsize = self.plan.precision.grad_comm.itemsize
        if self.backend is Backend.NCCL:
            return self.inner_numel * itemsize
        return self.inner_numel * _SUM_ITEMSIZE if itemsize < _SUM_ITEMSIZE else 0


@dataclass
class PlannedGroupDriver:
    """What the executor asks of a group."""

    plan: GroupPlan
    gradients: PlannedGradients | None
    sharded: tuple[()] = ()

    @property
    def needs_all_gather(self) -> bool:
        """As the engine's."""
        return self.plan.needs_all_gather

    @property
    def reduces(self) -> bool:
        """As the engine's."""
        return self.gradients is not None

    @property
    def weights_in_slots(self) -> bool:
        """As the engine's."""
        return self.plan.weights_in_slots

    @property
    def exchanges_inside(self) -> bool:
        """As the engine's: an all-to-all and a local sum, on gloo."""
        grads = self.gradients
        return grads is not None and grads.scatters_inside and grads.backend is Backend.GLOO


class PlannedUnitDriver:
    """What the executor asks of a unit."""

    def __init__(
        self, index: int, label: str, plans: Sequence[GroupPlan], wires: Wires, backend: Backend, passing: PassingMemory
    ) -> None:
        self.index = index
        self.label = label
        self.groups = tuple(
            PlannedGroupDriver(
                plan, PlannedGradients(plan, wires, backend, passing, index) if plan.requires_grad else None
            )
            for plan in plans
        )
        self.lives_in_slots = any(plan.weights_in_slots for plan in plans)
        self.exchanges_inside = any(group.exchanges_inside for group in self.groups)
        self.reduces_outer = any(group.gradients is not None and group.gradients.crosses for group in self.groups)
        self.gathered_bytes = pack_bytes([plan.gathered_bytes for plan in plans])[1]
        self.bucket_bytes = pack_bytes([plan.bucket_bytes for plan in plans])[1]
        self._plans = tuple(plans)
        self._wires = wires
        self._tickets: list[PlannedTicket] = []
        self._outer_tickets: list[PlannedTicket] = []
        self.is_behind = False

    @property
    def needs_outer_all_gather(self) -> bool:
        """As the engine's."""
        return self.is_behind and any(plan.gathers_outer for plan in self._plans)

    def all_gather_outer(self, _lane: object) -> None:
        """Send over the outer axis what the last step changed."""
        if not self.is_behind:
            return
        self.is_behind = False
        for plan in self._plans:
            if plan.gathers_outer:
                part = plan.inner_region.numel * plan.precision.compute.itemsize
                sent = part - part // plan.axes[0].num_ranks
                wait = self._wires.send(Wire.OUTER, "gather across", self.index, sent, plan.spec.key.is_expert)
                self._outer_tickets.append(PlannedTicket(wait, _nothing))

    def wait_for_outer(self) -> None:
        """Wait for that."""
        self._await(self._outer_tickets)

    def unshard(self, _lane: object, _block: Block | None) -> None:
        """Send over the inner axis."""
        self._await(self._outer_tickets)
        for plan in self._plans:
            if plan.needs_all_gather:
                full = plan.layout.numel * plan.precision.compute.itemsize
                sent = full - full // plan.axis.num_ranks
                wait = self._wires.send(Wire.INNER, "gather", self.index, sent, plan.spec.key.is_expert)
                self._tickets.append(PlannedTicket(wait, _nothing))

    def wait_for_unshard(self) -> None:
        """Until it is gathered."""
        self._await(self._outer_tickets)
        self._await(self._tickets)

    @staticmethod
    def _await(tickets: list[PlannedTicket]) -> None:
        for ticket in tickets:
            ticket.wait()
        tickets.clear()

    def reshard(self, loses_memory: bool) -> None:
        """There is nothing to mark."""

    def bucket_of(self, _position: int, _block: Block) -> torch.Tensor:
        """Nobody looks at it."""
        return _NOTHING


def _nothing() -> None:
    """A gather leaves nothing to do."""
