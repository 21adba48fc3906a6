"""Communication streams: ordered queues of collectives, by side streams on CUDA and work handles elsewhere.

A communication stream takes a *launch* (starts a collective) and a *finish* (local work on its result, such as a sum
over ranks) and returns a `Work`. Waiting on it makes the result visible to the code that follows:

- `CudaCommStream` (CUDA): launch and finish are queued on a side stream of high priority that first waits for the
  compute stream; waiting on the work queues an event wait on the current stream. The host never blocks.
- `HostCommStream` (CPU): launch returns an asynchronous work handle that progresses on the back end's threads; waiting
  blocks until it is done and then runs finish on the calling thread.

On both, everything that the compute side queued before `submit` is done before the launch reads or writes memory, so
a buffer may be handed to a stream straight after it was last used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_fsdp.errors import ConfigurationError

Launch = Callable[[bool], "dist.Work | None"]
"""Starts a collective. Its argument is torch's `async_op`; with it, a `dist.Work` is returned."""
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


def _nobody(_moment: Moment, work: dist.Work | None = None) -> None:
    """Report nothing."""


def _teller(watch: CommStreamWatch | None, stream: str) -> Tell:
    """Return the callback that reports a collective's progress."""
    return partial(watch.communicates, watch.number(), stream=stream) if watch and watch.active else _nobody


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
