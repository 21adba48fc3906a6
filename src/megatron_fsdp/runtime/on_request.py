"""The part of the engine for loops that drive communication by hand: gather, release, reduce when told."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.placement import Placement
from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.runtime.executor import Executor
from megatron_fsdp.runtime.lifetimes import LifetimeChecker
from megatron_fsdp.runtime.memory_plan import MemoryPlan, bucket_count, unit_numels
from megatron_fsdp.runtime.observer import Observers, Phase
from megatron_fsdp.runtime.schedule import ROOT, Scheduler
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.runtime.sync import Reach
from megatron_fsdp.unit.param_group import ParameterGroup
from megatron_fsdp.unit.unit import Unit
from megatron_fsdp.weight_plan import prefetch_depth


class OnRequest:
    """What hooks never ask for, and people may."""

    units: tuple[Unit, ...]
    scheduler: Scheduler
    executor: Executor
    memory: MemoryPlan
    lifetimes: LifetimeChecker | None = None
    places: dict[int, tuple[ParameterGroup, int]]
    has_to_agree = False  # weights were asked for ahead, and ranks have not agreed since that all are up to date
    observers: Observers  # who are told of phases and collectives
    _sharding: Sharding

    @property
    def dense(self) -> Domain:
        """The ranks of dense parameters."""
        return self._sharding.dense

    @property
    def experts(self) -> Domain | None:
        """The ranks of experts; None where they are sharded as everything else."""
        return self._sharding.experts

    @property
    def reach(self) -> Reach:
        """How far gradients of this backward travel."""
        raise NotImplementedError

    @property
    def num_ranks(self) -> int:
        """Dense data-parallel ranks, all axes together."""
        return self._sharding.dense.num_ranks

    @property
    def reaching_all(self) -> tuple[dist.ProcessGroup | None, ...]:
        """Groups that together reach every rank of the model."""
        return self._sharding.reaching_all

    def groups(self) -> list[ParameterGroup]:
        """All parameter groups, in unit order."""
        raise NotImplementedError

    def forget_pending_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Forget what was accumulated for sharded parameters and is not visible as their `.grad` yet."""
        if any(group.gradients is not None and group.gradients.has_unseen for group in self.groups()):
            for group, index in (self.places[id(param)] for param in params):
                if group.gradients is not None:
                    group.gradients.forget_pending(index)
        self.release_gradients()

    def release_gradients(self) -> None:
        """Give the memory of gradients that were cleared back: forward and evaluation may need it."""
        if self.scheduler.in_backward:
            return  # some may be on their way
        for group in self.groups():
            if group.gradients is not None:
                group.gradients.release(group.sharded)

    def install_main_weights(self) -> None:
        """Copy main weights into compute weights; what was gathered is out of date."""
        raise NotImplementedError

    def prefetch_weights(self, wait: bool) -> None:
        """Start gathering the units that there is room for, root first, ahead of the next forward."""
        for unit in self.units:
            self.executor.run(self.scheduler.weights_wanted(unit.index))
            if wait:
                unit.wait()
        self.has_to_agree = True
        if wait:
            self.await_weights()

    def await_weights(self) -> None:
        """Wait for what `prefetch_weights` has started."""
        for unit in self.units:
            unit.wait()
        if self.has_to_agree:
            self.has_to_agree = False
            self.executor.begin_pass()

    def check_lifetimes(self) -> None:
        """Check every use of borrowed memory from now on; once."""
        if self.scheduler.in_forward or self.scheduler.in_backward:
            raise ScheduleError("check_lifetimes was called inside a forward or backward; call it between steps")
        if self.lifetimes is None:
            self.executor.run(self.scheduler.weights_changed())
            self.lifetimes = LifetimeChecker(self.units)
            self.observers.add(self.lifetimes)

    @property
    def gathers_beside_main_weights(self) -> bool:
        """Whether no gather writes into memory that main weights lie in, so that both may go on at a time.

        Where one does, a gather that is under way would undo what somebody writes into main weights meanwhile.
        """
        return not any(
            group.is_gathered and group.weights.shares_memory and not group.weights_in_slots for group in self.groups()
        )

    @property
    def largest_unit_numel(self) -> int:
        """Elements of the largest unit besides the root, padding included; the root's where there is no other."""
        sizes = [sum(group.plan.layout.numel for group in unit.groups) for unit in self.units]
        return max(sizes[1:], default=sizes[0])

    def set_prefetch(self, numel: int) -> None:
        """Gather as many units ahead as fit into `numel` elements; see `prefetch_depth`."""
        self.scheduler.look_ahead(
            prefetch_depth(numel, unit_numels([unit.group_plans for unit in self.units])), self.memory.may_grow
        )

    def set_reduce_capacity(self, numel: int) -> None:
        """Have as many buckets as fit into `numel` elements; see `bucket_count`.

        Raises:
            ConfigurationError: Every unit fills a bucket before the first is reduced, whatever is allowed.
        """
        if not self.scheduler.config.reduces_early:
            raise ConfigurationError(
                f"suggested_RS_queue_capacity={numel} has no effect with overlap_grad_reduce=False, where reductions "
                "wait for the end of backward; leave it alone or turn the overlap on"
            )
        self.executor.set_bucket_count(bucket_count(numel, [unit.group_plans for unit in self.units]))

    def gather_units_of(self, params: Iterable[nn.Parameter], wait: bool) -> None:
        """Gather the units that own some parameters, sharded or full ones."""
        self.executor.was_asked = True
        self.executor.begin_pass()
        event = self.scheduler.weights_awaited if wait else self.scheduler.weights_wanted
        for unit in self.units_of(params):
            self.executor.run(event(unit.index))

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """The units that own some parameters, sharded or full ones, in unit order."""
        wanted = {id(param) for param in params}
        return [
            unit
            for unit in self.units
            if any(id(p) in wanted for group in unit.groups for p in (*group.sharded, *group.full))
        ]

    def release_units_of(self, params: Iterable[nn.Parameter]) -> None:
        """Let go of gathered weights that are not in use; they are gathered again when they are needed."""
        for unit in self.units_of(params):
            self.executor.run(self.scheduler.weights_unwanted(unit.index))

    def reduce_units_of(self, params: Iterable[nn.Parameter]) -> None:
        """Reduce now what gradients of the units have arrived; those that have not count as zero."""
        for unit in self.units_of(params):
            if any(group.gradients is not None and group.gradients.is_filling for group in unit.groups):
                self.executor.run(self.scheduler.gradients_ready(unit.index), self.reach)

    def broadcast_whole_weights(self) -> None:
        """Send main weights of which every rank holds a whole copy from the first rank to the others."""
        for group in self.groups():
            for axis, placement in zip(group.plan.axes, group.plan.placements.main_weight, strict=True):
                if axis.group is not None and placement is not Placement.SHARD:
                    with self.observers.during(Phase.WHOLE, ROOT):
                        dist.broadcast(group.weights.main.local, group_src=0, group=axis.group)
        self.install_main_weights()
