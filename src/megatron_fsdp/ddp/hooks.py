"""Hooks that tell the bucket engine which weights are about to be read."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn

from megatron_fsdp.ddp.bucket_plan import plan_readers
from megatron_fsdp.ddp.engine import BucketEngine
from megatron_fsdp.engine.engine import live_engine
from megatron_fsdp.engine.hooks import register_hooks, uncompiled
from megatron_fsdp.errors import ShardOperationError

_ADVICE = (
    "with overlap_param_gather=True weights are there once a module that reads them is called; which one does "
    "is learnt in the first forward, so code that reads a weight of a module that was called then, and is not now, "
    "comes too early: call that module, or leave overlap_param_gather out"
)


def register_bucket_hooks(engine: BucketEngine, model: nn.Module) -> None:
    """Register all hooks of one model."""
    # Each hook is prepended, and readers have to run after the engine's pre-forward hook.
    if engine.waits_for_readers:
        Readers(engine, model).register()
    register_hooks(engine, model)


class Readers:
    """The buckets that each module reads: recorded in the first forward with gradients, which gathers everything first.

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
        """Register the hooks, ahead of those of the user, which may read weights."""
        model = self._modules[""]
        inner = {id(module): module for module in self._modules.values() if module is not model}
        for module in inner.values():
            if any(True for _ in module.parameters()):
                module.register_forward_pre_hook(uncompiled(self._before), prepend=True)
        model.register_forward_pre_hook(uncompiled(self._begin), prepend=True)
        model.register_forward_hook(uncompiled(self._end), always_call=True)
        self._modules = {}  # must not keep the model alive

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        """Gather the weights that the model itself reads; runs after the engine's pre-forward hook."""
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
        """Record which modules the first complete forward has called."""
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
        engine = live_engine(self._engine)  # type: ignore[arg-type]
        assert isinstance(engine, BucketEngine)
        return engine
