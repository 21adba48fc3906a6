"""`ShardState`: the state of the modules of one `fully_shard` call, from the call to the first forward and after it.

`fully_shard` gives a module even shards (`even.py`). The first forward of any module of a tree finishes it: the root
is the outermost sharded module, all units are cut into the engine's buffers, and the engine is made.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.comm.agreement import all_agree
from megatron_fsdp.comm.collectives import Traffic
from megatron_fsdp.config.engine_options import (
    MESSAGE_VARIABLE,
    EngineOptions,
    WeightAllocator,
    default_memory_options,
    resolve_skip_order,
    resolve_verify_ranks,
)
from megatron_fsdp.dtensor.expert_names import described
from megatron_fsdp.dtensor.tensor import swap_tensors
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.hooks import uncompiled
from megatron_fsdp.engine.plans import Sharding
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.engine.unit import ParameterPlace, Unit, joined_late
from megatron_fsdp.errors import ConfigurationError, Remedies, ScheduleError, warn_caller
from megatron_fsdp.fsdp2.even import EvenParameter
from megatron_fsdp.fsdp2.shared_units import Settings, SharedUnits, check_before_passes, with_factor
from megatron_fsdp.optim.state_dict import cut_state
from megatron_fsdp.optim.watch import watched_engines
from megatron_fsdp.sharding.mesh import RankMesh, groups_reaching_all, make_group_of_all_ranks, rank_mesh_of
from megatron_fsdp.sharding.units import (
    MergeLimit,
    ends_of_vocabulary,
    merge_limit,
    name_of_neighbours,
    small_neighbours,
)
from megatron_fsdp.wrap.shard_unit import WITHOUT_JOIN, KnownPlans, finish_in_place, shard_in_place

_END_REMEDY = (
    "call the module, or give reshard_after_forward=False to fully_shard of the outermost module, so that the weight "
    "stays with it and is whole during the whole forward"
)


@dataclass(eq=False)
class MeshPlans:
    """The rank mesh of a device mesh, with the shardings and the plans of equal blocks that calls over it share."""

    mesh: RankMesh
    known: KnownPlans = field(default_factory=KnownPlans)
    shardings: dict[object, Sharding] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: DeviceMesh, tensor_parallel: DeviceMesh | None) -> MeshPlans:
        """Return the plans of a mesh, the same ones for as long as a module is sharded by them."""
        key = (mesh, id(mesh.get_group(0)), tensor_parallel)
        found = _PLANS.get(key)
        if found is None:
            found = _PLANS[key] = cls(rank_mesh_of(mesh, dict[str, Traffic](), tensor_parallel))
        return found


_PLANS: WeakValueDictionary[object, MeshPlans] = WeakValueDictionary()


INSTALLED = "torch.distributed.fsdp.fully_shard is that of megatron_fsdp.fsdp2, as install() asks for"
"""The sentence of the log and of `describe()` while `install()` is active."""


_REMEDIES = Remedies(
    reset="reset_iter_state() on the root module",
    join=WITHOUT_JOIN,
    sync="(set_requires_gradient_sync(False)), so nothing was updated; call set_requires_gradient_sync(True) before "
    "the last backward of a step",
)


class ShardState:
    """The state of one `fully_shard` call, which its modules share.

    Members with an underscore in front are those of torch's state that clients reach for: pipeline schedules,
    `register_fsdp_forward_method`, trainers.

    Args:
        modules: The modules of the call.
        params: Their parameters.
        inner: States of the sharded modules inside.
        plans: What calls over the same ranks share; then for the ranks of each parameter.
        sharding: Ranks, placements, dtypes and gradient factor.
        policy: Dtypes of inputs and outputs.
        reshard_after_forward: None: unless the module is the root.
        ignored: The places of parameters that stay as they are.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        params: list[EvenParameter],
        inner: list[ShardState],
        plans: Sequence[MeshPlans],
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        ignored: Sequence[ParameterPlace],
    ) -> None:
        self.params = params
        # Kept alive here, since the next call looks them up in a weak table. The others are of parameters on their own
        # meshes.
        self.plans, *self.other_plans = plans
        self.sharding = sharding
        self.settings = Settings(reshard_after_forward)
        self.ranks_may_skip_units: bool | Sequence[nn.Module] = False
        self.shared: SharedUnits | None = None  # once the parameters are cut into buffers
        self._first = 0  # position of the call's modules among those of its unit
        self.is_finished = False  # from the first forward of its tree on
        self.number = next(_NUMBERS)
        self._ignored = list(ignored)
        self._mp_policy = policy
        self._modules = [weakref.ref(module) for module in modules]
        self._around: weakref.ref[ShardState] | None = None
        for state in inner:
            if state._around is None:
                state._around = weakref.ref(self)
        self._first_hooks: list[RemovableHandle] = []
        for module in modules:
            self._register_hooks(module)
        _unfinished().add(self)

    # ---- the tree ---------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the call that are alive."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def root(self) -> ShardState:
        """The state of the outermost sharded modules around these."""
        around = None if self._around is None else self._around()
        return self if around is None else around.root

    @property
    def engine(self) -> Engine | None:
        """The engine; None before the first forward."""
        return None if self.shared is None else self.shared.engine

    @property
    def is_root(self) -> bool:
        """True if no sharded module is around these."""
        return self.root is self

    def finished(self) -> Engine:
        """Return the engine of the tree, which is made now if it is not there yet. Collective, then.

        Raises:
            ScheduleError: Parameters are on the meta device (a RuntimeError).
        """
        root = self.root
        return self._live_engine() if root.is_finished else root._finish()

    def _live_engine(self) -> Engine:
        engine = self.engine
        if engine is None:
            raise ScheduleError("the model that this module belonged to was deleted; keep it for as long as it is used")
        return engine

    @torch.inference_mode(False)
    def _finish(self) -> Engine:
        states = list(self._all_states())
        shardings = [each for state in states for each in (state.sharding, *(even.sharding for even in state.params))]
        meshes = tuple({id(each.rank_mesh): each.rank_mesh for each in shardings}.values())
        for rank_mesh in meshes:
            make_group_of_all_ranks(rank_mesh)
        with all_agree("sharding modules", groups_reaching_all(meshes)) as facts:
            for path, state in self._named_states():
                facts |= state._facts(path or "the root")
            self._check_structure(states)
            memory = replace(default_memory_options(), allocator=WeightAllocator.RESIZE)
            runs = self._runs(memory.message_bytes)
            facts[MESSAGE_VARIABLE] = str(memory.message_bytes)
            for run in runs:
                paths = [path for path, _ in run]
                facts |= {f"the unit of {path or 'the root'}": name_of_neighbours(paths) for path in paths}
            if any(state.ranks_may_skip_units for state in states if state is not self):
                raise ConfigurationError("ranks_may_skip_units was given for an inner module; give it for the root")
            meta = [each.name for state in states for each in state.params if each.held.is_meta]
            if meta:
                raise ScheduleError(
                    f"{len(meta)} parameters are on the meta device (such as {meta[0]}); give them values before the "
                    "first forward: model.to_empty(device=...) and an initialisation, or a checkpoint"
                )
        shared = [cut_into_buffers([state for _, state in run]) for run in reversed(runs)]  # inner ones first
        options = EngineOptions(
            memory=memory,
            offload=self.sharding.options.offload,
            # As in torch, what no rank has used has no gradient, instead of zeros by which momentum would move it.
            find_unused_parameters=True,
            verify_ranks_s=resolve_verify_ranks(None),
            skip_order=resolve_skip_order(self.ranks_may_skip_units, self.modules[0]),
        )
        merged = [each for each in shared if len(each.settings) > 1]
        source = f"one call per unit{', small neighbours merged' if merged else ''}"
        engine = finish_in_place(self.modules, options, SyncMode(), _REMEDIES, source=source)
        if vars(fsdp)["fully_shard"] is not torch_fully_shard:
            engine.config_notes = (INSTALLED,)
        for each in shared:
            each.set_reshard()
            for end in each.units[1:]:
                end.set_error_owner(_END_REMEDY)
        check_before_passes(engine, merged)
        for state in states:
            state.is_finished = True
            for handle in state._first_hooks:
                handle.remove()
            for module in state.modules if state.is_root else ():  # behind the engine's hook
                module.register_forward_hook(state._reshard_root)
        return engine

    def _facts(self, path: str) -> dict[str, str]:
        """List the facts that all ranks must have in common."""
        facts = {
            "reshard_after_forward": str(self.settings.reshard_after_forward),
            "mp_policy": str(self._mp_policy),
            "offload_policy": str(self.sharding.options.offload),
        }
        params = {each.name: f"{tuple(each.held.shape)} {each.held.dtype}" for each in self.params}
        return {
            **{f"parameter {name} of {path}": value for name, value in params.items()},
            **{f"{name} of {path}": value for name, value in facts.items()},
        }

    def _check_structure(self, states: Sequence[ShardState]) -> None:
        """Raise for a trainable parameter that joined the tree after `fully_shard`; frozen ones stay as they are."""
        known = {key for state in states for key in state._ignored_ids()}
        for state in states:
            known.update(key for unit in state.units for key in unit.group_and_index)
        names: dict[int, str] = {}
        for each in (each for state in states for each in state.params):
            if (first := names.setdefault(id(each.held), each.name)) != each.name:
                raise ConfigurationError(
                    f"{each.name} became one parameter with {first} after fully_shard; tie parameters before, and "
                    "shard the modules that share them by one call"
                )
        for path, module in _named_modules(self.modules):
            for attribute, param in module._parameters.items():
                if param is not None and id(param) not in known and id(param) not in names:
                    if param.requires_grad:
                        raise joined_late(f"{path}.{attribute}".lstrip("."), "a parameter")
                    for state in states:
                        state._ignored.append(ParameterPlace.of(module, attribute))

    def _ignored_ids(self) -> frozenset[int]:
        return frozenset(id(owner.parameters.get(owner.attribute)) for owner in self._ignored)

    def _runs(self, given: int | None) -> list[list[tuple[str, ShardState]]]:
        """Return the calls that share a unit, each with its path: small neighbours; the others by themselves.

        `given`: the size in bytes up to which they are merged; None: by the number of ranks.
        """
        root, *inner = named = list(self._named_states())
        mesh, states = self.plans.mesh, [state for _, state in named]
        held = [sum(each.shape.numel() * each.held.dtype.itemsize for each in state.params) for state in states]
        limit = merge_limit(held, mesh.num_ranks, states[0].sharding.num_shards, given)
        # Ranks may hold other shapes of parameters on other meshes, and of tensor-parallel parts; and those that may
        # skip units call neighbours in any order.
        meshes = (plans.mesh for state in states for plans in (state.plans, *state.other_plans))
        if self.ranks_may_skip_units or mesh.tensor_parallel is not None or any(each is not mesh for each in meshes):
            limit = MergeLimit(0, 0)
        outer = {state._around() for state in states if state._around is not None}
        kinds = [
            (type(state.modules[0]), state.sharding, state.settings)
            if len(state.modules) == 1 and state.shared is None and state not in outer
            else path  # of which there is one
            for path, state in inner
        ]
        runs = small_neighbours([path for path, _ in inner], kinds, held[1:], limit)
        return [[root], *([inner[index] for index in run] for run in runs)]

    def _large_ends(self, ignored: frozenset[int]) -> list[nn.Module]:
        """Return the embeddings and linear layers of the root that are large beside its units; none if it is kept."""
        if not self.is_root or self.settings.reshard_after_forward is False or len(self.modules) > 1:
            return []
        (root,) = self.modules
        blocks = {path: each for path, each in root.named_modules() if each is not root and state_of(each) is not None}
        ends = ends_of_vocabulary(root, blocks).values()
        return [end for end in ends if ignored.isdisjoint(map(id, end.parameters()))]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of the call's parameters; none before they are cut into buffers."""
        return () if self.shared is None else self.shared.units

    @property
    def places(self) -> list[tuple[Unit, int]]:
        """The units, and the position in each of a module of the call."""
        own = [(unit, self._first + index) for unit in self.units[:1] for index in range(len(self._modules))]
        return own + [(end, 0) for end in self.units[1:]]

    def apply_settings(self) -> None:
        """Have settings that change gradients take effect, once the parameters are cut into buffers."""
        if self.shared is not None:
            self.shared.apply()

    def set_reshard(self) -> None:
        """Have the present settings of resharding take effect, once the parameters are cut into buffers."""
        if self.shared is not None:
            self.shared.set_reshard()

    def _reshard_root(self, *_unused: Any) -> None:
        if self.settings.reshard_after_forward:
            self.reshard()

    def unshard(self) -> None:
        """Start to all-gather the weights. Collective."""
        engine = self.finished()
        if not engine.scheduler.in_forward and not engine.scheduler.in_backward:
            engine.refresh_weights()
            engine.executor.all_gather_outer()
        for unit in self.units:
            engine.executor.run(engine.scheduler.prefetch_requested(unit.index))

    def reshard(self) -> None:
        """Put the sharded parameters into the modules, and free the full ones unless they are in use."""
        if (engine := self.engine) is not None:
            for unit, module_index in self.places:
                unit.to_sharded(module_index)
            for unit in self.units:
                if not unit.is_unsharded:  # else a neighbour shows its full parameters
                    engine.executor.run(engine.scheduler.reshard_requested(unit.index))

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _register_hooks(self, module: nn.Module) -> None:
        """Have the first forward finish the tree, and every forward cast; before the engine's hooks are there."""
        policy = self._mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            module.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        compiled: Any = module._compiled_call_impl
        if compiled is not None:  # by `module.compile()`

            def call(*args: Any, **kwargs: Any) -> Any:
                if not self.is_finished:
                    self.finished()
                    return module._compiled_call_impl(*args, **kwargs)  # type: ignore[misc]  # now inside the engine's
                return compiled(*args, **kwargs)

            module._compiled_call_impl = torch.compiler.disable(call, recursive=False)
        else:
            first = uncompiled(self._on_first_forward)
            self._first_hooks.append(module.register_forward_pre_hook(first, prepend=True))
        if policy.output_dtype is not None:
            module.register_forward_hook(self._cast_output)

    def _on_first_forward(self, module: nn.Module, args: Any) -> None:
        # Several modules of one call have such a hook, and torch iterates over a copy of its list of hooks.
        if not self.is_finished:
            self._hooks_of(module)[0](module, args)  # this call does not see the hook that is registered now

    def _hooks_of(self, module: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the engine's hooks before and after a forward of a module."""
        self.finished()
        index = next(index for index, reference in enumerate(self._modules) if reference() is module)
        return self.units[0].forward_hooks[self._first + index]

    def _cast_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = self._mp_policy.param_dtype
        if dtype is None or not self._mp_policy.cast_forward_inputs:
            return args, kwargs
        return _apply_to_tensors(partial(_cast, dtype), args), _apply_to_tensors(partial(_cast, dtype), kwargs)

    def _cast_output(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        dtype = self._mp_policy.output_dtype
        return output if dtype is None else _apply_to_tensors(partial(_cast, dtype), output)

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Unshard before a method that `register_fsdp_forward_method` has named; return its inputs, cast."""
        self._hooks_of(module)[0](module, args)
        return self._cast_inputs(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard after such a method; return its results, cast."""
        return self._hooks_of(module)[1](module, args, {}, self._cast_output(module, args, output))

    # ---- what clients of torch's state reach for --------------------------------------------------------------------

    def _lazy_init(self) -> None:
        self.finished()

    @property
    def _is_root(self) -> bool | None:
        return self.is_root if self.is_finished else None

    @property
    def _state_ctx(self) -> ShardState:
        return self.root

    @property
    def all_states(self) -> list[ShardState]:
        """All states of the tree, the root's first."""
        return list(self.root._all_states())

    def _all_states(self) -> Iterator[ShardState]:
        return (state for _, state in self._named_states())

    def _named_states(self) -> Iterator[tuple[str, ShardState]]:
        """Iterate over the states of the tree, each with the path of its first module."""
        seen = set()
        for path, module in _named_modules(self.modules):
            state = state_of(module)
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                yield path, state

    @property
    def _fsdp_param_groups(self) -> list[ParameterGroupHandle]:
        return [ParameterGroupHandle(self)] if self.params or any(unit.groups for unit in self.units[:1]) else []

    @property
    def _fsdp_param_group(self) -> ParameterGroupHandle | None:
        return next(iter(self._fsdp_param_groups), None)

    def _root_post_backward_final_callback(self) -> None:
        self._live_engine().finish_grad_sync()


def cut_into_buffers(states: Sequence[ShardState]) -> SharedUnits:
    """Cut the parameters of calls into the engine's buffers, as one unit, once; even shards stay the same objects.

    Collective.
    """
    first, params = states[0], [each for state in states for each in state.params]
    if first.shared is not None:
        return first.shared
    apart, objects, aliases, shared = {}, {}, dict[int, list[DTensor]](), list[str]()
    divisor, divided = first.settings.divisor, dict[Sharding, Sharding]()  # parameters with one sharding share buffers
    for each in params:
        held = each.held
        tensors, is_shared = each.take_aliases()
        if tensors:
            aliases[id(held)] = tensors
        shared += [each.name] * is_shared
        whole = each.gather()
        if each.sharding is not first.sharding:
            apart[id(whole)] = divided.setdefault(each.sharding, with_factor(each.sharding, divisor))
        if whole is not held:
            objects[id(whole)] = held
            each.set(whole)
    grads = {id(held): held.grad for held in objects.values() if held.grad is not None}
    formats = dict(filter(None, (each.extension_format() for each in params)))
    ignored = frozenset[int]().union(*(state._ignored_ids() for state in states))
    own, mode = with_factor(first.sharding, divisor), SyncMode()
    given = (own, mode, first.plans.known, ignored, objects, formats, apart)
    try:
        ends = [shard_in_place([end], *given) for end in first._large_ends(ignored)]
        unit = shard_in_place([module for state in states for module in state.modules], *given)
    except BaseException:
        for each in params:
            each.set(objects.get(id(each.held), each.held))
        raise
    unit.reshard_after_forward = first.settings.reshard_after_forward is not False
    found = SharedUnits((unit, *ends), [state.settings for state in states], mode, divisor)
    group_and_index = {key: at for each in found.units for key, at in each.group_and_index.items()}
    for key, grad in grads.items():
        group, index = group_and_index[key]
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        group.sharded[index].grad = group.shard_like(index, full)
    for key, tensors in aliases.items():
        group, index = group_and_index[key]
        for tensor in tensors:  # of state dicts, which follow
            swap_tensors(tensor, described(group.sharded[index].detach()))
    if shared:
        warn_caller(
            f"tensors of this program share memory with {shared[0]} and {len(shared) - 1} more parameters, which "
            "are cut again now; these tensors keep the values from before: take detach(), data or to_local() of a "
            "parameter after the first forward, or clone() to keep its values",
            is_first=True,  # each for its own
        )
    found.apply()
    position = 0
    for state in states:
        state.shared, state._first = found, position
        position += len(state.modules)
        state.params.clear()
        _unfinished().discard(state)
    return found


@cache
def _unfinished() -> WeakSet[ShardState]:
    """Register a global hook of torch's optimizers, once, and return the states that wait for their first forward.

    A step before it finishes their trees: torch makes the state of optimizers by one, to load into.
    """
    states: WeakSet[ShardState] = WeakSet()

    watched_engines()
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_unused: finish_models_of(optimizer))
    # First, so that the hooks of engines see what it has finished.
    hook.hooks_dict_ref().move_to_end(hook.id, last=False)  # type: ignore[union-attr]
    return states


def finish_models_of(optimizer: torch.optim.Optimizer) -> None:
    """Finish the trees that an optimizer holds parameters of, as their first forward would. Collective, then."""
    states = _unfinished()
    held = {id(param) for group in optimizer.param_groups for param in group["params"]} if states else set()
    waiting = [
        state
        for state in states
        if any(id(owner.parameters.get(owner.attribute)) in held for each in state.params for owner in each.owners)
    ]
    for state in sorted(waiting, key=lambda state: state.number):  # in one order on all ranks
        if not state.is_finished:
            state.finished()
    if waiting:
        cut_state(optimizer)


class ParameterGroupHandle:
    """The members of torch's parameter group that pipeline schedules reach for."""

    def __init__(self, state: ShardState) -> None:
        self._training_state: object = None
        self.mp_policy = state._mp_policy

    def post_backward(self) -> None:
        """Do nothing: `_root_post_backward_final_callback` of the root reduces all units."""


def state_of(module: nn.Module) -> ShardState | None:
    """Return the state of a module that our `fully_shard` has sharded; None for any other."""
    found: ShardState | None = module.__dict__.get(_STATE)
    return found


def set_state(module: nn.Module, state: ShardState) -> None:
    """Make a state that of a module."""
    module.__dict__[_STATE] = state


_STATE = "_fsdp2_state"
_NUMBERS = itertools.count()  # calls are the same on all ranks, in one order


def _named_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules of roots by path, which begins with a number where there are several."""
    for number, root in enumerate(roots):
        yield from root.named_modules(prefix=str(number) if len(roots) > 1 else "")


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
