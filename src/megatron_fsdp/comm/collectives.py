"""Collectives on one mesh axis, with exact counts of the bytes sent, and the streams on which they are queued.

What else asks for `torch.cuda` (captures, clocks, the default device) is here, too.

Bytes are what one rank sends in a ring (or pairwise) algorithm: `(N - 1) / N` of the full buffer for an all-gather or
a reduce-scatter, twice that for an all-reduce (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from megatron_fsdp.errors import ConfigurationError

# ---- simulated ranks -------------------------------------------------------------------------------------------------

# A simulated rank (`plan/simulate.py`) is one process with fake tensors (shapes and dtypes without memory), whose
# collectives move nothing. The tensors by which ranks agree need values even there.
SIMULATED = "simulated_"
"""Prefix of the names of simulated back ends; the back end that they stand in for follows."""
real_values = unset_fake_temporarily
"""Context manager and decorator that leaves torch's FakeTensorMode: new tensors have values."""


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor is neither fake nor on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def address_of(tensor: Tensor) -> int:
    """Return the address of the first element; for a fake tensor, an id of its storage plus the offset."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def addresses_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the addresses of several tensors, which are all fake or none; faster than one by one."""
    is_fake = bool(tensors) and isinstance(tensors[0], FakeTensor)
    return tuple(map(address_of if is_fake else Tensor.data_ptr, tensors))


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the name of a group's back end; for a simulated group, of the simulated one."""
    return dist.get_backend(group).removeprefix(SIMULATED)


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Return True if the collectives of a group are simulated: they move nothing."""
    name = dist.get_backend(group)
    return name == dist.Backend.FAKE or name.startswith(SIMULATED)


# ---- one axis --------------------------------------------------------------------------------------------------------


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor for communication: float8 as bytes, since gloo has no such dtype."""
    is_float8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if is_float8 else tensor


def broadcast(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, source: int = 0, async_op: bool = False
) -> dist.Work | None:
    """Broadcast a tensor from a rank of the group, in place; with `async_op`, return its work."""
    work: dist.Work | None = dist.broadcast(as_sent(tensor), group_src=source, group=group, async_op=async_op)
    return work


# torch 2.13 renames the flat-tensor collectives; the older names warn there and the newer do not exist in 2.11.
all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Traffic:
    """Counters of the collectives and bytes that this rank has sent; take differences for one step."""

    gathers: int = 0
    reductions: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0

    def copy(self) -> Traffic:
        """Return a snapshot."""
        return replace(self)

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of both counts."""
        return Traffic(*map(operator.add, astuple(self), astuple(other)))

    def since(self, earlier: Traffic) -> Traffic:
        """Return the traffic since the snapshot `earlier`."""
        return Traffic(*map(operator.sub, astuple(self), astuple(earlier)))


_BROADCASTING_RANKS = 4
"""gloo's all-gather receives into memory of its own, as large as the result, and copies that. Broadcasts of the shards
receive in place, in about half the CPU time on 2 ranks and two thirds on 4, but their number grows with the ranks."""


class _Broadcasts:
    """The work handles of an all-gather that is made of broadcasts."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all have ended."""
        for work in self._works:
            work.wait()

    def get_future(self) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
        """Return a future of the end of all."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _gather_by_broadcasts(
    full: torch.Tensor, shard: torch.Tensor, rank: int, group: dist.ProcessGroup | None, async_op: bool
) -> Any:
    """All-gather `shard` of every rank into `full`; return the work handles, which are waited for as one."""
    parts = full.view(-1, shard.numel()).unbind() if shard.numel() else ()
    if parts and address_of(parts[rank]) != address_of(shard):
        parts[rank].copy_(shard.reshape(-1))
    works = [broadcast(part, group, source, async_op) for source, part in enumerate(parts)]
    return _Broadcasts([work for work in works if work is not None]) if async_op else None


@dataclass(frozen=True)
class Axis:
    """One data-parallel mesh axis as seen by this rank."""

    group: dist.ProcessGroup | None  # None stands for a single rank, which never communicates
    rank: int  # this rank's position, 0 <= rank < num_ranks
    num_ranks: int
    # counters, shared by everything that communicates along this axis on behalf of one model
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    gather_group: dist.ProcessGroup | None = None  # the same ranks again: gathers need not queue behind reductions
    sums_locally: bool = False  # reduce-scatter by an all-to-all and a local sum in float32 on any back end

    @property
    def exchanges_pairwise(self) -> bool:
        """True if a reduce-scatter is an all-to-all and a local sum.

        gloo's own reduce-scatter moves all-reduce bytes, and its sum of bf16 values rounds at every hop; an
        all-to-all moves the minimum and leaves the sum, in float32 and in rank order, to us. Other back ends do so
        where `sums_locally` asks for it.
        """
        if self.num_ranks == 1:
            return False
        return self.sums_locally or (self.group is not None and backend_of(self.group) == "gloo")

    # With `async_op` a collective returns a handle to wait on. Without, it is over when the method returns, or on CUDA
    # queued on the current stream.

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, async_op: bool = True) -> dist.Work | None:
        """All-gather `shard` (shard_numel,) of every rank into `full` (num_ranks * shard_numel,).

        `shard` may be this rank's own slice of `full`.
        """
        if self.num_ranks == 1:
            if address_of(full) != address_of(shard):
                full.copy_(shard)
            return None
        self.traffic.gathers += 1
        self.traffic.gather_bytes += full.nbytes - shard.nbytes
        group = self.gather_group or self.group
        if self._broadcasts_shards and full.device.type == "cpu":
            return _gather_by_broadcasts(as_sent(full), as_sent(shard), self.rank, group, async_op)
        work: dist.Work | None = all_gather_flat(as_sent(full), as_sent(shard), group=group, async_op=async_op)
        return work

    @cached_property
    def _broadcasts_shards(self) -> bool:
        """True if an all-gather is a broadcast by each rank: on few ranks, over gloo."""
        return self.num_ranks <= _BROADCASTING_RANKS and self.group is not None and backend_of(self.group) == "gloo"

    def all_reduce(self, full: torch.Tensor, average: bool = False, async_op: bool = True) -> dist.Work | None:
        """Sum (or average) `full` over the ranks, in place."""
        if self.num_ranks == 1:
            return None
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += 2 * (full.nbytes - full.nbytes // self.num_ranks)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return dist.all_reduce(full, op=op, group=self.group, async_op=async_op)

    def gather_rows(self, received: torch.Tensor, full: torch.Tensor, async_op: bool = True) -> dist.Work | None:
        """All-gather `full` of every rank into `received` (num_ranks * numel,), for a sum of the rows in rank order."""
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += received.nbytes - full.nbytes
        work: dist.Work | None = all_gather_flat(received, full, group=self.group, async_op=async_op)
        return work

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, average: bool = False, async_op: bool = True
    ) -> dist.Work | None:
        """Reduce-scatter `full` into `shard` with the native collective."""
        self._count_reduce_scatter(full)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work: dist.Work | None = _reduce_scatter_flat(shard, full, op=op, group=self.group, async_op=async_op)
        return work

    def exchange(self, received: torch.Tensor, full: torch.Tensor, async_op: bool = True) -> dist.Work | None:
        """Run the all-to-all of a reduce-scatter: send part r of `full` to rank r; receive row r from rank r.

        Between two ranks `received` may be the other's row alone; then no rank copies its own.
        """
        self._count_reduce_scatter(full)
        sizes = None
        if (numel := received.numel()) < full.numel():
            sizes = [0, numel] if self.rank == 0 else [numel, 0]
            full = full.narrow(0, (1 - self.rank) * numel, numel)
        return dist.all_to_all_single(received, full, sizes, sizes, group=self.group, async_op=async_op)

    def _count_reduce_scatter(self, full: torch.Tensor) -> None:
        self.traffic.reductions += 1
        self.traffic.reduce_bytes += full.nbytes - full.nbytes // self.num_ranks


# ---- sums of what an exchange brings, in rank order ------------------------------------------------------------------


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float32, or the given one if it is wider or not floating."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _sum(rows: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum two or more rows; into `out`, which has the dtype of the sum, or a new tensor."""
    dtype = sum_dtype(rows[0].dtype)
    if rows[0].dtype == dtype:
        total = torch.add(rows[0], rows[1], out=out)
        rest = rows[2:]
    else:
        total = rows[0].to(dtype) if out is None else out.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        total.add_(row)
    return total


def sum_received(received: Tensor, num_ranks: int) -> Tensor:
    """Sum the rows that `Axis.exchange` received, in rank order; overwrites `received`.

    (num_ranks * shard_numel,) become (shard_numel,), in float32 for 16-bit inputs; else in the same dtype, a view of
    the first row.
    """
    return sum_rows(received.view(num_ranks, -1).unbind())


def sum_rows(rows: Sequence[Tensor]) -> Tensor:
    """Sum rows in their order, as `sum_received` does; overwrites the first.

    Row after row is added in place, which takes less than half the time of a reduction over the rows and no memory.
    """
    total = rows[0].to(sum_dtype(rows[0].dtype))
    for row in rows[1:]:
        total.add_(row)
    return total


def put_scaled(values: Tensor, factor: float, out: Tensor) -> None:
    """Write values times a factor into a tensor of any floating dtype, rounding once.

    `torch.mul(values, factor, out=out)` alone rounds to the dtype of `values` first, where `out` has a wider one.
    """
    dtype = torch.promote_types(values.dtype, out.dtype)
    if values.dtype == dtype:
        torch.mul(values, factor, out=out)
    elif out.dtype == dtype:
        out.copy_(values).mul_(factor)
    else:
        torch.mul(values.to(dtype), factor, out=out)


_ADDED_AT_ONCE = 1 << 16
"""Elements per block of a sum, so that partial sums stay in the cache."""


def add_up_into(rows: Sequence[Tensor], out: Tensor, factor: float) -> None:
    """Write the sum of two or more rows, times a factor, into `out`, which shares no memory with them.

    The result equals `put_scaled` of the whole sum, bit for bit, and takes no memory where `out` has its dtype.
    """
    is_in_place = sum_dtype(rows[0].dtype) == out.dtype
    for start in range(0, out.numel(), _ADDED_AT_ONCE):
        parts = [row[start : start + _ADDED_AT_ONCE] for row in rows]
        target = out[start : start + _ADDED_AT_ONCE]
        if not is_in_place:
            put_scaled(_sum(parts), factor, target)
            continue
        _sum(parts, target)
        if factor != 1.0:
            target.mul_(factor)


# ---- streams ---------------------------------------------------------------------------------------------------------
#
# A communication stream takes a *launch* (starts a collective) and a *finish* (local work on its result, such as a sum
# over ranks) and returns a `Work`. Waiting on it makes the result visible to the code that follows:
#
# - `CudaCommStream` (CUDA): launch and finish are queued on a side stream of high priority that first waits for the
#   compute stream; waiting on the work queues an event wait on the current stream. The host never blocks.
# - `HostCommStream` (CPU): launch returns an asynchronous work handle that progresses on the back end's threads;
#   waiting blocks until it is done and then runs finish on the calling thread.
#
# On both, everything that the compute side queued before `submit` is done before the launch reads or writes memory, so
# a buffer may be handed to a stream straight after it was last used.

Launch = Callable[[bool], "dist.Work | None"]
"""Starts a collective. Its argument is torch's `async_op`; with it, it returns a `dist.Work`, or None if it is over."""
Finish = Callable[[], None]
Tell = Callable[..., None]
"""`CommStreamWatch.communicates` with the collective and the stream filled in."""


class Moment(Enum):
    """The moments of a collective. On CUDA all but the waits are points on the CUDA stream, which it reaches later."""

    LAUNCHES = "launches"  # about to be started
    LAUNCHED = "launched"  # handed to the back end
    ARRIVED = "arrived"  # the collective is done
    FINISHED = "finished"  # the local work on its result is done
    WAITS = "waits"  # the compute side begins to wait for it
    WAITED = "waited"  # the compute side goes on


class CommStreamWatch(Protocol):
    """Observer of the collectives of all communication streams."""

    active: bool  # collectives are to be reported

    def number(self) -> int:
        """Return the number of a new collective."""

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None = None) -> None:
        """Report a moment of a collective."""


class Work(Protocol):
    """The work handle of one submission; `wait` may be called any number of times."""

    def wait(self) -> None:
        """Make the result visible to the code that follows."""


class CommStream(Protocol):
    """An ordered queue of collectives."""

    def submit(self, launch: Launch, finish: Finish | None = None, after: Sequence[Work] = ()) -> Work:
        """Queue a collective and the local work on its result, behind the submissions whose results it reads."""

    def settle(self) -> None:
        """Block the host until all submissions are done."""


class StreamApi(Protocol):
    """The part of `torch.cuda` that communication streams use; a simulated device implements it, too."""

    def Stream(self, device: torch.device, priority: int) -> Any:  # noqa: N802 (torch's name)
        """Return a new side stream; lower numbers have higher priority."""

    def current_stream(self, device: torch.device) -> Any:
        """Return the current stream."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the current stream."""


def _nobody(_moment: Moment, work: dist.Work | None = None) -> None:
    """Report nothing."""


def _teller(watch: CommStreamWatch | None, stream: str) -> Tell:
    """Return the callback that reports a collective's progress."""
    return partial(watch.communicates, watch.number(), stream=stream) if watch and watch.active else _nobody


class HostWork:
    """A work handle and the local work that follows it, which the first `wait` runs; `tell` reports its moments."""

    def __init__(self, work: dist.Work | None, finish: Finish | None, tell: Tell | None = None) -> None:
        self._work, self._finish, self._tell = work, finish, tell or _nobody

    def wait(self) -> None:
        """Block until the collective is done, then run its finish."""
        tell, self._tell = self._tell, _nobody
        tell(Moment.WAITS)
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        tell(Moment.ARRIVED)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        tell(Moment.FINISHED)
        tell(Moment.WAITED)


class HostCommStream:
    """Communication stream of asynchronous work handles (gloo and other CPU back ends)."""

    def __init__(self, name: str = "", watch: CommStreamWatch | None = None) -> None:
        self._name = name
        self._watch = watch

    def submit(self, launch: Launch, finish: Finish | None = None, after: Sequence[Work] = ()) -> HostWork:
        """Wait for `after` and start the collective at once; the first `wait` on its work runs `finish`."""
        for earlier in after:
            earlier.wait()
        tell = _teller(self._watch, self._name)
        tell(Moment.LAUNCHES)
        work = launch(True)
        tell(Moment.LAUNCHED, work=work)
        return HostWork(work, finish, tell)

    def settle(self) -> None:
        """Do nothing: work is done once it was waited on."""


class CudaWork:
    """An event on a communication stream, which the current stream waits for."""

    def __init__(self, event: Any, current_stream: Callable[[], Any], tell: Tell) -> None:
        self._event, self._current_stream, self._tell = event, current_stream, tell

    def wait(self) -> None:
        """Queue a wait for the event on the current stream."""
        tell, self._tell = self._tell, _nobody
        tell(Moment.WAITS)
        self._current_stream().wait_event(self._event)
        tell(Moment.WAITED)


class CudaCommStream:
    """Communication stream of a CUDA side stream."""

    def __init__(
        self,
        device: torch.device,
        name: str = "",
        watch: CommStreamWatch | None = None,
        streams: StreamApi = torch.cuda,
    ) -> None:
        self._streams = streams
        # Collectives that compute will wait for come before the compute that is queued behind it.
        self._stream = streams.Stream(device, priority=-1)
        self._current_stream = partial(streams.current_stream, device)
        self._name = name
        self._watch = watch

    def submit(self, launch: Launch, finish: Finish | None = None, after: Sequence[Work] = ()) -> CudaWork:
        """Queue a collective and its `finish` behind `after` and the compute stream's present work."""
        self._stream.wait_stream(self._current_stream())
        tell = _teller(self._watch, self._name)
        with self._streams.stream(self._stream):
            for earlier in after:
                earlier.wait()  # on this stream: compute does not wait for what is only prefetched
            tell(Moment.LAUNCHES)
            # A synchronous collective runs on the current stream, which is this one. Only an observer needs a handle,
            # and pays for it by one more stream and two more events, those of the back end.
            work = launch(tell is not _nobody)
            tell(Moment.LAUNCHED, work=work)
            if work is not None:
                work.wait()  # a stream-level wait: the side stream waits for the back end's own stream
            tell(Moment.ARRIVED)
            if finish is not None:
                finish()
            tell(Moment.FINISHED)
            return CudaWork(self._stream.record_event(), self._current_stream, tell)

    def settle(self) -> None:
        """Block the host until the side stream is empty."""
        self._stream.synchronize()


class ChainedWork:
    """Works of a collective on one stream and of the local work on its result on another."""

    def __init__(self, stream: CommStream, launch: Launch, then: CommStream, finish: Finish) -> None:
        self._then, self._finish = then, finish
        self._last: Work | None = None
        self._first = stream.submit(launch, self._pass_on)

    def _pass_on(self) -> None:
        self._last = self._then.submit(lambda _async_op: self._finish())

    def wait(self) -> None:
        """Wait for both."""
        self._first.wait()
        assert self._last is not None
        self._last.wait()


def make_comm_stream(device: torch.device, name: str = "", watch: CommStreamWatch | None = None) -> CommStream:
    """Make the communication stream of a device: a side stream on CUDA, work handles elsewhere."""
    return CudaCommStream(device, name, watch) if device.type == "cuda" else HostCommStream(name, watch)


class SideStream:
    """A stream beside the current one for work that the host waits for; the current one on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Run a block after the work that is queued on the current stream, and block the host until it is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until the current stream has finished using it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))


# ---- the device of a stream, and clocks on it ------------------------------------------------------------------------


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def finish_stream(device: torch.device) -> None:
    """Block the host until the current stream of a CUDA device is empty (no-op elsewhere)."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def reached(device: torch.device) -> Callable[[], None]:
    """Record a CUDA event; return its host-side wait (no-op elsewhere)."""
    return torch.cuda.current_stream(device).record_event().synchronize if device.type == "cuda" else lambda: None


class Clock(Protocol):
    """The clock of a device; taking the time never waits."""

    is_host: bool  # whether that is the host, so that times of other threads of the host compare with its own

    def mark(self) -> Any:
        """Take the time: now on the host, on CUDA when the current stream gets there."""

    def settle(self) -> None:
        """Wait until all marks are reached and can be read."""

    def elapsed_ns(self, earlier: Any, later: Any) -> int:
        """Return the nanoseconds between two marks."""

    def allocated_bytes(self) -> int | None:
        """Return the bytes allocated on the device for tensors of this process; None on the host."""


class HostClock:
    """The host's monotonic clock."""

    is_host = True
    mark = staticmethod(time.perf_counter_ns)

    def settle(self) -> None:
        """Do nothing: marks on the host are reached when taken."""

    def elapsed_ns(self, earlier: int, later: int) -> int:
        """Return the nanoseconds between two marks."""
        return later - earlier

    def allocated_bytes(self) -> None:
        """Return None: memory of the host's tensors is not counted."""


class StreamClock:
    """Clock of events on CUDA streams, with a resolution of about half a microsecond."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Queue an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def elapsed_ns(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> int:
        """Return nanoseconds; CUDA gives float32 milliseconds, so keep marks within seconds of each other."""
        return round(earlier.elapsed_time(later) * 1e6)

    def allocated_bytes(self) -> int:
        """Return the bytes allocated by the caching allocator."""
        return torch.cuda.memory_allocated(self._device)


def make_clock(device: torch.device) -> Clock:
    """Make the clock of a device: events on CUDA, the host's clock elsewhere."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


def default_device() -> torch.device:
    """Return the accelerator of this process if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_device(device: torch.device | str | int | None, mesh_device_type: str) -> torch.device:
    """Return the device that parameters live on: the one given, else this process's device of the mesh's type."""
    try:
        resolved = torch.device(mesh_device_type if device is None else device)
    except RuntimeError as error:
        raise ConfigurationError(f"device={device!r} is none ({error}); leave it out, or give a torch.device") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        given = f"the mesh is of type {mesh_device_type!r}" if device is None else f"device={device!r}"
        reason = "this torch is built for CPUs only" if torch.version.cuda is None else "torch finds no CUDA device"
        cure = 'build the mesh with init_device_mesh("cpu", ...)' if device is None else "leave the argument out"
        raise ConfigurationError(f"{given}, but {reason}; {cure}, or install torch with CUDA on a machine that has it")
    if resolved == torch.device("cuda"):  # without an index
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
