"""Hooks that tell the bucket engine which weights are about to be read."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.ddp.bucket_plan import plan_readers
from megatron_fsdp.ddp.engine import BucketEngine
from megatron_fsdp.runtime.compiled import uncompiled
from megatron_fsdp.runtime.hooks import live_engine, register_hooks
from megatron_fsdp.runtime.schedule import ROOT


def register_bucket_hooks(engine: BucketEngine, model: nn.Module) -> list[RemovableHandle]:
    """Register everything that one model needs.

    Args:
        engine: Whom to report to; held weakly.
        model: The model, with the engine's parameters in it.
    """
    # Each of these goes in front of what is there already, and readers come after the engine has heard of a forward.
    readers = Readers(engine, model).register() if engine.waits_for_readers else []
    return [*readers, *register_hooks(engine, {ROOT: model})]


class Readers:
    """Which modules read which buckets: learnt in the first forward with gradients, which gathers everything first.

    So do forwards without gradients: evaluation may read weights of modules that it does not call.

    Args:
        engine: Whom to report to; held weakly.
        model: The model.
    """

    def __init__(self, engine: BucketEngine, model: nn.Module) -> None:
        self._engine = weakref.ref(engine)
        self._model = weakref.ref(model)
        bucket_of = {id(param): unit.index for unit in engine.units for group in unit.groups for param in group.sharded}
        self._modules = dict(model.named_modules(remove_duplicate=True))
        self._names = {id(module): name for name, module in self._modules.items()}
        self._owned = [
            (name, frozenset(bucket_of[id(param)] for param in module._parameters.values() if param is not None))
            for name, module in self._modules.items()
        ]
        self._called: set[str] = set()
        self._learns = False  # the forward under way is one to learn from
        self._reads: dict[str, frozenset[int]] | None = None

    def register(self) -> list[RemovableHandle]:
        """Register the hooks, ahead of those of the user, which may read weights."""
        handles = []
        for name, module in self._modules.items():
            if name and any(True for _ in module.parameters()):
                handles.append(module.register_forward_pre_hook(uncompiled(self._before), prepend=True))
        model = self._modules[""]
        handles.append(model.register_forward_pre_hook(uncompiled(self._begin), prepend=True))
        handles.append(model.register_forward_hook(uncompiled(self._end)))
        self._modules = {}  # the model is not to be kept alive from here
        return handles

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        """The model's forward has begun, after the engine has heard of it."""
        engine = self._live()
        if self._reads is None:
            self._called.clear()
            self._learns = torch.is_grad_enabled()
            engine.gather_all()
        else:
            engine.before_reading(self._reads.get("", frozenset()))

    def _before(self, module: nn.Module, _args: Any) -> None:
        name = self._names[id(module)]
        if self._reads is None:
            self._called.add(name)
            self._live().gather_all()
            return
        buckets = self._reads.get(name)
        if buckets:
            self._live().before_reading(buckets)

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """The first forward that came to its end has shown who is called."""
        if self._reads is None and self._learns:
            self._reads = plan_readers(self._owned, self._called.__contains__)

    def _live(self) -> BucketEngine:
        engine = live_engine(self._engine)  # type: ignore[arg-type]
        assert isinstance(engine, BucketEngine)
        return engine
