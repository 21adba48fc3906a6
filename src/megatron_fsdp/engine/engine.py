"""The engine: turns hooks into events of the scheduler, and has the executor carry out the operations returned."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_of_transforms
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import raise_together
from megatron_fsdp.comm.collectives import Traffic, is_capturing
from megatron_fsdp.comm.groups import OwnGroups
from megatron_fsdp.comm.registration import UserBuffers
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.dtensor.expert_names import ExpertNames
from megatron_fsdp.engine.executor import DelayedGradients, Executor, GradientCheck
from megatron_fsdp.engine.gradients import (
    GRAD,
    GradientBuffers,
    UsageAgreement,
    direct_hook,
    get_grad,
    match_unreduced,
    plain_attributes,
)
from megatron_fsdp.engine.memory import weakly
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.engine.param_group import ParameterGroup, agree_on_amaxes
from megatron_fsdp.engine.plans import MemoryPlan, prefetch_depth, unit_numels
from megatron_fsdp.engine.schedule import Action, Operation, Scheduler, SyncScope
from megatron_fsdp.engine.unit import StructureCheck, Unit
from megatron_fsdp.errors import ConfigurationError, Remedies, ScheduleError
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.units import ROOT_UNIT, UnitPlan

_NEVER = -1  # the weights_version of a forward that used no weights
_Owned = TypeVar("_Owned", bound="Engine | Unit")


# Note [What ranks agree on, and when]
#
# A collective that only some ranks launch is a deadlock. So what decides about collectives is equal on all ranks: the
# plans made at wrap time, and the order of events, from which the scheduler and the pools compute everything else.
# Where ranks may differ they agree first, in small collectives (`Phase.AGREE`):
#
# - the next pass, only where ranks may skip units: before it begins (`MatchedPasses`);
# - which parameters any rank used: at a sync, until all were used once (`UsageAgreement`). A digest of all all-gathers
#   and reductions travels with these flags, so that ranks which ran different units stop instead of mixing weights;
# - `requires_grad`: when it changed here. Ranks where it did not change do not ask, so it has to change on all;
# - which gradients wait to be reduced: after a reset, since ranks may have been stopped at different points;
# - amaxes of a weight format: when main weights are installed;
# - findings of gradient checks: when a backward ends, behind its last reduction, so that an error leaves none open.

# Note [Weak references]
#
# Parameters, hooks and callbacks refer to the engine weakly. A strong reference would close a cycle (engine -> unit ->
# parameter -> hook -> engine), and a deleted model would keep its memory until Python's collector happens to run.


class Pass(IntEnum):
    """The next pass of a rank over the whole model, on which ranks that may skip units agree."""

    NONE = 0  # nothing: it synchronises, steps, or waits for the others
    FORWARD = 1
    BACKWARD = 2


@dataclass(slots=True, eq=False)
class ForwardCall:
    """One forward of a unit's module, to which its backward refers."""

    unit: int
    module_index: int
    weights_version: int
    reads_weights: bool = True  # its backward may read them
    last_backward: int = -1


ENGINE_ATTRIBUTE = "_fsdp_engine"
"""The key of the engine in the dictionary of a wrapper, or of a module that was sharded in place, which own it."""


def engine_of_module(module: nn.Module) -> Engine | None:
    """Return the engine of a wrapper, or of a module that was sharded in place; None until it is made."""
    found: Engine | None = module.__dict__.get(ENGINE_ATTRIBUTE)
    return found


def engine_of_model(model: object) -> Engine:
    """Return the engine of a wrapper, or of the modules of a model that were sharded in place.

    Raises:
        ConfigurationError: No module of it has an engine, or several have different ones.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = {id(engine): engine for module in modules if (engine := engine_of_module(module)) is not None}
    if len(found) != 1:
        raise ConfigurationError(
            f"a sharded model is needed, and this {type(model).__name__} has {len(found) or 'no'} engines; give what "
            "fully_shard_model, fully_shard or DistributedDataParallel returned, or a model sharded in place whose "
            "context has ended"
        )
    return next(iter(found.values()))


def engine_of_param(param: torch.Tensor) -> Engine:
    """Return the engine of the model of a sharded parameter; raise a ScheduleError if the model was deleted."""
    return alive(param._fsdp_engine)  # type: ignore[attr-defined]


def ranks_of_model(model: object) -> tuple[dist.ProcessGroup | None, ...]:
    """Return groups that reach all ranks of a model; none if the model is not sharded."""
    try:
        return engine_of_model(model).reaching_all
    except ConfigurationError:
        return ()


def alive(reference: weakref.ref[_Owned]) -> _Owned:
    """Return the engine or unit of a hook's weak reference; raise a ScheduleError if it was deleted."""
    found = reference()
    if found is None:
        raise ScheduleError(
            "this module was sharded, and the object that owned its parameters (MegatronFSDP, or the outermost module "
            "that was sharded in place) has been deleted; keep it for as long as the module is used"
        )
    return found


def _take_gradient(
    reference: weakref.ref[Engine], unit_index: int, group_index: int, index: int, param: torch.Tensor
) -> None:
    engine = alive(reference)
    engine.take_gradient(unit_index, group_index, index, param)  # type: ignore[arg-type]  # hooks are typed for tensors


@dataclass(eq=False, repr=False, kw_only=True)
class Engine:
    """Runs forward, backward and gradient sync of one sharded model."""

    units: tuple[Unit, ...]
    unit_plan: UnitPlan
    memory_plan: MemoryPlan
    scheduler: Scheduler
    executor: Executor
    options: EngineOptions
    device: torch.device
    rank_meshes: tuple[RankMesh, ...]  # of all groups, the same on all ranks and in one order
    reaching_all: tuple[dist.ProcessGroup | None, ...]  # groups that together reach every rank of the model
    structure: StructureCheck  # finds parameters that join the model later
    remedies: Remedies  # that messages name
    expert_names: ExpertNames  # over all ranks
    # With a queue of weight gradients that wait for the end of backward, all gradients stay where autograd puts
    # them until then; buckets are filled and reduced at the end of backward, one unit after another.
    delayed: DelayedGradients | None
    gradient_checks: Sequence[GradientCheck]
    own_groups: OwnGroups | None  # destroyed with the engine
    user_buffers: UserBuffers | None  # registered memory that is deregistered with the engine
    format_note: str  # on float8 products that are emulated, and on quantised weights; else empty
    no_capture_reason: str  # why no step can be captured into a CUDA graph; empty: it can, or is not asked for

    reduces_in_fixed_order = False  # whatever is called when, on any rank

    def __post_init__(self) -> None:
        options = self.options
        self.observers = self.executor.observers
        self.observers.remedies = self.remedies
        self._check_of_buckets = next((each for each in self.gradient_checks if each.sees_buckets), None)
        self.keeps_gradients = options.megatron_fsdp_cuda_graph_mode
        self._was_captured = False  # there is a graph that may be replayed at any time
        # Apart for each: the ranks that share a dense parameter hold different experts.
        self._usage = {
            rank_mesh: UsageAgreement(rank_mesh, self.device, options.always_agrees_on_usage, self.remedies.join)
            for rank_mesh in self.rank_meshes
        }
        self._modes = {id(unit.mode): unit.mode for unit in self.units}.values()
        self.group_and_index = {key: at for unit in self.units for key, at in unit.group_and_index.items()}
        # The configuration that reports show, of wrappers that take one, and what was adjusted in it.
        self.config: DistributedDataParallelConfig | None = None
        self.config_notes: tuple[str, ...] = ()
        # Ranks that may skip units agree on the next pass here. All others run the same passes anyway.
        self.on_pass: Callable[[Pass], None] = lambda _begun: None
        self.stepped = False
        self._installs = 0
        self.units_in_full_context: set[int] = set()  # units whose modules show copies of the full parameters
        self.open_iteration = ""  # the iteration over full tensors that was begun, and is neither exhausted nor closed
        self.connected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._agreed_params: set[int] = set()  # ids of parameters whose use ranks agreed on before a change
        self._agreed_since_change = False  # there was a sync since parameters were last frozen or unfrozen
        self._has_unsynced = False  # there was a backward since the last sync
        self._defers = False  # some backward since the last sync defers its reduction
        self._may_differ = False  # since a reset, ranks may hold unreduced gradients for different groups
        self.unsharded_for_backward: set[int] = set()  # units whose modules hold full parameters for the backward
        self._local_weights: dict[int, list[tuple[nn.Parameter, ...]]] | None = None  # made in the first pass
        self._shows_local: set[int] = set()  # units whose local weights are in the modules
        self.backward_number = 0  # how many have begun
        self._callback_queued = False
        self._backward_thread = 0  # the thread on which the hooks of this backward run
        self._ending = False  # inside `_post_backward`, whose checks conclude later
        self.microbatch_count = 0  # backwards since the last that synchronised
        self.executor.finalise = weakly(self._sync_after_backward)  # See Note [Weak references]
        for unit in self.units:
            unit.connect(self)
        for group in self.groups():
            self._inspect_gradients(group)
            for param in group.sharded:
                param._fsdp_engine = weakref.ref(self)  # type: ignore[attr-defined]

    # ---- forward ------------------------------------------------------------------------------------------------

    def pre_forward(self, unit_index: int, module_index: int = 0) -> None:
        """Unshard a unit: the forward of its module at `module_index` is about to run."""
        if self.units_in_full_context and torch.is_grad_enabled():
            raise ScheduleError(
                f"unit {self.units[unit_index].label} was called with gradients enabled while other units show copies "
                "of their full parameters, whose gradients would be lost; use torch.no_grad() inside "
                "full_parameters_context, or open the whole model"
            )
        # The outermost forward brings weights up to date, once for all units inside of it.
        opens = not self.scheduler.in_forward and not self.scheduler.in_backward
        if opens:
            self.refuse_open_iteration("a forward began")
            self.on_pass(Pass.FORWARD)
            if self.executor.optimizer_in_backward is not None:
                self.executor.optimizer_in_backward.check_forward(self.backward_number)
            if is_capturing(self.device):
                self._check_capture()
                self._was_captured = True
            if self._was_captured:
                # A graph has to hold every gather of its step; and the host sees nothing of what replays have changed.
                self.executor.run(self.scheduler.weights_may_have_changed())
                for unit in self.units:
                    unit.expect_update()
            # Before anything else is sent. See Note [What ranks agree on, and when].
            self._match_after_reset()
            self._defers |= not self.syncs
            # Only now, not after the step: the gather over the outer ranks is in place, and would undo what somebody
            # writes into main weights in between.
            self.refresh_weights()
            self.executor.all_gather_outer()
        elif self.scheduler.in_backward and torch._C._current_graph_task_id() == -1:  # autograd executes nothing
            raise ScheduleError(
                "a forward began while the previous backward had not ended, so that backward must have failed; "
                f"call {self.remedies.reset} after an exception and go on with the next batch"
            )
        if self.executor.is_broken:
            raise ScheduleError(
                "communication of an earlier forward or backward failed, so its weights are not what they should be; "
                f"call {self.remedies.reset} on every rank and go on with the next batch"
            )
        self.executor.run(self.scheduler.forward_begins(unit_index))
        # See Note [Weights of other units]: only now, since the operations may have resharded any unit.
        if opens:
            self._show_local_weights()
        self._to_unsharded(unit_index, module_index)
        if self.observers.active:
            self.observers.begins(Phase.FORWARD, unit_index)

    def refuse_open_iteration(self, what: str) -> None:
        """Raise if an iteration over full tensors is open, all of which have to be of one version."""
        if self.open_iteration:
            raise ScheduleError(
                f"{what} while an iteration of {self.open_iteration} is open, whose tensors would be of two versions "
                "or whose collectives would mix with others; exhaust the iterator or close() it first"
            )

    def refuse_shown_copies(self, what: str) -> None:
        """Raise if modules hold copies of the full parameters, which would miss a change of weights or gradients."""
        self.refuse_open_iteration(what)
        if self.units_in_full_context:
            raise ScheduleError(
                f"{what} while full_parameters_context is open, whose copies hold the weights from before; leave the "
                "context first"
            )

    def _check_capture(self) -> None:
        """Raise if a CUDA graph of this step would not repeat it when replayed."""
        if not self.keeps_gradients:
            raise ScheduleError(
                "a CUDA graph is being captured of a model that was sharded without cuda_graph_mode=True, so memory "
                "that the graph uses may belong to something else when it is replayed; shard it by the wrapper with "
                "cuda_graph_mode=True"
            )
        if self.no_capture_reason:
            raise ScheduleError(f"a CUDA graph cannot be captured here, since {self.no_capture_reason}")
        if any(usage.asks for usage in self._usage.values()):
            raise ScheduleError(
                "a CUDA graph is being captured before any step in which every parameter got a gradient on some rank, "
                "so ranks still agree on which did, on the host; run a few whole steps first, and freeze parameters "
                "that are never used"
            )

    def post_forward(
        self,
        unit_index: int,
        needs_backward: bool,
        failed: bool = False,
        module_index: int = 0,
    ) -> ForwardCall:
        """Put the sharded parameters back after the forward of a unit's module, also one that failed."""
        unit, depth = self.units[unit_index], self.scheduler.forward_depth(unit_index)
        if not depth:
            return ForwardCall(unit_index, module_index, _NEVER)  # another hook failed before the forward began
        if self.observers.active:
            self.observers.leaves(Phase.FORWARD, unit_index, failed)
        weights_version, operations = self.scheduler.forward_ends(unit_index, needs_backward)
        self.executor.run(operations)
        if depth == 1:
            # A recomputation may run while the backward of a neighbour in the unit goes on, and needs its parameters.
            if unit_index not in self.unsharded_for_backward:
                unit.to_sharded()
            if not self.executor.is_broken:
                unit.check_untouched(module_index)
        if self.scheduler.in_forward or self.scheduler.in_backward:
            self._show_local_weights((unit_index,))
        else:
            self._hide_local_weights()
            # These all-gathers write into compute weights, which the caller may change as soon as the forward has
            # returned.
            self.executor.wait_for_outer()
        return ForwardCall(unit_index, module_index, weights_version)

    # Note [Weights of other units]
    #
    # A forward may read the dtype of a weight before its module is called (`x.to(self.head.weight.dtype)`). So while a
    # pass runs, modules whose full parameters are not shown hold this rank's shard of the compute weights, instead of
    # that of the main weights, where these differ in dtype. Both are sharded, so that code which would compute with
    # them too early fails instead of computing with stale values.

    def _show_local_weights(self, units: Collection[int] | None = None) -> None:
        """Put this rank's compute weights into modules of units (None: all) that are not unsharded."""
        if self._local_weights is None:
            self._local_weights = {
                unit.index: [group.local_compute_weights() for group in unit.groups]
                for unit in self.units[ROOT_UNIT + 1 :]
                if any(group.plan.has_main_copy for group in unit.groups)
                and not any(group.plan.is_encoded for group in unit.groups)
            }
        for index in self._local_weights if units is None else self._local_weights.keys() & units:
            if not (
                index in self._shows_local or index in self.units_in_full_context or self.units[index].is_unsharded
            ):
                self.units[index].show_copies(self._local_weights[index])
                self._shows_local.add(index)

    def _hide_local_weights(self) -> None:
        """Put the sharded parameters back where modules hold this rank's compute weights, at the end of a pass."""
        for index in self._shows_local - self.units_in_full_context:
            if not self.units[index].is_unsharded:
                self.units[index].to_sharded()
        self._shows_local.clear()

    def _to_unsharded(self, unit_index: int, module_index: int | None = None) -> None:
        """Put full parameters into a unit's modules, or into the one at `module_index`."""
        if unit_index in self._shows_local:
            self._shows_local.discard(unit_index)
            self.units[unit_index].to_sharded()
        self.units[unit_index].to_unsharded(module_index)

    def refresh_weights(self) -> None:
        """Adopt changes of main weights and `requires_grad` (by optimizer, checkpoint or user) since the last pass."""
        if self.has_newer_weights:
            self.install_main_weights()
        self.free_cleared_gradients()  # since forward is where most memory is needed
        for group in self.groups():
            group.check_parameters()
        self._adopt_requires_grad()
        self.structure.check()

    # ---- requires_grad ------------------------------------------------------------------------------------------

    def _adopt_requires_grad(self) -> None:
        """Adopt changes of `requires_grad` since the last pass; they have to be the same on all ranks.

        Nothing is sent unless something has changed; then ranks agree on it first.
        """
        # See Note [What ranks agree on, and when].
        with plain_attributes():
            flags = {id(group): [param.requires_grad for param in group.sharded] for group in self.groups()}
        changes = {id(group): flags[id(group)] for group in self.groups() if flags[id(group)] != group.trainable}
        if not changes:
            return
        self.compare_facts(
            (group, f"requires_grad of {name}", flag)
            for group in self.groups()
            for name, flag in zip(group.names, changes.get(id(group), group.trainable), strict=True)
        )
        if self._agreed_since_change:
            self._agreed_params |= self._trained_ids()
        self._agreed_since_change = False
        for unit in self.units:
            for group_index, group in enumerate(unit.groups):
                if id(group) in changes:
                    self._set_trainable(unit, group_index, changes[id(group)])
        self.scheduler.set_trainable(
            [[flag for group in unit.groups for flag in group.trainable] for unit in self.units]
        )
        # Parameters whose use was never agreed on take gradients now, so "all were used once" does not hold any more.
        if not self._agreed_params.issuperset(self._trained_ids()):
            for usage in self._usage.values():
                usage.forget()

    def _trained_ids(self) -> set[int]:
        return {
            id(param)
            for group in self.groups()
            for param, is_trainable in zip(group.sharded, group.trainable, strict=True)
            if is_trainable
        }

    def _set_trainable(self, unit: Unit, group_index: int, trainable: Sequence[bool]) -> None:
        group = unit.groups[group_index]
        if group.gradients is None:  # it was frozen when the model was sharded
            assert group.plan.sharding is not None
            group.begin_training(group.plan.sharding.plan_training(group.plan))
            self._inspect_gradients(group)
            # The group had no share in its unit's bucket, after whose size the pools are made.
            unit.plan_buckets()
            self.executor.make_block_pools()
        group.set_trainable(trainable, self._has_unsynced)
        if self._local_weights is not None and unit.index in self._local_weights:
            self._local_weights[unit.index][group_index] = group.local_compute_weights()
        self.watch_gradients(unit.index, group_index)

    def watch_gradients(self, unit_index: int, group_index: int) -> None:
        """Register hooks on a group's full parameters that take gradients and have none yet."""
        group = self.units[unit_index].groups[group_index]
        grads = group.gradients
        for index, param in enumerate(group.full if grads is not None else ()):
            if not param.requires_grad or param._post_accumulate_grad_hooks:
                continue
            assert grads is not None
            hook: Callable[[torch.Tensor], None] = functools.partial(
                _take_gradient, weakref.ref(self), unit_index, group_index, index
            )
            # The gradient of a tensor-parallel part is first reduced over those ranks and made local; others are copied
            # directly.
            if group.plan.parts[index] is None:
                hook = direct_hook(grads, index, hook, self.counter_of(unit_index, index))
            param.register_post_accumulate_grad_hook(hook)

    def counter_of(self, _unit_index: int, _index: int) -> Callable[[], object] | None:
        """Return a callback to run when a parameter's gradient was copied into its bucket; None if units need none."""
        return None

    def _inspect_gradients(self, group: ParameterGroup) -> None:
        """Have the check that sees buckets, if any, see gradients before they are reduced."""
        check, names = self._check_of_buckets, group.names
        if check is not None and group.gradients is not None:
            group.gradients.inspect = lambda index, grad: check.record(names[index], grad)

    @property
    def has_newer_weights(self) -> bool:
        """True if main weights were written to since they were last installed."""
        # By anyone: in-place operations raise version counters, and torch's global hook tells of optimizers, whose
        # kernels may raise none.
        return self.stepped or any(unit.main_changed for unit in self.units)

    @property
    def weights_version(self) -> int:
        """The number of changes of the main weights: by steps, loads and edits of the program."""
        return self._installs + self.has_newer_weights

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer holds parameters of the model."""
        # Runs at every step of every optimizer in the process: one parameter per param group has to be enough.
        firsts = (group["params"][0] for group in optimizer.param_groups if group["params"])
        return any(id(param) in self.group_and_index for param in firsts)

    def install_main_weights(self) -> None:
        """Copy main weights into compute weights, and reshard all units, whose gathered weights are stale."""
        self.refuse_open_iteration("weights were installed")
        self.executor.run(self.scheduler.weights_changed())
        # Offloaded weights are written from here on, and copies to the device may still be reading them.
        self.executor.settle_offload()
        with self.observers.during(Phase.INSTALL, ROOT_UNIT):
            # All groups at once: one all-reduce per axis, whatever their number.
            encoded = [group for group in self.groups() if group.weights.quantizer is not None]
            if encoded:
                agree_on_amaxes(encoded, self.rank_meshes)
            for unit in self.units:
                unit.install_main_weights()
        self._installs += 1
        self.stepped = False

    # ---- backward -----------------------------------------------------------------------------------------------

    def pre_backward(self, call: ForwardCall) -> None:
        """Unshard a unit for backward: the gradient of some output of a forward is known."""
        self._begin_backward()
        # Autograd has a thread per device. Hooks on two of them would call the scheduler in an order that differs
        # between ranks, even under a lock.
        if threading.get_ident() != self._backward_thread:
            raise ScheduleError(
                f"the backward of unit {self.units[call.unit].label} runs on another thread than that of earlier "
                "units, as where a model's graph is on several devices, so ranks would communicate in different "
                "orders; keep all units on one device, or call backward inside "
                "torch.autograd.set_multithreading_enabled(False)"
            )
        # Every output of the forward has this hook, and the first gradient to come unshards.
        if call.last_backward == self.backward_number:
            return
        call.last_backward = self.backward_number
        self.observers.backward_pauses()
        if torch.is_grad_enabled() and self.units[call.unit].shards_compute_weights:  # autograd's create_graph=True
            raise ScheduleError(
                f"the backward of unit {self.units[call.unit].label} builds a graph of its own (create_graph=True), "
                "whose saved weights would be resharded before they are used; differentiate twice where weights "
                "are not sharded (by the wrapper, zero_dp_strategy 0 to 2)"
            )
        operations = self.scheduler.backward_begins(call.unit, call.weights_version, call.reads_weights)
        self.executor.run(operations)
        if not call.reads_weights:
            return
        self._to_unsharded(call.unit, call.module_index)  # recomputation inside the module calls no hooks of it
        self.unsharded_for_backward.add(call.unit)
        if self.observers.active:
            self.observers.begins(Phase.BACKWARD, call.unit)

    def take_gradient(self, unit_index: int, group_index: int, index: int, param: nn.Parameter) -> None:
        """Copy a full gradient into its bucket or the unreduced gradient; with `delayed`, when the backward ends."""
        if self.delayed is not None and not self._ending:
            self._note_first_gradient(unit_index)
            return
        grad, param.grad = param.grad, None  # else each full gradient would live until backward ends
        if grad is None:
            return  # a hook of the user has taken it
        group = self.units[unit_index].groups[group_index]
        if grad.requires_grad:
            raise ScheduleError(
                f"the gradient of {group.names[index]} has a graph of its own (create_graph=True); differentiating "
                "twice through a sharded model is not supported, use torch.autograd.grad on inputs where "
                "weights are not sharded (by the wrapper, zero_dp_strategy 0 to 2)"
            )
        grad = group.local_gradient(index, grad)
        gradients = group.gradients
        assert gradients is not None
        if not gradients.is_filling:
            self._note_first_gradient(unit_index)
            self._open_bucket(unit_index, group_index)
        # Checks see what autograd computed, before the bucket's dtype rounds it or makes it infinite.
        for check in self.gradient_checks:
            check.record(group.names[index], grad)
        if self.observers.active:
            self.observers.begins(Phase.COPY, unit_index)
        gradients.add(index, grad)
        if self.observers.active:
            self.observers.ends(Phase.COPY, unit_index)

    def _note_first_gradient(self, unit_index: int) -> None:
        """Report the first gradient of a unit in this backward to the scheduler."""
        if not self._callback_queued:
            self._begin_backward()
        try:
            self.scheduler.gradient_arrives(unit_index)
        except ScheduleError as error:
            raise ScheduleError(f"unit {self.units[unit_index].label}: {error}") from None

    def _open_bucket(self, unit_index: int, group_index: int) -> None:
        """Give a group of a unit memory for the gradients of this backward."""
        gradients = self.units[unit_index].groups[group_index].gradients
        assert gradients is not None
        self.executor.open_bucket(self.units[unit_index], group_index)
        # Observers and checks see gradients in `take_gradient` only.
        if self.observers.active or self.gradient_checks:
            gradients.encode_nothing_directly()

    @property
    def traffic(self) -> Traffic:
        """Traffic of this rank for the model so far, over all axes."""
        return functools.reduce(Traffic.plus, self.traffic_by_axis.values())

    @property
    def traffic_by_axis(self) -> dict[str, Traffic]:
        """The counters of each data-parallel axis, by the name of its mesh dimension; live."""
        return {
            name: axis.traffic
            for rank_mesh in reversed(self.rank_meshes)
            for name, axis in zip(rank_mesh.names, rank_mesh.axes, strict=True)
        }

    @property
    def is_deterministic(self) -> bool:
        """True if a step has to give the same bits on any number of ranks."""
        return self.options.deterministic is not None

    @property
    def syncs(self) -> bool:
        """True if the end of the next backward is a gradient sync of all units."""
        return all(mode.syncs for mode in self._modes)

    def _begin_backward(self) -> None:
        if self._callback_queued:
            return
        self.refuse_shown_copies("a backward began")
        self.on_pass(Pass.BACKWARD)
        if self.executor.optimizer_in_backward is not None:
            self.executor.optimizer_in_backward.backward_begins(self.backward_number + 1)
        if self.has_newer_weights:  # newer than the forward's: the scheduler refuses the backward
            self.executor.run(self.scheduler.weights_changed())
        self._adopt_requires_grad()  # parameters frozen since the forward get no gradient
        self._show_local_weights()
        self._callback_queued = self._has_unsynced = True
        self._defers |= not self.syncs
        self.backward_number += 1
        self._backward_thread = threading.get_ident()
        for check in self.gradient_checks:
            check.begin()  # not at the end: an earlier backward may have failed before it
        # Runs when the graph task has nothing left to do; autograd takes it only while backward runs.
        callback = outside_of_transforms()(self._post_backward)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _post_backward(self) -> None:
        self.observers.backward_pauses()
        for unit_index in self.unsharded_for_backward:
            self.units[unit_index].to_sharded()
        self.unsharded_for_backward.clear()
        self._hide_local_weights()
        self._callback_queued = False
        self._ending = True
        try:
            # One by one: with delayed gradients each unit is filled right before its reduction, so that buckets are
            # reused.
            for operation in self.scheduler.backward_ends():
                if self.delayed is not None and operation.action is Action.REDUCE:
                    self._fill_late(operation.unit, self.delayed)
                self.executor.run((operation,))
        finally:
            self._ending = False
        # After the last reduction, so that an error leaves none open. See Note [What ranks agree on, and when].
        for check in self.gradient_checks:
            with self.observers.during(Phase.AGREE, ROOT_UNIT):
                check.conclude()
        self.gradient_checks = [check for check in self.gradient_checks if not check.is_done]

    def _fill_late(self, unit_index: int, delayed: DelayedGradients) -> None:
        """Copy a unit's gradients into buckets or unreduced gradients, late weight gradients of `delayed` included."""
        for group_index, group, gradients in self.units[unit_index].trained:
            if not gradients.is_filling:
                self._open_bucket(unit_index, group_index)
            for index, param in enumerate(group.full):
                delayed.accumulate(param)
                self.take_gradient(unit_index, group_index, index, param)

    def to_sharded(self) -> None:
        """Put the sharded parameters into all modules."""
        for unit in self.units:
            unit.to_sharded()
        self.unsharded_for_backward.clear()
        self._shows_local.clear()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def groups(self) -> list[ParameterGroup]:
        """Return all parameter groups, in unit order."""
        return [group for unit in self.units for group in unit.groups]

    def sharded_names(self) -> dict[int, str]:
        """Return the canonical name of each sharded parameter by its id."""
        return {
            id(param): name for group in self.groups() for name, param in zip(group.names, group.sharded, strict=True)
        }

    def shard_like(self, param: torch.Tensor, full: torch.Tensor) -> DTensor:
        """Return this rank's shard of a full tensor, cut as a sharded parameter; a copy, in the tensor's dtype."""
        group, index = self.group_and_index[id(param)]
        return group.shard_like(index, full)

    def groups_with_gradients(self) -> list[tuple[ParameterGroup, GradientBuffers]]:
        """Return the trainable groups with their gradient buffers, in unit order."""
        return [(each.group, each.gradients) for unit in self.units for each in unit.trained]

    @property
    def has_unreduced_gradients(self) -> bool:
        """True if gradients wait to be reduced, by the next backward that synchronises or by `finish_grad_sync`."""
        return any(
            found.has_unreduced_gradient or found.has_partly_reduced for _, found in self.groups_with_gradients()
        )

    def _sync_after_backward(self) -> None:
        """Run the gradient sync of the units whose switches ask for it, once a backward's reductions are done."""
        if self.syncs:
            self._sync_gradients(self.units)
            return
        syncing = [unit for unit in self.units if unit.mode.syncs]
        if syncing:
            self._sync_gradients(syncing)
        self.microbatch_count += 1

    def finish_grad_sync(self) -> None:
        """Reduce all deferred gradients, wait for them, and set `.grad`."""
        self.on_pass(Pass.NONE)
        self._sync_gradients(self.units)

    def _sync_gradients(self, units: Sequence[Unit]) -> None:
        self.reduce_deferred(units)
        self.attach_gradients(units)
        self.microbatch_count = 0

    def sync_if_unreduced(self) -> None:
        """Run the gradient sync that no backward has run, if any is due."""
        self.on_pass(Pass.NONE)
        by_call = not all(mode.auto_sync for mode in self._modes)
        # Where the last backward was told to sync, and has, ranks need not agree on its gradients again.
        if self.has_unreduced_gradients or (by_call and (self._has_unsynced or not self.syncs)):
            self._sync_gradients(self.units)

    def reduce_deferred(self, units: Sequence[Unit] | None = None) -> None:
        """Reduce deferred gradients of units (None: of all), from the last one to the root, and wait for them.

        Raises:
            NonFiniteGradientError: A sum of some rank is not finite, where that is checked; all are reduced by then.
        """
        self.refuse_open_iteration("gradients were synchronised")
        check = None if self._ending else self._check_of_buckets
        concludes = self._may_differ  # then ranks of other groups may have nothing to reduce
        if check is not None and not self._callback_queued:  # a running backward keeps its findings
            check.begin()
        self._match_after_reset()
        for unit in reversed(self.units if units is None else units):
            if any(each.gradients.has_unreduced_gradient for each in unit.trained):
                concludes = True
                self.executor.run((Operation(Action.REDUCE, unit.index),), SyncScope.EVERYWHERE)
            else:
                # Its inner reductions are over; at most the outer one was deferred.
                self.executor.reduce_outer(unit)
        self.executor.retire_all()
        if check is not None and concludes:
            with self.observers.during(Phase.AGREE, ROOT_UNIT):
                check.conclude()

    def attach_gradients(self, units: Sequence[Unit] | None = None) -> None:
        """Set `.grad` of the sharded parameters of units (None: of all) to the main gradients."""
        units = self.units if units is None else units
        is_partial = len(units) < len(self.units)
        self._defers = self._has_unsynced = is_partial
        self._agreed_since_change = not is_partial
        renewed: list[tuple[ParameterGroup, list[bool]]] = []
        synced = [each for unit in units for each in unit.trained if any(each.group.trained_since_attach)]
        for rank_mesh, usage in self._usage.items():
            trainable = [each for each in synced if each.group.plan.rank_mesh is rank_mesh]
            used_here = [
                bool(arrived)
                for _, group, gradients in trainable
                for arrived in itertools.compress(gradients.arrived, group.trained_since_attach)
            ]
            if not used_here:
                continue
            # A rank cannot know by itself what others used. See Note [What ranks agree on, and when].
            with self.observers.during(Phase.AGREE, ROOT_UNIT):
                agreed = iter(usage.agree(used_here, self.executor.operations_digest))
            for _, group, gradients in trainable:
                used = [trained and next(agreed) for trained in group.trained_since_attach]
                if gradients.renewed:
                    renewed.append((group, used))
                gradients.attach(group.sharded, used, group.describe_shard)
                group.trained_since_attach = list(group.trainable)
        for group, used in renewed:  # once all gradients are set
            group.run_user_hooks(used)

    def usage_of(self, group: ParameterGroup) -> UsageAgreement:
        """Return the `UsageAgreement` of the group's rank mesh."""
        return self._usage[group.plan.rank_mesh]

    def refuse_late(self, what: str) -> None:
        """Raise, on every rank, if an optimizer in backward has already used the gradients."""
        if self.executor.optimizer_in_backward is not None:
            raise ConfigurationError(
                f"{what} comes too late inside of optimizer.step_in_backward(), since the optimizer has used gradients "
                "already; leave step_in_backward out"
            )

    @property
    def has_gradients_on_their_way(self) -> bool:
        """True if a backward is running (or has failed), or deferred gradients wait for their reduction."""
        return self.scheduler.in_backward or any(found.is_busy for _, found in self.groups_with_gradients())

    def change_grad_comm_dtype(self, policy: MixedPrecisionPolicy) -> None:
        """Reduce gradients in the policy's communication dtype from the next backward on."""
        if self.has_gradients_on_their_way:
            raise ConfigurationError(
                "grad_comm_dtype cannot change while gradients are on their way; call finish_grad_sync first"
            )
        self.options = replace(self.options, policy=policy)
        for group in self.groups():
            group.change_sharding(lambda own: replace(own, options=replace(own.options, policy=policy)))
        for unit in self.units:
            unit.plan_buckets()
        self.executor.make_block_pools()

    def clear_gradients(self) -> None:
        """Clear all gradients, deferred ones included."""
        for group in self.groups():
            if group.gradients is not None:
                group.gradients.clear()
            group.clear_grads()

    def reset(self) -> None:
        """Reshard every unit after an exception; nothing is sent before the next forward or sync.

        Gradients of the failed backward that are in a bucket are dropped. Those that were reduced, or added to deferred
        sums, stay there with those of earlier backwards, as on one process; clear gradients to drop them.
        """
        self.microbatch_count = 0
        self._callback_queued = False
        if self.executor.optimizer_in_backward is not None:
            self.executor.optimizer_in_backward.reset()
        if self.delayed is not None:
            self.delayed.clear()
        # First wait for collectives in flight: the reshard frees the memory that they write.
        self.executor.abandon()
        self.executor.run(self.scheduler.reset())
        self.to_sharded()
        for group in self.groups():
            for param in group.full:
                param.grad = None
        # Only deferred gradients survive a reset; without any, all ranks hold the same and need not ask.
        self._may_differ = self._defers

    def _match_after_reset(self) -> None:
        """Agree on unreduced gradients first: ranks may have been stopped at different points."""
        if not self._may_differ:
            return
        self._may_differ = False
        for rank_mesh in self.rank_meshes:
            with self.observers.during(Phase.AGREE, ROOT_UNIT):
                gradients = [each for group, each in self.groups_with_gradients() if group.plan.rank_mesh is rank_mesh]
                match_unreduced(gradients, rank_mesh, self.device)

    @property
    def notes(self) -> tuple[str, ...]:
        """Adjustments of the configuration, and outcomes of requests that depend on the machine, one sentence each."""
        graphs = "cuda_graph_mode: memory keeps its addresses, but nothing can be captured, since "
        buffers = "" if self.user_buffers is None else self.user_buffers.note
        capture = self.no_capture_reason and graphs + self.no_capture_reason
        return tuple(filter(None, (*self.config_notes, buffers, self.format_note, capture, self.scheduler.note)))

    # ---- for wrappers and reports ------------------------------------------------------------------------------------

    def compare_facts(self, facts: Iterable[tuple[ParameterGroup, str, object]]) -> None:
        """Raise if facts (names and values) about parameters of groups differ between ranks. Collective.

        Facts are compared between the ranks of the group's rank mesh, which share the parameters.
        """
        listed: dict[RankMesh, dict[str, str]] = {rank_mesh: {} for rank_mesh in self.rank_meshes}
        for group, name, value in facts:
            listed[group.plan.rank_mesh][name] = str(value)
        with self.observers.during(Phase.AGREE, ROOT_UNIT):
            for rank_mesh, of_mesh in listed.items():
                own = (rank_mesh.group,) if rank_mesh.group not in self.reaching_all else ()
                raise_together(None, "comparing facts", (*own, *self.reaching_all), of_mesh)  # other ranks stop, too

    def drop_unsynced_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Drop gradients that were accumulated for sharded parameters and are not in their `.grad` yet."""
        if any(found.has_unsynced for _, found in self.groups_with_gradients()):
            for group, index in (self.group_and_index[id(param)] for param in params):
                if group.gradients is not None:
                    group.gradients.drop_unsynced(index)
        self.free_cleared_gradients()

    def clear_decoupled_gradients(self, params: Iterable[torch.Tensor], set_to_none: bool = True) -> None:
        """Clear the `.decoupled_grad` of sharded parameters; no-op for gradients in `.grad`."""
        is_decoupled = any(group.grad_attribute != GRAD for group in self.groups())
        for param in params if is_decoupled else ():
            group, _ = self.group_and_index[id(param)]
            grad = get_grad(param, group.grad_attribute)
            if group.grad_attribute != GRAD and grad is not None:
                if set_to_none:
                    setattr(param, group.grad_attribute, None)
                else:
                    grad.zero_()

    def free_cleared_gradients(self) -> None:
        """Free the memory of cleared gradients: forward and evaluation may need it."""
        if self.scheduler.in_backward or self.keeps_gradients:
            return  # some may be in reduction, or a captured step writes them where they are
        for group, gradients in self.groups_with_gradients():
            gradients.free_if_cleared(group.sharded)

    def prefetch_weights(self, wait: bool) -> None:
        """All-gather units ahead of the next forward, root first, as far as there are slots."""
        self.refuse_open_iteration("weights were gathered ahead")
        for unit in self.units:
            self.executor.run(self.scheduler.prefetch_requested(unit.index))
        if wait:
            self.await_weights()

    def await_weights(self) -> None:
        """Wait for the all-gathers of `prefetch_weights`."""
        for unit in self.units:
            unit.wait_for_unshard()

    def set_prefetch(self, numel: int) -> None:
        """Prefetch as many units as fit into `numel` elements; see `prefetch_depth`."""
        self.scheduler.look_ahead(
            prefetch_depth(numel, unit_numels([unit.group_plans for unit in self.units])), self.options.memory.may_grow
        )

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """Return the units that own some parameters, sharded or full ones, in unit order."""
        wanted = {id(param) for param in params}
        return [
            unit
            for unit in self.units
            if any(id(p) in wanted for group in unit.groups for p in (*group.sharded, *group.full))
        ]
