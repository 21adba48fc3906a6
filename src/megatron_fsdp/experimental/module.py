"""`fully_shard` of one module in place, inside a context whose modules share an engine, and their optimizers."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.comm.agreement import raise_together
from megatron_fsdp.comm.collectives import Traffic, default_device, resolve_device
from megatron_fsdp.config.engine_options import (
    EngineOptions,
    MemoryOptions,
    UserBufferOptions,
    WeightAllocator,
    resolve_skip_order,
    resolve_verify_ranks,
)
from megatron_fsdp.config.precision import MixedPrecisionPolicy, check_policy
from megatron_fsdp.engine.engine import Engine, engine_of_param
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.plans import Sharding
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, Remedies, ScheduleError, warn_caller
from megatron_fsdp.experimental.placement import Flat, Placements
from megatron_fsdp.formats.quantized import take_quantized_apart
from megatron_fsdp.optim.local_step import params_of
from megatron_fsdp.optim.optimizer import connect_with_hooks
from megatron_fsdp.sharding.mesh import rank_mesh_of
from megatron_fsdp.sharding.placement import Placement as OnAxis
from megatron_fsdp.sharding.placement import Placements as BufferPlacements
from megatron_fsdp.wrap.shard_unit import (
    WITHOUT_JOIN,
    KnownPlans,
    check_not_wrapped,
    finish_in_place,
    has_tensor_classes,
    shard_in_place,
    unit_of,
    units_inside,
)

_OPEN: ContextVar[FsdpContext | None] = ContextVar("fully_shard_context", default=None)


_REMEDIES = Remedies(reset="reset() of the fully_shard_context", join=WITHOUT_JOIN)


class FsdpContext:
    """The modules that were sharded inside one `fully_shard_context`.

    Args:
        device: Of the shards.
        use_symmetric_memory: Communicate through memory that keeps its addresses, symmetric where the back end has it.
        ranks_may_skip_units: As of `fully_shard_model`.

    Attributes:
        device: As given.
        use_symmetric_memory: As given.
    """

    def __init__(
        self, device: torch.device, use_symmetric_memory: bool, ranks_may_skip_units: bool | Sequence[nn.Module] = False
    ) -> None:
        self.device = device
        self._ranks_may_skip_units = ranks_may_skip_units
        self.use_symmetric_memory = use_symmetric_memory
        self.known = KnownPlans()
        self.shardings: dict[object, Sharding] = {}
        self.traffic: dict[str, Traffic] = {}  # by mesh dimension
        self._modules: list[weakref.ref[nn.Module]] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._refusals: list[RemovableHandle] = []
        self._engine: weakref.ref[Engine] | None = None
        # Gradients of an axis that is partial between microbatches are reduced with the last one; others at once.
        self.at_once, self.with_last = SyncMode(auto_sync=True), SyncMode(auto_sync=False, is_last_microbatch=True)

    def add(self, module: nn.Module) -> None:
        """Add a sharded module, which cannot run before the context ends."""
        self._modules.append(weakref.ref(module))
        self._refusals.append(module.register_forward_pre_hook(lambda *_: self.ensure_finalized()))

    @property
    def is_last_microbatch(self) -> bool:
        """True if the next backward is the last of its step."""
        return bool(self.with_last.is_last_microbatch)

    @is_last_microbatch.setter
    def is_last_microbatch(self, is_last: bool) -> None:
        self.with_last.is_last_microbatch = is_last

    @property
    def engine(self) -> Engine:
        """The engine of the modules.

        Raises:
            ScheduleError: The context is still open, or its modules were deleted (a RuntimeError).
        """
        self.ensure_finalized()
        engine = None if self._engine is None else self._engine()
        if engine is None:
            raise ScheduleError("no module of this context is sharded, or all were deleted; keep the model")
        return engine

    def finalize(self, error: BaseException | None = None) -> None:
        """Make the engine of all modules that were sharded. Collective; no-op if it was made already.

        Args:
            error: The error with which this rank leaves the block; raised on all.

        Raises:
            ConfigurationError: Ranks have sharded different modules, or in different ways.
        """
        if self._engine is not None:
            return
        modules = [module for reference in self._modules if (module := reference()) is not None]
        inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
        roots = [module for module in modules if id(module) not in inside]
        self._roots = list(map(weakref.ref, roots))
        if not roots:
            if error is not None:
                raise_together(error, "sharding modules")
            return
        memory = MemoryOptions(allocator=WeightAllocator.RESIZE)
        if self.use_symmetric_memory:
            memory = MemoryOptions(user_buffers=UserBufferOptions(), is_persistent=True)
        options = EngineOptions(
            memory=memory,
            verify_ranks_s=resolve_verify_ranks(None),
            skip_order=resolve_skip_order(self._ranks_may_skip_units, roots[0]),
        )
        engine = finish_in_place(roots, options, self.at_once, _REMEDIES, error)
        self._engine = weakref.ref(engine)
        for handle in self._refusals:
            handle.remove()

    def reset(self) -> None:
        """Go on after an exception inside a forward or backward; gradients in reduction are dropped. Every rank."""
        self.engine.reset()

    def ensure_finalized(self) -> None:
        """Raise a ScheduleError (a RuntimeError) if the context is still open."""
        if self._engine is None and self._modules:
            raise ScheduleError(
                "modules of a context that has not ended, or that an exception has ended, cannot run; Exit "
                "fully_shard_context first, without an exception"
            )

    @property
    def roots(self) -> list[nn.Module]:
        """The modules with no sharded module above them."""
        return [module for reference in self._roots if (module := reference()) is not None]

    @property
    def forward_order(self) -> Iterator[nn.Module]:
        """The modules in the order in which they are registered, root by root."""
        return (module for root in self.roots for _, module, _ in units_inside(root))

    @property
    def backward_order(self) -> Iterator[nn.Module]:
        """The modules in the reverse order of roots and of siblings, outer ones before inner ones."""

        def walk(module: nn.Module) -> Iterator[nn.Module]:
            if unit_of(module) is not None:
                yield module
            for child in reversed(list(module.children())):
                yield from walk(child)

        return (module for root in reversed(self.roots) for module in walk(root))


def open_context() -> FsdpContext:
    """Return the context that is open.

    Raises:
        ScheduleError: None is (a RuntimeError).
    """
    found = _OPEN.get()
    if found is None:
        raise ScheduleError("fully_shard has to be called inside fully_shard_context; open one around all calls")
    return found


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
    ranks_may_skip_units: bool | Sequence[nn.Module] = False,
) -> Iterator[FsdpContext]:
    """Shard the modules that are handed to `fully_shard` inside, and make their engine when the block ends well.

    Args:
        device: Of the shards; None: the accelerator of this process, else the CPU.
        use_symmetric_memory: Communicate through memory that keeps its addresses, symmetric where the back end has it.
        unify_communication_stream: Accepted, and warned of: all-gathers and reductions have a stream each.
        ranks_may_skip_units: Let ranks call different units; as of `fully_shard_model`.

    Yields:
        The context, which stays in use (`microbatch`).

    Raises:
        ScheduleError: Another context is open (a RuntimeError).
        ConfigurationError: At the end of the block: ranks have sharded different modules.
    """
    if _OPEN.get() is not None:
        raise ScheduleError("fully_shard_context does not support nesting; shard all modules inside one context")
    if unify_communication_stream:
        warn_caller("unify_communication_stream=True has no effect: gathers and reductions keep streams of their own")
    on = resolve_device(device, default_device().type)
    context = FsdpContext(on, use_symmetric_memory, ranks_may_skip_units)
    token = _OPEN.set(context)
    try:
        yield context
    except BaseException as error:
        context.finalize(error)
        raise
    finally:
        _OPEN.reset(token)
    context.finalize()


@contextmanager
def microbatch(context: FsdpContext, is_last: bool) -> Iterator[None]:
    """Mark the backwards in this block as the last of their step, or not; restore the mark from before.

    Raises:
        ScheduleError: The context is still open (a RuntimeError).
    """
    context.ensure_finalized()
    with context.with_last.changed(is_last_microbatch=is_last):
        yield


_CONTEXT = "_fsdp_context"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: int = 1,
) -> None:
    """Shard the parameters of a module that no earlier call has taken, in place and at once; no communication.

    Call it for inner modules first, then for those around them, inside `fully_shard_context`. Weights are assumed to be
    equal on all ranks. Build optimizers afterwards: the module holds new parameters, DTensors over main weights.

    Args:
        module: Its class becomes a subclass that is a `FsdpModule`, too.
        mesh: The data-parallel mesh, of one dimension or two: outer, then sharding.
        placements: Of compute weights, main gradients and main weights.
        mixed_precision_policy: Dtypes; None: main weights in float32, gradients in the parameters' dtype.
        grad_divisor: Divides the mean of the gradients; for experts, the number of ranks that hold different ones.

    Raises:
        ScheduleError: No context is open (a RuntimeError).
        ConfigurationError: The module was sharded already or shares a parameter with one that was, or an argument is
            out of range (a ValueError). Nothing has changed then.
        NotSupportedYetError: A dtype or a combination of placements that is not supported (a NotImplementedError).
    """
    context = open_context()
    policy = MixedPrecisionPolicy() if mixed_precision_policy is None else mixed_precision_policy
    check_policy(policy)
    if type(grad_divisor) is not int or grad_divisor < 1:
        raise ConfigurationError(f"grad_divisor={grad_divisor!r} is no whole number above 0; give 1 or more")
    check_not_wrapped(module)
    if isinstance(module, FsdpModule):
        raise ConfigurationError(f"this {type(module).__name__} is sharded already; shard a module once")
    for name, inner in module.named_modules():
        if isinstance(inner, FsdpModule) and inner.__dict__[_CONTEXT] is not context:
            raise ConfigurationError(
                f"{name} was sharded in another fully_shard_context; shard a model inside one context"
            )
    if has_tensor_classes(module):
        take_quantized_apart([module])
    for name, param in module.named_parameters():
        if not isinstance(param, DTensor):  # of a unit inside
            _check_parameter(name, param)
    placements.check_axes(mesh)
    sharding = _sharding(context, mesh, placements, policy, grad_divisor)
    is_partial = any(isinstance(placement, Partial) for placement in placements.gradient)
    shard_in_place([module], sharding, context.with_last if is_partial else context.at_once, context.known)
    module.__dict__[_CONTEXT] = context
    kind = type(module)
    module.__class__ = type(f"ExperimentalFsdp{kind.__name__}", (FsdpModule, kind), {})
    context.add(module)


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if param.dtype not in _DTYPES and param.requires_grad:
        raise NotSupportedYetError(f"{name} is of {param.dtype}; give float32, bfloat16 or float16")
    if param.ndim == 0 or 0 in param.shape[1:]:
        raise ConfigurationError(
            f"{name} has the shape {tuple(param.shape)}, which has no rows to shard; give one dimension or more"
        )


def _sharding(
    context: FsdpContext, mesh: DeviceMesh, placements: Placements, policy: MixedPrecisionPolicy, grad_divisor: int
) -> Sharding:
    """Return the sharding of a call; calls with equal arguments share one, and so its layouts."""
    key = (id(mesh), placements, policy, grad_divisor)
    if key not in context.shardings:
        if mesh.ndim > 2:
            raise NotSupportedYetError(f"the mesh has {mesh.ndim} axes; give one or two, outer and sharding")
        wide = policy if policy.main_params_dtype is not None else replace(policy, main_params_dtype=torch.float32)
        rank_mesh = rank_mesh_of(mesh, context.traffic)
        # a sum along an axis is no mean along it
        averaged = zip(placements.gradient, rank_mesh.axes, strict=True)
        ranks = prod(axis.num_ranks for placement, axis in averaged if placement != Partial("sum"))
        context.shardings[key] = Sharding(
            options=EngineOptions(policy=wide),
            rank_mesh=rank_mesh,
            placements=_buffer_placements(placements),
            device=context.device,
            divisor=ranks * grad_divisor,
        )
    return context.shardings[key]


def _buffer_placements(placements: Placements) -> BufferPlacements:
    """Return the placements of the engine's buffers."""
    parameter, gradient, optimizer = (
        [OnAxis.SHARD if isinstance(each, Flat) else OnAxis.REPLICATE for each in given]
        for given in (placements.parameter, placements.gradient, placements.optimizer)
    )
    for name, outer, inner in (
        ("parameter", parameter, gradient),
        ("gradient", gradient, optimizer),
    ):
        for held, target in zip(outer, inner, strict=True):
            if held is OnAxis.SHARD and target is not OnAxis.SHARD:
                raise NotSupportedYetError(
                    f"{placements}: {name} is sharded along an axis that the next one of parameter, gradient and "
                    "optimizer is not; shard the later ones at least as far"
                )
    if len(parameter) == 2 and parameter[0] is OnAxis.SHARD:
        raise NotSupportedYetError(
            "parameters sharded over two axes are those of one axis of all ranks; flatten the mesh and give that one"
        )
    # Along an outer axis gradients wait for the sync, which comes at once where they are not partial.
    accumulated = tuple(
        OnAxis.SHARD if dim == len(gradient) - 1 and held is OnAxis.SHARD else OnAxis.PARTIAL
        for dim, held in enumerate(gradient)
    )
    return BufferPlacements(tuple(parameter), accumulated, tuple(optimizer))


class FsdpModule(nn.Module):
    """A module that `fully_shard` has sharded in place; its class is a subclass of this and of its former class."""

    class Phase(enum.Enum):
        """Phases of a sharded module."""

        RESTING = "resting"
        FORWARD = "forward"
        BACKWARD = "backward"

    @property
    def context(self) -> FsdpContext:
        """The context in which it was sharded."""
        found: FsdpContext = self.__dict__[_CONTEXT]
        return found

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    @property
    def phase(self) -> Phase:
        """The phase of the module: its forward or backward runs, or it rests."""
        engine, unit = self.context.engine, self._unit
        if engine.scheduler.forward_depth(unit.index):
            return self.Phase.BACKWARD if engine.scheduler.in_backward else self.Phase.FORWARD
        return self.Phase.BACKWARD if unit.index in engine.unsharded_for_backward else self.Phase.RESTING

    @property
    def name(self) -> str:
        """Its path from its root; "" for a root itself."""
        self.context.ensure_finalized()
        return next(path for root in self.context.roots for path, inner in root.named_modules() if inner is self)

    def is_root(self) -> bool:
        """Return True if no sharded module is above it."""
        self.context.ensure_finalized()
        return any(root is self for root in self.context.roots)

    @property
    def parameter_groups(self) -> tuple[GroupView, ...]:
        """Its parameters by dtype and `requires_grad`; none where it owns none."""
        return tuple(GroupView(group, self._unit) for group in self._unit.groups)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load as `nn.Module` does; copies into the shards.

        Raises:
            ScheduleError: `assign` is True (a RuntimeError).
        """
        if assign:
            raise ScheduleError(
                "load_state_dict(assign=True) would replace the sharded parameters, which are parts of flat buffers; "
                "load with assign=False, which copies"
            )
        return super().load_state_dict(state_dict, strict)

    def __deepcopy__(self, _memo: Any) -> Any:
        raise ConfigurationError("a sharded module cannot be copied; copy the model before sharding it")


class ParameterView:
    """A parameter of a group: its names, the sharded one, and the full one that compute sees."""

    def __init__(self, fqns: tuple[str, ...], sharded: nn.Parameter, unsharded: nn.Parameter) -> None:
        self.fqns, self.sharded, self.unsharded = fqns, sharded, unsharded


class GroupView:
    """Parameters of a sharded module with one dtype and `requires_grad`, and their buffers."""

    def __init__(self, group: ParameterGroup, unit: Unit) -> None:
        self._group, self._unit = group, unit

    @property
    def fsdp_parameters(self) -> tuple[ParameterView, ...]:
        """The parameters, in the order of the flat buffer; one that is tied has several names."""
        names: dict[int, list[str]] = {id(param): [] for param in self._group.sharded}
        for module in filter(None, (reference() for reference in self._unit.modules.values())):
            for path, part in module.named_modules():
                for attribute, param in part._parameters.items():
                    if id(param) in names:
                        names[id(param)].append(f"{path}.{attribute}".lstrip("."))
        named = zip(self._group.sharded, self._group.full, strict=True)
        return tuple(ParameterView(tuple(names[id(sharded)]), sharded, full) for sharded, full in named)

    @property
    def mesh(self) -> DeviceMesh:
        """The data-parallel mesh."""
        return self._group.plan.rank_mesh.described_mesh

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self._group.plan.precision.compute

    @property
    def requires_grad(self) -> bool:
        """True if the parameters are trained."""
        return self._group.is_trainable

    @property
    def main_weight(self) -> torch.Tensor:
        """This rank's main weights, flat."""
        return self._group.weights.main.local

    @property
    def model_weight(self) -> torch.Tensor:
        """This rank's compute weights, flat; the main weights themselves where these have the same dtype and cut."""
        weights = self._group.weights
        return weights.main.local if weights.main is weights.compute else weights.compute.local

    @property
    def main_grad(self) -> torch.Tensor | None:
        """This rank's main gradient, flat; None for frozen parameters, and before there is one."""
        gradients = self._group.gradients
        return None if gradients is None or not gradients.main.held_bytes else gradients.main.allocate().local

    @property
    def grad_divisor(self) -> float:
        """The divisor of the mean over all ranks of the mesh."""
        sharding = self._group.plan.sharding
        assert sharding is not None
        return sharding.divisor / sharding.rank_mesh.num_ranks

    def sync_model_weight_from_main_weight(self) -> None:
        """Copy main weights of the model into compute weights, as after `nn.init` of the sharded parameters."""
        self._engine.install_main_weights()  # which reshards what is gathered of old ones

    def unshard_parameters(self) -> None:
        """All-gather the unit's weights and show the full parameters. Collective."""
        engine = self._engine
        engine.executor.run(engine.scheduler.weights_requested(self._unit.index))
        self._unit.to_unsharded()

    def reshard_parameters(self) -> None:
        """Show the sharded parameters."""
        self._unit.to_sharded()

    def release_unsharded_storage(self) -> None:
        """Free the full weights, unless they are in use."""
        engine = self._engine
        engine.executor.run(engine.scheduler.reshard_requested(self._unit.index))

    @property
    def _engine(self) -> Engine:
        engine: Engine | None = self._unit.engine
        if engine is None:
            raise ScheduleError("modules of an open context have no engine yet; Exit fully_shard_context first")
        return engine


def fully_shard_optimizer(optimizer: torch.optim.Optimizer, *, precision_aware: bool = False) -> None:
    """Connect an optimizer that was built on sharded parameters; its groups and its other parameters stay as they are.

    Its step installs the new weights. Sharded parameters show gradients in their own dtype, so that any optimizer can
    step them.

    Args:
        optimizer: Built after `fully_shard`.
        precision_aware: The optimizer takes gradients in the dtype in which they are accumulated.

    Raises:
        TypeError: A group holds something else than parameters.
        NotSupportedYetError: `precision_aware` where gradients are accumulated in another dtype than main weights (a
            NotImplementedError).
    """
    params = params_of(optimizer)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"the optimizer holds a {type(param).__name__}; build it on the module's parameters")
    engines = list(dict.fromkeys(engine_of_param(param) for param in params if hasattr(param, "_fsdp_engine")))
    if precision_aware and any(
        group.plan.precision.main_grads != group.plan.precision.main_params
        for engine in engines
        for group, _ in engine.groups_with_gradients()
    ):
        raise NotSupportedYetError(
            "precision_aware=True asks for gradients in the dtype they are accumulated in, and sharded parameters show "
            "them in their own; set main_grads_dtype and main_params_dtype of the policy alike, or leave it out"
        )
    if engines:
        connect_with_hooks(optimizer, engines, True, "MixedPrecisionPolicy(main_params_dtype=torch.float32)")
