"""Lanes: ordered places where communication runs. The only file, with the executor, that knows devices apart.

A lane takes a *launch* (starts a collective) and a *finish* (local work on its result, such as summing what came in)
and returns a ticket. Waiting on the ticket makes the result visible to the code that follows:

- `StreamLane` (CUDA): launch and finish are queued on a side stream that first waits for the compute stream; waiting
  on the ticket queues an event wait on the compute stream. The host never blocks.
- `HostLane` (CPU): launch returns an asynchronous work handle that progresses on the back end's threads; waiting blocks
  until it is done and then runs finish on the calling thread.

On both, everything the compute side queued before `submit` is done before the launch reads or writes memory, so a
buffer may be handed to a lane straight after it was last used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

Launch = Callable[[], "dist.Work | None"]
Finish = Callable[[], None]


class Ticket(Protocol):
    """A promise that one submission completes; `wait` may be called any number of times."""

    def wait(self) -> None:
        """Make the result visible to what the caller runs next."""


class Lane(Protocol):
    """An ordered place where submissions run one after another."""

    def submit(self, launch: Launch, finish: Finish | None = None) -> Ticket:
        """Queue a collective and the local work on its result."""


class HostTicket:
    """A work handle and the local work that follows it, done once, by the first `wait`."""

    def __init__(self, work: dist.Work | None, finish: Finish | None) -> None:
        self._work = work
        self._finish = finish

    def wait(self) -> None:
        """Block until the collective is done, then run its finish."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class HostLane:
    """Communication by asynchronous work handles (gloo and other CPU back ends)."""

    def submit(self, launch: Launch, finish: Finish | None = None) -> HostTicket:
        """Start the collective at once; its finish runs when the ticket is waited on."""
        return HostTicket(launch(), finish)


class StreamTicket:
    """An event recorded on a lane's stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Queue a wait for the event on the current stream."""
        torch.cuda.current_stream().wait_event(self._event)


class StreamLane:
    """Communication on a CUDA side stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, launch: Launch, finish: Finish | None = None) -> StreamTicket:
        """Queue collective and finish behind what the compute stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work = launch()
            if work is not None:
                work.wait()  # a stream-level wait: the side stream waits for the back end's own stream
            if finish is not None:
                finish()
            return StreamTicket(self._stream.record_event())


def make_lane(device: torch.device) -> Lane:
    """The lane for a device: a side stream on CUDA, work handles elsewhere."""
    return StreamLane(device) if device.type == "cuda" else HostLane()


def default_device() -> torch.device:
    """The accelerator of this process if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_device(device: torch.device | str | int | None, mesh_device_type: str) -> torch.device:
    """The device that parameters live on: the one given, else this process's device of the mesh's type."""
    resolved = torch.device(mesh_device_type if device is None else device)
    if resolved == torch.device("cuda"):  # without an index
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
