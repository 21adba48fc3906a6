"""A device with streams, simulated on the CPU with real data: what no wait orders is found, whatever the schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp.checkpoint import background
from megatron_fsdp.comm.collectives import CudaCommStream
from megatron_fsdp.engine import executor, gradients, param_group
from megatron_fsdp.engine import memory as engine_memory
from megatron_fsdp.optim import local_step

Clock = dict[int, int]


class OrderedStream:
    """A stream's vector clock: how much of each stream is done before what comes next here."""

    def __init__(self, index: int, name: str, host: OrderedStream | None = None) -> None:
        self.index = index
        self.name = name
        self._host = host or self
        self.clock: Clock = {index: 0}

    def wait_stream(self, other: OrderedStream) -> None:
        self.wait_event(other.clock)

    def wait_event(self, event: Clock) -> None:
        for stream, count in event.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def record_event(self) -> Clock:
        return dict(self.clock)

    def synchronize(self) -> None:
        self._host.wait_event(self.clock)


class HostCopies:
    """An event behind copies to the host, which arrive when it is waited for; from any thread."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = copies

    def synchronize(self) -> None:
        while self._copies:
            target, value = self._copies.pop()
            target.copy_(value)


class _Bytes(NamedTuple):
    """Bytes of one memory that one stream reads or writes."""

    stream: int
    is_write: bool
    first: int
    last: int


@dataclass
class _Memory:
    """Memory, the stream that it was taken on, and the latest access of each kind, with its time and place."""

    reference: StorageWeakRef
    owner: OrderedStream
    taken: str
    accesses: dict[_Bytes, tuple[int, str]] = field(default_factory=dict)


class OrderedStreams(TorchDispatchMode):
    """The `StreamApi` of an ordered device, and, as a context, the device itself.

    All work is carried out at once, and each stream keeps a vector clock (Mattern, "Virtual time and global states of
    distributed systems", 1989), by which is found, whatever the schedule and between any two streams:

    - two accesses to overlapping bytes, one of them a write, that no wait orders;
    - memory that is let go of, or resized, while another stream may still use it when the stream that it was taken on
      takes memory again, which the caching allocator may make the same.

    Collectives run when they are launched, on the stream that launches them; asynchronous ones on a stream of the back
    end, which their `wait` joins. Copies of a background save arrive on the host when somebody waits for them.

    The host is one more stream, which everything that is queued later waits for, and which itself waits for a stream
    that it synchronises with, and for copies that block it. Offloaded memory is the host's, and so is what is computed
    of that alone; in copies to and from there, that do not block, the stream reads or writes it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.findings: dict[str, None] = {}  # what no wait orders, in words, once each
        self.num_accesses = 0  # how many were looked at
        self.host = OrderedStream(0, "the host")
        self._streams = [self.host]
        self._current = self.Stream(torch.device("cpu"), 0)
        self._current.name = "compute"
        self._memory: dict[int, _Memory] = {}
        self._freed: list[tuple[_Memory, str]] = []  # which their streams may take again
        self._back_ends: dict[OrderedStream, OrderedStream] = {}  # by the stream that launches on them
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to the host, not recorded by an event yet

    def Stream(self, _device: torch.device, priority: int) -> OrderedStream:  # noqa: ARG002, N802 (torch's name)
        self._streams.append(OrderedStream(len(self._streams), f"side stream {len(self._streams)}", self.host))
        return self._streams[-1]

    def current_stream(self, _device: torch.device) -> OrderedStream:
        return self._current

    @contextmanager
    def stream(self, stream: OrderedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not set(types) <= {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented  # a DTensor's: it comes again with the local tensors
        self._find_freed()
        if any(map(self.is_on_host, _vectors((args, kwargs)))):
            return self._run_on_host(func, args, kwargs)
        if func.namespace == "c10d" and _named(func, args, kwargs).get("async_op", True):
            back_end = self._back_end()
            back_end.wait_stream(self._current)
            with self.stream(back_end):
                return self._run(func, args, kwargs)
        return self._run(func, args, kwargs)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and self._memory_of(tensor).owner is self.host

    def _run_on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run what reads or writes offloaded memory: on the host, or as a copy between there and the device.

        To torch both are the CPU here, where a copy to "the device" is none. So single numbers, and what is sent, are
        as good as copied. Lists may mix devices, of which torch then works on one after another; anything else of both
        at once would be an error of torch, and is a finding.
        """
        named, tensors = _named(func, args, kwargs), _tensors((args, kwargs))
        is_async = bool(named.get("non_blocking"))
        may_mix = is_async or func.namespace == "c10d" or "copy" in func._schema.name or "_foreach" in func._schema.name
        is_new = func._schema.name.startswith("aten::empty") and named.get("device") is not None
        if not is_new and not is_async and all(map(self.is_on_host, _vectors(tensors))):
            if not all(map(self.is_on_host, tensors)) or func.namespace == "c10d":
                self.host.wait_event(self._current.clock)
            with self.stream(self.host):
                return self._run(func, args, kwargs)
        if not may_mix and not is_new:
            self.findings[f"{func} mixes memory of the host and the device at {_where()}"] = None
        made = self._run(func, args, kwargs)
        if not is_async and not _only_describes(func):
            self.host.wait_event(self._current.clock)
        return made

    def record_host_copies(self, _device: torch.device) -> HostCopies:
        copies, self._copies = self._copies, []
        return HostCopies(copies)

    def wait_for_collectives(self) -> None:
        """Let the current stream wait for the asynchronous collectives that it has launched."""
        self._current.wait_stream(self._back_end())

    def _back_end(self) -> OrderedStream:
        if self._current not in self._back_ends:
            self._back_ends[self._current] = self.Stream(torch.device("cpu"), 0)
        return self._back_ends[self._current]

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.copy_.default and args[2:] == (True,) and not any(map(self.is_on_host, args[:2])):
            self._copies.append((args[0], args[1].clone()))
            made = args[0]
        else:
            made = func(*args, **kwargs)
        if _only_describes(func):
            for tensor in _tensors(made):
                self._memory_of(tensor)
            return made
        self._current.wait_event(self.host.clock)
        self._current.clock[self._current.index] += 1
        written = _tensors(args[:1]) if func.namespace == "c10d" else _written(func, args, kwargs)
        read = _tensors((args, kwargs))
        for tensor in read:
            self._access(tensor, any(tensor is each for each in written), func)
        given = {id(each) for each in read}
        for tensor in _tensors(made):
            if id(tensor) not in given:
                self._access(tensor, True, func)
        return made

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note that a storage is about to lose its memory, and maybe to take other."""
        self._find_freed()
        memory = self._memory.pop(storage._cdata, None)
        if memory is not None:
            self._freed.append((memory, f"resized at {_where()}"))
        self._take(storage)

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        found = self._memory.get(storage._cdata)
        return self._take(storage) if found is None or found.reference.expired() else found

    def _take(self, storage: torch.UntypedStorage) -> _Memory:
        """Take memory on the current stream, perhaps what was used before."""
        self._current.wait_event(self.host.clock)
        freed_here = [(memory, how) for memory, how in self._freed if memory.owner is self._current]
        self._freed = [(memory, how) for memory, how in self._freed if memory.owner is not self._current]
        for memory, how in freed_here:
            taken = f"memory taken on {memory.owner.name} at {memory.taken} was {how}"
            for access, (time, then) in memory.accesses.items():
                if self._current.clock.get(access.stream, 0) < time:
                    self.findings[f"{taken}, and may be taken again at {_where()} before a {then}"] = None
        found = self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), self._current, _where())
        return found

    def _access(self, tensor: torch.Tensor, is_write: bool, func: Any) -> None:
        if tensor.layout is not torch.strided or not tensor.numel():
            return
        self.num_accesses += 1
        memory, stream = self._memory_of(tensor), self._current
        last = int(sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) + 1
        first = int(tensor.storage_offset())
        this = _Bytes(stream.index, is_write, first * tensor.itemsize, (first + last) * tensor.itemsize)
        place = f"{'write' if is_write else 'read'} by {func} on {stream.name} at {_where()}"
        for other, (time, then) in memory.accesses.items():
            overlaps = this.first < other.last and other.first < this.last
            if overlaps and (is_write or other.is_write) and stream.clock.get(other.stream, 0) < time:
                self.findings[f"no wait orders a {then} before a {place}"] = None
        memory.accesses[this] = stream.clock[stream.index], place

    def _find_freed(self) -> None:
        expired = torch.UntypedStorage._expired  # what `StorageWeakRef` asks: this runs at each operation
        for key in [key for key, memory in self._memory.items() if expired(memory.reference.cdata)]:
            memory = self._memory.pop(key)
            if memory.owner is not self.host:  # pinned memory is not given out again before copies are done
                self._freed.append((memory, "let go of"))


def _where() -> str:
    """Return the innermost lines of the package that are running."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < 3:
        if path := _in_package(frame.f_code.co_filename):
            found.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "the user's code"


@cache
def _in_package(file: str) -> str:
    return file.partition("src/megatron_fsdp/")[2]


Values = Sequence[torch.Tensor | None]


def same_bits(ones: Values, others: Values) -> bool:
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(ones, others, strict=True)
    )


@contextmanager
def ordered_comm_streams() -> Iterator[OrderedStreams]:
    """Let models that are sharded inside communicate on ordered streams, and background saves copy to the host late."""
    streams = OrderedStreams()
    places = background.StagingBuffers._places
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        streams.resized(storage)
        return resize(storage, size)

    wait = dist.Work.wait

    def wait_for(work: dist.Work, *timeout: Any) -> bool:
        streams.wait_for_collectives()
        return wait(work, *timeout)

    def make_comm_stream(device: torch.device, name: str, watch: Any = None) -> CudaCommStream:
        return CudaCommStream(device, name, watch, streams)

    allocate_in = engine_memory.allocate

    def allocate(offloads: bool, *given: Any) -> torch.Tensor:
        with streams.stream(streams.host) if offloads else nullcontext():
            return allocate_in(offloads, *given)

    def on_device(tensor: torch.Tensor, _device: torch.device) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu").copy_(tensor) if streams.is_on_host(tensor) else tensor

    with (
        patch.object(executor, "make_comm_stream", make_comm_stream),
        patch.object(local_step, "make_comm_stream", make_comm_stream),
        patch.object(local_step, "allocate", allocate),
        patch.object(param_group, "allocate", allocate),
        patch.object(gradients, "allocate", allocate),
        patch.object(param_group, "on_device", on_device),
        patch.object(local_step, "finish_stream", lambda device: streams.current_stream(device).synchronize()),
        patch.object(background, "_is_remote", lambda _device: True),
        patch.object(background, "_recorded", streams.record_host_copies),
        patch.object(background.StagingBuffers, "_places", lambda self, sizes, **_: places(self, sizes, pinned=False)),
        patch.object(torch.UntypedStorage, "resize_", resize_),
        patch.object(dist.Work, "wait", wait_for),
        streams,
    ):
        yield streams


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, in order; torch's own walk takes longer than most operations of tests."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    leaves = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for leaf in leaves for tensor in _tensors(leaf)]


def _vectors(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(tree) if tensor.dim() and tensor.numel()]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    named = _named(func, args, kwargs)
    changed = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return _tensors([named.get(name) for name in changed])


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _only_describes(func: Any) -> bool:
    """Whether an operation gives a view, or memory without values."""
    if func._schema.name.startswith("aten::empty") or func._schema.name in ("aten::new_empty", "aten::is_pinned"):
        return True
    aliases = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


Fault = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which something is left out, or done too early."""


def nothing(*_: object, **__: object) -> None:
    """Stand in for a wait."""


def without_works(owner: type, name: str) -> AbstractContextManager[Any]:
    """Let the waits for events that a method makes order nothing."""
    method = getattr(owner, name)

    def run(*args: Any) -> Any:
        with patch.object(OrderedStream, "wait_event", nothing):
            return method(*args)

    return patch.object(owner, name, run)


def without_order_between_streams() -> AbstractContextManager[Any]:
    """Let submissions to a stream not wait for those to others."""
    submit = CudaCommStream.submit
    return patch.object(CudaCommStream, "submit", lambda self, launch, finish=None, **_: submit(self, launch, finish))
