"""The engine: turns what hooks report into events for the scheduler, and hands its answer to the executor."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.buffer.collectives import Traffic
from megatron_fsdp.buffer.own_group import OwnGroups
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.placement import Placement, placements_for
from megatron_fsdp.runtime.agreement import agree, agree_over
from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.runtime.engine_parts import EngineParts
from megatron_fsdp.runtime.executor import Executor
from megatron_fsdp.runtime.expert_names import ExpertNames
from megatron_fsdp.runtime.finite_check import FiniteCheck
from megatron_fsdp.runtime.gradient_hooks import run_gradient_hooks
from megatron_fsdp.runtime.handed_out import HandedOut
from megatron_fsdp.runtime.large_gradients import LargeGradientCheck
from megatron_fsdp.runtime.named_ranks import first_few
from megatron_fsdp.runtime.observer import Phase
from megatron_fsdp.runtime.on_request import OnRequest
from megatron_fsdp.runtime.recovery import match_deferred_sums
from megatron_fsdp.runtime.schedule import ROOT, Action, Operation, Scheduler
from megatron_fsdp.runtime.structure import StructureCheck
from megatron_fsdp.runtime.sync import Reach
from megatron_fsdp.runtime.unseen_gradients import ReplacedParameters, UnseenGradients
from megatron_fsdp.runtime.usage import UsageAgreement
from megatron_fsdp.runtime.weight_gradient_queue import WeightGradientQueue
from megatron_fsdp.unit.direct_hook import direct_hook
from megatron_fsdp.unit.gradients import GradientBuffers
from megatron_fsdp.unit.param_group import ParameterGroup
from megatron_fsdp.unit.unit import Unit

_NEVER = -1  # the epoch of a forward that used no weights


class ForwardCall:
    """One forward of a unit, as its backward will refer to it."""

    __slots__ = ("epoch", "last_backward", "unit")

    def __init__(self, unit: int, epoch: int) -> None:
        self.unit = unit
        self.epoch = epoch
        self.last_backward = -1


def live_engine(reference: weakref.ref[Engine]) -> Engine:
    """The engine that a hook reports to.

    Raises:
        ScheduleError: It has been deleted.
    """
    engine = reference()
    if engine is None:
        raise ScheduleError(
            "this module was sharded, and the MegatronFSDP object that owned its parameters has been deleted; keep the "
            "object that fully_shard returned for as long as the module is used"
        )
    return engine


def _take_gradient(
    reference: weakref.ref[Engine], index: int, position: int, parameter: int, param: torch.Tensor
) -> None:
    engine = reference() or live_engine(reference)
    engine.take_gradient(index, position, parameter, param)  # type: ignore[arg-type]  # hooks are typed for tensors


class Engine(OnRequest):
    """Everything that happens between two optimizer steps.

    Args:
        parts: What it is put together from.

    Attributes:
        delayed: Weight gradients that wait for the end of backward; None where none do. Where there are, all gradients
            stay where autograd puts them until then: units are filled and reduced there, one after another.
    """

    hears_of_each_gradient = False  # whether `take_gradient` has to be called for each

    def __init__(self, parts: EngineParts) -> None:
        memory, sharding = parts.memory, parts.sharding
        self.units = tuple(parts.units)
        self.mode = parts.mode
        self.device = sharding.device
        self.memory = memory
        self.scheduler = Scheduler(memory.schedule)
        self.executor = Executor(self.units, sharding.device, parts.backward_finished, memory.weights, memory.buckets)
        self.observers = self.executor.observers
        self.finite_check: FiniteCheck | None = None
        self.large_check: LargeGradientCheck | None = None
        self.structure: StructureCheck | None = None
        self.delayed: WeightGradientQueue | None = None
        self._sharding = sharding
        self._usage = {
            is_expert: UsageAgreement(
                domain.group, sharding.device, sharding.find_unused_parameters, domain.foreign_groups
            )
            for is_expert, domain in ((False, sharding.dense), (True, sharding.experts))
            if domain is not None
        }
        self._pending_is_sharded = placements_for(sharding.strategy).pending_grad[-1] is Placement.SHARD
        self.places = {id(param): (group, i) for group in self.groups() for i, param in enumerate(group.sharded)}
        self.stepped = False
        self._unseen = UnseenGradients()
        self.replaced: ReplacedParameters | None = None
        self.handed_out = HandedOut()
        self.expert_names = ExpertNames()
        self.own_groups: OwnGroups | None = None  # they go with the engine
        self.opened: set[int] = set()  # units whose modules hold copies of the full parameters
        self.connected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._asked: set[int] = set()  # ids of parameters that trained before a change, of whose use ranks know
        self._has_asked = False  # a sync was since parameters were last frozen or thawed
        self._has_unshown = False  # a backward was since the last sync
        self._defers = False  # some pass since the last sync leaves sums for later
        self._may_differ = False  # ranks may hold such sums for different groups, since the last reset
        self._installed: set[int] = set()  # units whose modules hold full parameters for the backward
        self._backward_id = 0
        self._callback_queued = False
        self._ending = False  # a backward ends, and its checks conclude after that

    # ---- forward ------------------------------------------------------------------------------------------------

    def before_forward(self, index: int) -> None:
        """The unit's forward is about to run: its parameters become full."""
        if self.opened and torch.is_grad_enabled():
            raise ScheduleError(
                f"unit {self.units[index].label} was called with gradients enabled while other units show copies of "
                "their full parameters, whose gradients would be lost; use torch.no_grad() inside "
                "full_parameters_context, or open the whole model"
            )
        if not self.scheduler.in_forward and not self.scheduler.in_backward:
            self._match_after_reset()
            self._defers |= self.reach is not Reach.EVERYWHERE
            self.refresh_weights()
            self.executor.gather_across()
            self.executor.begin_pass()
            self.has_to_agree = False
        elif self.scheduler.in_backward and torch._C._current_graph_task_id() == -1:  # autograd executes nothing
            raise ScheduleError(
                "a forward began while the previous backward had not ended, so that backward must have failed; "
                "call reset() on the model after an exception and go on with the next batch"
            )
        if self.executor.is_broken:
            raise ScheduleError(
                "communication of an earlier forward or backward failed, so its weights are not what they should be; "
                "call reset() on the model on every rank and go on with the next batch"
            )
        self.executor.run(self.scheduler.forward_begins(index))
        self.units[index].install_full()
        if self.observers.are_there:
            self.observers.begins(Phase.FORWARD, index)

    def after_forward(self, index: int, needs_backward: bool, failed: bool = False) -> ForwardCall:
        """The unit's forward has run or failed: its parameters are the sharded ones again."""
        unit, depth = self.units[index], self.scheduler.forward_depth(index)
        if not depth:
            return ForwardCall(index, _NEVER)  # another hook failed before the forward began
        if self.observers.are_there:
            self.observers.leaves(Phase.FORWARD, index, failed)
        epoch = self.scheduler.forward_ends(index, needs_backward)
        if depth == 1:
            unit.install_sharded()
            if not self.executor.is_broken:
                unit.check_untouched()
        if not self.scheduler.in_forward and not self.scheduler.in_backward:
            self.executor.finish_across()
            self.executor.end_forward(failed)
        return ForwardCall(index, epoch)

    def refresh_weights(self) -> None:
        """Install main weights that anyone (optimizer, checkpoint, user) changed in place since the last time."""
        if self.handed_out.changed() or self._has_newer_weights:
            self.install_main_weights()
        self.release_gradients()
        for group in self.groups():
            group.check_parameters()
        self._follow_requires_grad()
        if self.structure is not None:
            self.structure.check()

    # ---- requires_grad ------------------------------------------------------------------------------------------

    def _follow_requires_grad(self) -> None:
        """Let what was frozen or thawed since the last pass take no gradients, or take them again.

        Where nothing has changed, nothing is sent. Where something has, ranks agree on it first.

        Raises:
            ConfigurationError: It has not changed alike on all ranks.
        """
        changes = {id(group): flags for group in self.groups() if (flags := group.wanted()) != group.trains}
        if not changes:
            return
        with self.observers.during(Phase.AGREE, ROOT):
            self._agree_on_requires_grad(changes)
        if self._has_asked:
            self._asked |= self._trained_ids()
        self._has_asked = False
        for unit in self.units:
            for position, group in enumerate(unit.groups):
                if id(group) in changes:
                    self._follow(unit, position, changes[id(group)])
        self.scheduler.trains([[flag for group in unit.groups for flag in group.trains] for unit in self.units])
        if not self._asked.issuperset(self._trained_ids()):
            for usage in self._usage.values():
                usage.ask_again()

    def _trained_ids(self) -> set[int]:
        return {
            id(param)
            for group in self.groups()
            for param, trains in zip(group.sharded, group.trains, strict=True)
            if trains
        }

    def _agree_on_requires_grad(self, changes: Mapping[int, Sequence[bool]]) -> None:
        facts: dict[bool, list[str]] = {False: [], True: []}
        for group in self.groups():
            for name, flag, before in zip(group.names, changes.get(id(group), group.trains), group.trains, strict=True):
                if flag != before:
                    facts[group.plan.spec.key.is_expert].append(f"requires_grad={flag} of {name}")
        self._meet_for_a_change(first_few([*facts[False], *facts[True]]))
        try:
            agree_over(self.reaching_all, None, facts[False])
            if self.experts is not None:
                agree(self.experts.group, None, facts[True])
        except ConfigurationError as error:
            told = str(error).partition(";")[0]
            raise ConfigurationError(
                f"requires_grad was not changed alike: {told}; set it alike on all ranks"
            ) from None

    def _meet_for_a_change(self, told: str) -> None:
        """Stop together with a rank that has changed nothing and goes on as before, where there is a way to."""
        verifier, domains = self.executor.verifier, (self.dense, self.experts)
        axes = [axis for domain in domains if domain is not None for axis in domain.axes]
        # The other rank comes to the beginning of a pass, where there is one, before it is compared.
        shared = [axis.shared for axis in axes] if verifier is None or self.executor.has_passes else []
        try:
            for work in [work for each in shared if each is not None for work in each.meet()]:
                work.wait()
        except dist.DistBackendError as error:
            raise ConfigurationError(
                f"requires_grad was changed here ({told}) and not on another rank; set it alike on all ranks ({error})"
            ) from error
        if verifier is not None:
            verifier.change()

    def _follow(self, unit: Unit, position: int, trains: Sequence[bool]) -> None:
        group = unit.groups[position]
        if group.gradients is None:  # it was frozen when the model was sharded
            group.begin_training(self._sharding.plan_training(group.plan))
            self.inspect_gradients(group)
            unit.plan_buckets()
            self.executor.make_bucket_pools()
        group.follow(trains, self._has_unshown)
        self.watch_gradients(unit.index, position)

    def watch_gradients(self, index: int, position: int) -> list[RemovableHandle]:
        """Hear of the gradients of a group's parameters, of those that take any and were not watched before."""
        group = self.units[index].groups[position]
        grads, handles = group.gradients, []
        for parameter, param in enumerate(group.full if grads is not None else ()):
            if not param.requires_grad or param._post_accumulate_grad_hooks:
                continue
            assert grads is not None
            hook: Callable[[torch.Tensor], None] = functools.partial(
                _take_gradient, weakref.ref(self), index, position, parameter
            )
            if group.plan.parts[parameter] is None and not self.hears_of_each_gradient:
                hook = direct_hook(grads.direct, grads.filled, grads.arrived, parameter, hook)
            handles.append(param.register_post_accumulate_grad_hook(hook))
        return handles

    def inspect_gradients(self, group: ParameterGroup) -> None:
        """Let the check for values that are not finite, where there is one, see what is about to travel."""
        check, names = self.finite_check, group.names
        if check is not None and group.gradients is not None:
            group.gradients.inspect = lambda index, grad: check.look_at(names[index], grad)

    @property
    def _has_newer_weights(self) -> bool:
        return self.stepped or any(unit.main_changed for unit in self.units)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer has stepped. Its operations on lists of DTensors leave no trace in version counters."""
        if optimizer in self.connected:
            self.executor.note_step(is_connected=True)
            return  # its own hooks install
        if self.replaced is not None:
            self.replaced.check(optimizer)
        self._unseen.look_at(optimizer, self.places)
        firsts = (group["params"][0] for group in optimizer.param_groups if group["params"])
        if any(id(param) in self.places for param in firsts):
            self.stepped = True
            self.executor.note_step(is_connected=False)

    def install_main_weights(self) -> None:
        """Copy main weights into compute weights; what was gathered is out of date."""
        self.executor.run(self.scheduler.weights_changed())
        with self.observers.during(Phase.INSTALL, ROOT):
            for unit in self.units:
                unit.install_main_weights()
        self.stepped = False

    # ---- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, call: ForwardCall) -> None:
        """The gradient of some output of a forward is known, so its backward is about to run."""
        self._begin_backward()
        if call.last_backward == self._backward_id:
            return
        call.last_backward = self._backward_id
        self.observers.backward_pauses()
        if torch.is_grad_enabled() and self.units[call.unit].lives_in_slots:  # autograd's create_graph=True
            raise ScheduleError(
                f"the backward of unit {self.units[call.unit].label} builds a graph of its own (create_graph=True), "
                "whose saved weights would be released before they are used; differentiate twice under "
                "zero_dp_strategy 0 to 2"
            )
        self._run_backward(self.scheduler.backward_begins(call.unit, call.epoch))
        self.units[call.unit].install_full()  # recomputation inside the unit calls no hook of it
        self._installed.add(call.unit)
        if self.observers.are_there:
            self.observers.begins(Phase.BACKWARD, call.unit)

    def take_gradient(self, index: int, position: int, parameter: int, param: nn.Parameter) -> None:
        """Autograd has the whole gradient of a parameter: move it into its bucket, or wait for those that are late."""
        if self.delayed is not None and not self._ending:
            self._hear_of_gradient(index)
            return
        grad, param.grad = param.grad, None
        if grad is None:
            return
        group = self.units[index].groups[position]
        if grad.requires_grad:
            raise ScheduleError(
                f"the gradient of {group.names[parameter]} has a graph of its own (create_graph=True); differentiating "
                "twice through a sharded model is not supported, use torch.autograd.grad on inputs under "
                "zero_dp_strategy 0 to 2"
            )
        grad = group.local_gradient(parameter, grad)
        gradients = self.filling(index, position)
        for check in self._checks:
            check.look_at(group.names[parameter], grad)
        if self.observers.are_there:
            self.observers.begins(Phase.COPY, index)
        gradients.add(parameter, grad)
        if self.observers.are_there:
            self.observers.ends(Phase.COPY, index)

    def filling(self, index: int, position: int) -> GradientBuffers:
        """The gradients of group `position` of a unit, with memory for what this backward brings."""
        gradients = self.units[index].groups[position].gradients
        assert gradients is not None
        if not gradients.is_filling:
            self._hear_of_gradient(index)
            self._begin_filling(index, position)
        return gradients

    def _hear_of_gradient(self, index: int) -> None:
        """A unit has got a gradient, and had none in this backward as far as anybody knows."""
        if not self._callback_queued:
            self._begin_backward()
        try:
            self.scheduler.gradient_arrives(index)
        except ScheduleError as error:
            raise ScheduleError(f"unit {self.units[index].label}: {error}") from None

    def _begin_filling(self, index: int, position: int) -> None:
        """Give group `position` of a unit memory for what this backward brings."""
        gradients = self.units[index].groups[position].gradients
        assert gradients is not None
        self.executor.begin_filling(self.units[index], position, self.reach)
        if self.observers.are_there or self._checks:
            gradients.hear_of_each()

    @property
    def traffic(self) -> Traffic:
        """What this rank sent for the model so far, over all axes."""
        return functools.reduce(Traffic.plus, self.traffic_by_axis.values())

    @property
    def traffic_by_axis(self) -> dict[str, Traffic]:
        """The counters of each data-parallel axis, by the name of its mesh dimension; live."""
        dense = self._sharding.dense
        return {name: axis.traffic for name, axis in zip(dense.names, dense.axes, strict=True)}

    def domain_of(self, group: ParameterGroup) -> Domain:
        """The ranks that share the parameters of a group."""
        return self._sharding.domain(group.plan.spec.key.is_expert)

    @property
    def reach(self) -> Reach:
        """How far gradients of this backward travel."""
        return self.mode.reach(self._pending_is_sharded)

    def _begin_backward(self) -> None:
        if self._callback_queued:
            return
        if self._has_newer_weights:  # than the forward computed with, which the scheduler refuses
            self.executor.run(self.scheduler.weights_changed())
        self._follow_requires_grad()  # what was frozen since the forward gets no gradient
        self._callback_queued = self._has_unshown = True
        self._defers |= self.reach is not Reach.EVERYWHERE
        self._backward_id += 1
        for check in self._checks:
            check.begin()  # not at the end: an earlier backward may have failed before it
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.observers.backward_pauses()
        for index in self._installed:
            self.units[index].install_sharded()
        self._installed.clear()
        late = self.delayed.params if self.delayed is not None else set()
        for unit in self.units if late else ():
            if not late.isdisjoint(id(param) for group in unit.groups for param in group.full):
                self._hear_of_gradient(unit.index)
        self._callback_queued = False
        self._ending = True
        try:
            for operation in self.scheduler.backward_ends():
                if self.delayed is not None and operation.action is Action.REDUCE:
                    self._fill_late(operation.unit, self.delayed)
                self._run_backward((operation,))
        finally:
            self._ending = False
        for check in self._checks:
            with self.observers.during(Phase.AGREE, ROOT):
                check.conclude()

    def _fill_late(self, index: int, delayed: WeightGradientQueue) -> None:
        """Bring everything that a backward left for a unit into its buckets, delayed weight gradients last."""
        for position, group in enumerate(self.units[index].groups):
            if group.gradients is None:
                continue
            if not group.gradients.is_filling:
                self._begin_filling(index, position)
            for parameter, param in enumerate(group.full):
                self.take_gradient(index, position, parameter, param)
            delayed.run(group.full)

    @property
    def _checks(self) -> list[FiniteCheck | LargeGradientCheck]:
        """The checks of every gradient that are switched on."""
        return [check for check in (self.finite_check, self.large_check) if check is not None]

    def install_sharded(self) -> None:
        """Put the sharded parameters into all modules."""
        for unit in self.units:
            unit.install_sharded()
        self._installed.clear()

    def _run_backward(self, operations: Sequence[object]) -> None:
        self.executor.run(operations, self.reach)  # type: ignore[arg-type]

    # ---- gradients ----------------------------------------------------------------------------------------------

    def groups(self) -> list[ParameterGroup]:
        """All parameter groups, in unit order."""
        return [group for unit in self.units for group in unit.groups]

    def flush_deferred(self) -> None:
        """Reduce sums that were deferred and not reduced since; from the last unit to the root, as a backward would.

        Raises:
            NonFiniteGradientError: A sum of some rank is not finite, where that is checked; all are reduced by then.
        """
        check = None if self._ending else self.finite_check
        concludes = self._may_differ  # then not all ranks of other groups may have something to reduce
        if check is not None and not self._callback_queued:  # inside a backward its own findings stay
            check.begin()
        self._match_after_reset()
        for unit in reversed(self.units):
            if any(group.gradients is not None and group.gradients.has_deferred for group in unit.groups):
                concludes = True
                self.executor.run((Operation(Action.REDUCE, unit.index),))
            else:
                self.executor.reduce_across(unit)
        self.executor.retire_all()
        if self.executor.was_asked and not self._callback_queued:
            self.executor.end_pass()
        if check is not None and concludes:
            with self.observers.during(Phase.AGREE, ROOT):
                check.conclude()

    def attach_gradients(self) -> None:
        """Make the main gradients visible as `.grad` of the sharded parameters."""
        self._defers = False
        self._has_asked, self._has_unshown = True, False
        renewed: list[tuple[ParameterGroup, Sequence[bool]]] = []
        for is_expert, usage in self._usage.items():
            trainable = [
                (group, group.gradients)
                for group in self.groups()
                if group.gradients is not None and group.plan.spec.key.is_expert is is_expert
            ]
            trainable = [(group, gradients) for group, gradients in trainable if any(group.trained)]
            used_here = [
                flag
                for group, gradients in trainable
                for flag, trained in zip(gradients.arrived, group.trained, strict=True)
                if trained
            ]
            if not used_here:
                continue
            with self.observers.during(Phase.AGREE, ROOT):
                agreed = iter(usage.agree(used_here, self.executor.fingerprint))
            for group, gradients in trainable:
                used = [trained and next(agreed) for trained in group.trained]
                if gradients.renewed:
                    renewed.append((group, used))
                gradients.attach(group.sharded, used, group.describe_piece)
                group.trained = list(group.trains)
        run_gradient_hooks(renewed)

    @property
    def has_gradients_on_their_way(self) -> bool:
        """Whether a backward is under way (or has failed), or deferred gradients wait for their reduction."""
        pending = [group.gradients for group in self.groups() if group.gradients is not None]
        return self.scheduler.in_backward or any(grads.is_busy for grads in pending)

    def change_grad_comm_dtype(self, policy: MixedPrecisionPolicy) -> None:
        """Let gradients travel in the policy's dtype from the next backward on."""
        groups = [group for group in self.groups() if group.gradients is not None]
        if self.has_gradients_on_their_way:
            raise ConfigurationError(
                "grad_comm_dtype cannot change while gradients are on their way; call finish_grad_sync first"
            )
        self._sharding = replace(self._sharding, policy=policy)
        for group in groups:
            group.change_precision(self._sharding.precision(group.plan.spec.key))
        for unit in self.units:
            unit.plan_buckets()
        self.executor.make_bucket_pools()

    def clear_gradients(self) -> None:
        """Forget all gradients, deferred ones included."""
        for group in self.groups():
            if group.gradients is not None:
                group.gradients.clear()
            group.hide_grads()

    def reset(self) -> None:
        """Bring every unit back to rest after an exception; nothing is sent before the next forward or sync.

        Gradients of the failed backward that lie in a bucket are dropped. Those that were reduced, or added to deferred
        sums, stay there with those of earlier backwards, as on one process; clear gradients to be rid of them.
        """
        self._callback_queued = False
        if self.delayed is not None:
            self.delayed.clear()
        self._installed.clear()
        self.executor.abandon()
        self.executor.run(self.scheduler.reset())
        for unit in self.units:
            unit.install_sharded()
            for group in unit.groups:
                for param in group.full:
                    param.grad = None
        self._may_differ = self._defers

    def _match_after_reset(self) -> None:
        """Ranks may have been stopped at different points; agree on what is deferred before anything else is sent."""
        if not self._may_differ:
            return
        self._may_differ = False
        for is_expert in self._usage:
            with self.observers.during(Phase.AGREE, ROOT):
                groups = [group for group in self.groups() if group.plan.spec.key.is_expert is is_expert]
                match_deferred_sums(groups, self._sharding.domain(is_expert), self.device)
