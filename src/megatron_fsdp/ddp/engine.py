"""The engine of buckets: modules wait for the buckets that they read, and gradients complete a bucket.

Its hooks, by which modules tell that they are about to read weights, are behind it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp.ddp.buckets import BucketScheduler, GatherMode, plan_readers
from megatron_fsdp.engine.engine import Engine, ForwardCall, alive
from megatron_fsdp.engine.hooks import uncompiled
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, ScheduleError, ShardOperationError
from megatron_fsdp.sharding.units import ROOT_UNIT


class BucketEngine(Engine):
    """An engine whose units, but the root, are buckets of parameters of many modules.

    While the model runs, the modules hold a bucket's full parameters from the moment they are up to date until the
    forward ends, and again during the whole backward. Before that they hold sharded parameters, in the dtype of the
    full ones, so that code that reads a weight too early fails instead of computing with stale values.
    """

    scheduler: BucketScheduler
    reduces_in_fixed_order = True
    gathers_at_once = False  # all weights are gathered before each forward, whatever overlaps otherwise
    takes_gradients = True  # False while the memory of gradients is given up

    def __post_init__(self) -> None:
        super().__post_init__()
        self._buckets = self.units[ROOT_UNIT + 1 :]

    # ---- weights ------------------------------------------------------------------------------------------------

    @property
    def waits_for_readers(self) -> bool:
        """True if weights are waited for by the modules that read them, and not before the forward."""
        return self.scheduler.config.gathers and self.scheduler.gather_mode is not GatherMode.AT_ONCE

    def pre_forward(self, unit_index: int, module_index: int = 0) -> None:
        """Start the all-gathers of the model's forward or recomputation; unshard the weights that are ready."""
        super().pre_forward(unit_index, module_index)
        if self.scheduler.in_backward or not self.scheduler.config.gathers:
            self._show(self._buckets)
            return
        # Fast paths in evaluation read weights of modules that only training calls.
        reads_anything = self.gathers_at_once or not torch.is_grad_enabled()
        self.executor.run(self.scheduler.everything() if reads_anything else self.scheduler.forward_opens())
        if reads_anything or not self.waits_for_readers:
            self._show(self._buckets)

    def gather_all(self) -> None:
        """Unshard all weights, as long as the readers are not known."""
        if all(unit.is_unsharded for unit in self._buckets):
            return
        self.executor.run(self.scheduler.everything())
        self._show(self._buckets)

    def before_reading(self, buckets: Collection[int]) -> None:
        """Unshard the buckets that a module is about to read."""
        if self.scheduler.in_forward and not self.scheduler.in_backward:
            self.executor.run(self.scheduler.weights_read(buckets))
            self._show([self.units[bucket] for bucket in buckets if not self.units[bucket].is_unsharded])

    def post_forward(self, unit_index: int, *args: Any, **kwargs: Any) -> ForwardCall:
        """End the model's forward, run or failed: all-gather the other buckets, and reshard all."""
        call = super().post_forward(unit_index, *args, **kwargs)
        if not self.scheduler.forward_depth(unit_index) and not self.scheduler.in_backward:
            if not self.executor.is_broken:
                # Also what the forward did not read, since other ranks may have. Waited for, since weights may be
                # written to after the forward.
                self.executor.run(self.scheduler.everything())
            for unit in self._buckets:
                if unit.index not in self.units_in_full_context:
                    unit.to_sharded()
        return call

    def prefetch_weights(self, wait: bool) -> None:
        """Start the first all-gathers of the next forward; or all-gather everything and wait for it."""
        self.executor.run(self.scheduler.everything() if wait else self.scheduler.forward_opens())

    def set_prefetch(self, numel: int) -> None:
        """Raise; prefetching follows from the configuration."""
        raise ConfigurationError(
            f"suggested_AG_prefetch_size={numel} has no effect on buckets, gathered one ahead or all together; "
            "set overlap_param_gather and align_param_gather in the configuration"
        )

    def _show(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.index not in self.units_in_full_context:
                self._to_unsharded(unit.index)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def pre_backward(self, call: ForwardCall) -> None:
        """Unshard all weights before the model's backward, since recomputation may read them."""
        if not self.takes_gradients:
            raise ScheduleError(
                "a backward began after offload_grad_buffers(), so that its gradients have no memory; call "
                "restore_grad_buffers() first, or compute under torch.no_grad()"
            )
        super().pre_backward(call)
        if not self.unsharded_for_backward.issuperset(unit.index for unit in self._buckets):
            self.executor.run(self.scheduler.everything())
            self._show(self._buckets)
            self.unsharded_for_backward.update(unit.index for unit in self._buckets)

    def take_gradient(self, unit_index: int, group_index: int, index: int, param: nn.Parameter) -> None:
        """Take a gradient as `Engine` does, then reduce complete buckets."""
        if self.delayed is not None:
            super().take_gradient(unit_index, group_index, index, param)
            return
        came = param.grad is not None
        super().take_gradient(unit_index, group_index, index, param)
        if came:
            self.count_gradient(unit_index, index)

    def counter_of(self, unit_index: int, index: int) -> Callable[[], object]:
        """Return the hook that counts a parameter's gradients; a bucket is reduced once it has all of them."""
        return functools.partial(_count_gradient, weakref.ref(self), unit_index, index)

    def count_gradient(self, unit_index: int, index: int) -> None:
        """Count a gradient that is in its bucket, and reduce complete buckets."""
        operations = self.scheduler.gradient_counted(unit_index, index)
        if operations:
            self.executor.run(operations)

    def _post_backward(self) -> None:
        learnt = self.scheduler.learns
        super()._post_backward()
        if learnt and self.scheduler.config.reduces_early:
            self.executor.set_bucket_count(self.executor.bucket_count)  # only this backward filled all at once


def _count_gradient(reference: weakref.ref[BucketEngine], unit_index: int, index: int) -> None:
    engine = reference()
    assert engine is not None  # the hook that calls it has copied into its bucket
    engine.count_gradient(unit_index, index)


_ADVICE = (
    "with overlap_param_gather=True weights are there once a module that reads them is called; which one does "
    "is learnt in the first forward, so code that reads a weight of a module that was called then, and is not now, "
    "comes too early: call that module, or leave overlap_param_gather out"
)


class Readers:
    """The buckets read by each module, recorded in the first forward with gradients, which unshards everything.

    Forwards without gradients gather everything, too: evaluation may read weights of modules that it does not call.
    """

    def __init__(self, engine: BucketEngine, model: nn.Module) -> None:
        self._engine = weakref.ref(engine)
        bucket_of = {id(param): unit.index for unit in engine.units for group in unit.groups for param in group.sharded}
        self._modules = dict(model.named_modules(remove_duplicate=False))  # a module may have several names
        self._ids = {path: id(module) for path, module in self._modules.items()}
        self._owned = [
            (path, frozenset(bucket_of[id(param)] for param in module._parameters.values() if param is not None))
            for path, module in self._modules.items()
        ]
        self._called: set[int] = set()
        self._learns = False  # the running forward is one to record
        self._whole = False  # the running forward began at the model, not at a module inside
        self._reads: dict[int, frozenset[int]] | None = None  # by the id of the module

    def register(self) -> None:
        """Register the hooks ahead of the user's, which may read weights."""
        model = self._modules[""]
        inner = {id(module): module for module in self._modules.values() if module is not model}
        for module in inner.values():
            if any(True for _ in module.parameters()):
                module.register_forward_pre_hook(uncompiled(self._before), prepend=True)
        model.register_forward_pre_hook(uncompiled(self._begin), prepend=True)
        model.register_forward_hook(uncompiled(self._end), always_call=True)
        self._modules = {}  # must not keep the model alive

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        """Unshard the weights that the model itself reads; runs after the engine's pre-forward hook."""
        engine = self._live()
        self._whole = True
        if self._reads is None:
            self._called.clear()
            self._learns = torch.is_grad_enabled()
            engine.gather_all()
        else:
            engine.before_reading(self._reads.get(self._ids[""], frozenset()))

    def _before(self, module: nn.Module, _args: Any) -> None:
        if self._reads is None:
            self._called.add(id(module))
        if self._reads is None or not self._whole:
            self._live().gather_all()
            return
        buckets = self._reads.get(id(module))
        if buckets:
            self._live().before_reading(buckets)

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Record the modules called by the first complete forward."""
        self._whole = False
        error = sys.exc_info()[1] if output is None else None
        if isinstance(error, ShardOperationError) and self._reads is not None:
            error.add_note(_ADVICE)
        elif error is None and self._reads is None and self._learns:
            found: dict[int, frozenset[int]] = {}
            for path, buckets in plan_readers(self._owned, lambda path: self._ids[path] in self._called).items():
                found[self._ids[path]] = found.get(self._ids[path], frozenset()) | buckets
            self._reads = found

    def _live(self) -> BucketEngine:
        return alive(self._engine)
