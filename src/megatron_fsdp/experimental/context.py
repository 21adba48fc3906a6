"""`FsdpContext`: modules that are sharded one by one and share an engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.comm.agreement import raise_together
from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.comm.streams import default_device, resolve_device
from megatron_fsdp.config.engine_options import (
    EngineOptions,
    MemoryOptions,
    UserBufferOptions,
    WeightAllocator,
    resolve_skip_order,
    resolve_verify_ranks,
)
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.group_plan import Sharding
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.errors import Remedies, ScheduleError, warn_caller
from megatron_fsdp.wrap.in_place import (
    WITHOUT_JOIN,
    KnownPlans,
    finish_in_place,
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
