"""The class of a module that our `fully_shard` has sharded: torch's `FSDPModule`, with every method on our engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, warn_caller
from megatron_fsdp.fsdp2.state import ShardState, set_state, state_of
from megatron_fsdp.wrap.shard_unit import AppliedInterfaces, refuse_torch


class ShardedModule(FSDPModule):
    """A module sharded in place; its class is a subclass of this and of its former class.

    Methods are those of torch's `FSDPModule`; what differs is said at each. Small neighbours share a unit: see Note
    [Small neighbours].
    """

    _orig_cls_mro_index = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the class from before: containers build another one of their type for a slice."""
        return cls.__mro__[cls._orig_cls_mro_index](*args, **kwargs)

    def _get_fsdp_state(self) -> ShardState:  # type: ignore[override]
        state = state_of(self)  # type: ignore[arg-type]
        assert state is not None
        return state

    def _states(self, recurse: bool) -> Iterator[ShardState]:
        modules: Iterable[Any] = self.modules() if recurse else (self,)  # type: ignore[attr-defined]
        seen: set[int] = set()
        for module in modules:
            if (state := state_of(module)) is not None and id(state) not in seen:
                seen.add(id(state))
                yield state

    # ---- weights ----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the module's own parameters and show the full ones. Collective.

        Args:
            async_op: Return a handle whose `wait` shows them.
        """
        handle = _Unsharding(self._get_fsdp_state())
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Show the sharded parameters of the module, and free the full ones unless they or a neighbour's are in use."""
        self._get_fsdp_state().reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free full parameters after forward, or keep them until the backward is over."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigurationError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}; give True or False"
            )
        for state in self._states(recurse):
            state.settings.reshard_after_forward = reshard_after_forward
            state.set_reshard()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free full parameters after a backward, or keep them until the weights change or a slot is short."""
        for state in self._states(recurse):
            state.settings.reshard_after_backward = reshard_after_backward
            state.set_reshard()

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Check the modules, and ignore the hint: units are gathered ahead in the order of the last pass."""
        _check_all_sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Check the modules, and ignore the hint: units are gathered ahead in the order of the last pass."""
        _check_all_sharded(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Ignore the hint: a unit that is only an embedding is not gathered in backward in any case."""

    # ---- gradients --------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in the next backwards, or keep full sums."""
        for state in self._states(recurse):
            state.settings.mode.defer_all = not requires_gradient_sync
            state.settings.mode.auto_sync = True
            state.apply_settings()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce gradients over replicas in the next backwards, or within the shards' ranks only (HSDP)."""
        for state in self._states(recurse):
            state.settings.mode.auto_sync = requires_all_reduce or len(state.plans.mesh.axes) == 1
            state.apply_settings()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Ignore the hint: every backward waits for its own reductions before it returns."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the gradients of all ranks by `factor` instead of their number."""
        if type(factor) not in (int, float) or not factor > 0:
            raise ConfigurationError(f"the gradient divide factor {factor!r} is no number above 0; give one")
        state = self._get_fsdp_state()
        state.settings.divisor = factor
        state.apply_settings()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`, the present name of this method."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: object = None) -> None:  # noqa: ARG002
        """Call a hook with this rank's flat part of the module's gradients, each time they are reduced over all ranks.

        It may change them in place, as by an all-reduce over other replicas. It runs on the stream of reductions, and
        `stream` is ignored. Modules of several dtypes have several flat parts; small neighbours have one together.

        Raises:
            ConfigurationError: Parameters of the module have meshes of their own (a ValueError).
        """
        state = self._get_fsdp_state()
        if any(plans is not state.plans for plans in state.other_plans):
            raise ConfigurationError(
                "set_all_reduce_hook of a module whose parameters have several meshes would not say which was reduced; "
                "shard the parameters of each mesh by a call of their own"
            )
        state.settings.after_reduction = hook
        state.apply_settings()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Ignore the hint: collectives add up, and factors are multiplied apart, in any case."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Ignore the hint: gradients missing on some ranks count as zero; one missing on all ranks stays None."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as `nn.Module` does, and free their memory."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if (engine := self._get_fsdp_state().engine) is not None:
            engine.free_cleared_gradients()

    def reset_iter_state(self) -> None:
        """Go on after an exception inside of a forward or backward; gradients that were on their way are dropped.

        Raises:
            ScheduleError: Called on a module that is not the root (a RuntimeError).
        """
        state = self._get_fsdp_state()
        if not state.is_root:
            raise RuntimeError("reset_iter_state() has to be called on the root; call it on the outermost module")
        if (engine := state.engine) is not None:
            engine.reset()
            engine.drop_unsynced_gradients(param for group in engine.groups() for param in group.sharded)

    # ---- tuning -----------------------------------------------------------------------------------------------------

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Ignore the hint: all-gathers wait for all work that was submitted to the current stream."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Warn: memory of the process group is a setting of the whole model here."""
        _note("set_allocate_memory_from_process_group_for_comm", enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Warn: symmetric memory is a setting of the whole model here."""
        _note("set_symm_mem_for_comm", backend)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:  # noqa: ARG002
        """Warn: reductions stay on the group of the mesh."""
        if enable:
            _note("set_separate_reduce_scatter_group", enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:  # noqa: ARG002
        """Warn: at most two buckets of gradients are in use at a time, whatever is asked for."""
        _note("set_reduce_scatter_max_input_buffers", max_input_buffers)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        pass

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        """Raise: collectives are the engine's."""
        raise NotSupportedYetError(f"set_custom_all_gather({comm!r}): collectives are the engine's; leave it out")

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:
        """Raise: collectives are the engine's."""
        raise NotSupportedYetError(f"set_custom_reduce_scatter({comm!r}): collectives are the engine's; leave it out")

    # ---- nn.Module --------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.reshard()
        return super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load as `nn.Module` does; after the first forward values are copied, also with `assign`."""
        assign = assign and self._get_fsdp_state().shared is None
        return super().load_state_dict(state_dict, strict=strict, assign=assign)  # type: ignore[misc]

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        raise AssertionError("a sharded module cannot be copied; copy the model before sharding it, or use state dicts")


class _Unsharding(UnshardHandle):
    """A running all-gather of one module's parameters."""

    def __init__(self, state: ShardState) -> None:
        self._state: ShardState | None = state
        state.unshard()

    def wait(self) -> None:
        """Wait for the weights, and show the full parameters in the module."""
        if self._state is not None:
            engine = self._state.finished()
            for unit, module_index in self._state.places:
                engine.executor.run(engine.scheduler.weights_requested(unit.index))
                unit.to_unsharded(module_index)
            self._state = None


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Check the modules, and ignore the hint: each model keeps communication streams of its own."""
    _check_all_sharded(modules)


def _check_all_sharded(modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigurationError(f"an FSDPModule is wanted and {type(module).__name__} was given; shard it first")


def _note(method: str, value: object) -> None:
    warn_caller(f"{method}({value!r}) has no effect on this engine, which plans memory and groups for the whole model")


@cache
def sharded_class(kind: Any) -> Any:
    """Return the class of a sharded module of a class."""
    return type(f"FSDP{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})


def become_sharded(module: nn.Module, state: ShardState) -> None:
    """Change the class of a module, and register the state where torch's `fully_shard.state` finds it."""
    set_state(module, state)
    states = module.__dict__.pop(STATE_KEY, {})
    states[torch_fully_shard.__wrapped__] = state  # type: ignore[attr-defined]
    module.__dict__[STATE_KEY] = AppliedInterfaces(states)
    refuse_torch(module)
    kind: Any = type(module)
    module.__class__ = sharded_class(kind)
