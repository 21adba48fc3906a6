"""A device with streams, simulated on the CPU by the laziest schedule that is legal, with real data.

Compute runs at once. Work on side streams is queued, and runs when somebody waits for an event behind it, in no other
order than it was queued in. Every operation is checked, so that an error says which one is wrong:

- queued work meets memory that was let go of before it ran, which the caching allocator may have handed out again;
- compute writes memory that queued work uses, or reads memory that queued work writes, without waiting for it.

Collectives run when they are launched, behind what their stream has queued. What is made on a side stream belongs to
that stream, whose own order protects it. Orders between two side streams are not checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp.comm.lanes import LaneWatch, StreamLane
from megatron_fsdp.engine import executor


class StreamOrderError(AssertionError):
    """Memory was used in an order that no wait guarantees."""


@dataclass
class _Seen:
    """A tensor as it was when work on it was queued, without a reference to its memory."""

    storage: weakref.ref[torch.UntypedStorage]
    address: int
    first_byte: int
    last_byte: int
    describe: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        first = tensor.data_ptr()
        extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        geometry = (tensor.storage_offset(), tensor.shape, tensor.stride())
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        return cls(
            weakref.ref(storage),
            storage.data_ptr(),
            first,
            first + (extent * tensor.itemsize if tensor.numel() else 0),
            lambda memory: torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), *geometry),
        )

    @property
    def is_there(self) -> bool:
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.address

    def tensor(self, operation: str) -> torch.Tensor:
        storage = self.storage()
        if storage is None or not self.is_there:
            raise StreamOrderError(
                f"{operation}, queued on a side stream, meets memory that was let go of before it ran"
            )
        return self.describe(torch.empty(0, dtype=torch.uint8).set_(storage))

    def overlaps(self, other: _Seen) -> bool:
        return self.is_there and self.first_byte < other.last_byte and other.first_byte < self.last_byte


@dataclass
class _Queued:
    operation: str
    run: Callable[[], None]
    reads: list[_Seen]
    writes: list[_Seen]


class LateEvent:
    """A point in the queue of a stream."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.position = stream.num_queued


class LateStream:
    """What was queued and has not run."""

    def __init__(self, streams: LateStreams) -> None:
        self._streams = streams
        self.queue: list[_Queued] = []
        self.num_queued = 0
        self._num_run = 0
        self.own: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def wait_stream(self, other: LateStream) -> None:
        other.run_until(other.num_queued)

    def wait_event(self, event: LateEvent) -> None:
        event.stream.run_until(event.position)

    def record_event(self) -> LateEvent:
        return LateEvent(self)

    def add(self, queued: _Queued) -> None:
        self.queue.append(queued)
        self.num_queued += 1

    def run_until(self, position: int) -> None:
        with self._streams.unchecked(), torch.no_grad():
            while self._num_run < position:
                self._num_run += 1
                self.queue.pop(0).run()


class LateStreams(TorchDispatchMode):
    """The `StreamApi` of such a device, and, as a context, the device itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self._compute = LateStream(self)
        self._current = self._compute
        self._sides: list[LateStream] = []
        self._is_checked = True

    def Stream(self, _device: torch.device, priority: int) -> LateStream:  # noqa: ARG002, N802 (torch's name)
        self._sides.append(LateStream(self))
        return self._sides[-1]

    def current_stream(self, _device: torch.device) -> LateStream:
        return self._current

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        before, self._is_checked = self._is_checked, False
        try:
            yield
        finally:
            self._is_checked = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not set(types) <= {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented  # a DTensor's: it comes again with the local tensors
        if not self._is_checked or _only_describes(func):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if self._current is self._compute:
            self._check(func, _tensors((args, kwargs)), written)
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self._current.run_until(self._current.num_queued)
            return func(*args, **kwargs)
        return self._queue(self._current, func, args, kwargs, written)

    def _check(self, func: Any, used: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        seen, changed = [_Seen.of(each) for each in used], [_Seen.of(each) for each in written]
        for queued in (queued for side in self._sides for queued in side.queue):
            pairs = [(seen, queued.writes), (changed, queued.reads)]
            if any(own.overlaps(other) for mine, theirs in pairs for own in theirs for other in mine):
                raise StreamOrderError(f"compute runs {func} on memory that {queued.operation} was queued for")

    def _queue(self, side: LateStream, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        name = str(func)

        def note(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.untyped_storage() in side.own:
                return value
            return _Seen.of(value)

        later_args, later_kwargs = tree_map(note, (args, kwargs))
        reads = [_Seen.of(each) for each in _tensors((args, kwargs))]

        def call() -> Any:
            values = tree_map(lambda x: x.tensor(name) if isinstance(x, _Seen) else x, (later_args, later_kwargs))
            return func(*values[0], **values[1])

        if written:
            side.add(_Queued(name, lambda: _discard(call()), reads, [_Seen.of(each) for each in written]))
            return kwargs.get("out", args[0]) if func._schema.returns else None
        made = func(*args, **kwargs)  # its shape is right; its values come when it is waited for
        side.own.update(each.untyped_storage() for each in _tensors(made))

        def fill() -> None:
            for each, value in zip(_tensors(made), _tensors(call()), strict=True):
                each.copy_(value)

        side.add(_Queued(name, fill, reads, [_Seen.of(each) for each in _tensors(made)]))
        return made


@contextmanager
def late_lanes() -> Iterator[None]:
    """Let models that are sharded inside communicate on late streams."""
    streams = LateStreams()

    def make_lane(device: torch.device, name: str, watch: LaneWatch) -> StreamLane:
        return StreamLane(device, name, watch, streams)

    with patch.object(executor, "make_lane", make_lane), streams:
        yield


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changed = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return _tensors([named.get(name) for name in changed])


def _only_describes(func: Any) -> bool:
    """Whether an operation gives a view, or memory without values."""
    if func._schema.name.startswith("aten::empty") or func._schema.name == "aten::new_empty":
        return True
    aliases = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _discard(_result: object) -> None:
    """Let an expression stand where a function without a result is asked for."""
