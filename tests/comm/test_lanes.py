"""The lane of the CPU launches at once and finishes when waited for, each once; that of CUDA keeps streams in order."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.comm.lanes import HostLane, StreamLane, make_lane, resolve_device


class LoggedWork:
    """Stands for a collective under way."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait(self) -> None:
        self.log.append(f"{self.name} done")


class Recorder:
    """Submits named work and notes what happens."""

    def __init__(self) -> None:
        self.lane = HostLane()
        self.log: list[str] = []

    def launch(self, name: str, async_op: bool) -> dist.Work | None:
        self.log.append(f"{name} starts")
        return cast(dist.Work, LoggedWork(name, self.log)) if async_op else None

    def note(self, text: str) -> None:
        self.log.append(text)


def test_a_launch_runs_at_once_and_its_finish_when_waited_for() -> None:
    recorder = Recorder()
    ticket = recorder.lane.submit(partial(recorder.launch, "a"), lambda: recorder.note("a summed"))
    assert recorder.log == ["a starts"]
    for _ in range(3):
        ticket.wait()
    assert recorder.log == ["a starts", "a done", "a summed"]


def test_a_finish_that_waits_on_its_own_ticket_runs_once() -> None:
    recorder = Recorder()
    tickets = []

    def finish() -> None:
        recorder.note("summed")
        tickets[0].wait()

    tickets.append(recorder.lane.submit(partial(recorder.launch, "a"), finish))
    tickets[0].wait()
    assert recorder.log == ["a starts", "a done", "summed"]


class LoggedStream:
    """Stands for a CUDA stream, and notes what is queued on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: "LoggedStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        return f"what {self.name} has queued"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class LoggedStreams:
    """Stands for `torch.cuda`."""

    def __init__(self, log: list[str]) -> None:
        self.lane, self.compute = LoggedStream("the lane", log), LoggedStream("compute", log)

    def Stream(self, _device: torch.device, priority: int) -> LoggedStream:  # noqa: N802 (torch's name)
        assert priority < 0, "compute's streams have priority 0"
        return self.lane

    def current_stream(self, _device: torch.device) -> LoggedStream:
        return self.compute

    def stream(self, stream: LoggedStream) -> AbstractContextManager[None]:
        assert stream is self.lane
        return nullcontext()


class Listener:
    """Stands for an observer of lanes that listens or does not."""

    def __init__(self, listens: bool) -> None:
        self.listens = listens

    def __bool__(self) -> bool:
        return self.listens

    def number(self) -> int:
        return 0

    def communicates(self, *_: Any, **__: Any) -> None:
        """Take no note."""


@pytest.mark.parametrize("is_observed", [False, True])
def test_a_stream_lane_runs_behind_what_compute_has_queued_and_compute_waits_for_it(is_observed: bool) -> None:
    recorder = Recorder()
    lane = StreamLane(torch.device("cuda"), watch=Listener(is_observed), streams=LoggedStreams(recorder.log))
    lane.submit(partial(recorder.launch, "a"), lambda: recorder.note("a summed")).wait()
    assert recorder.log == [
        "the lane waits for compute",
        "a starts",
        *(["a done"] if is_observed else []),  # else the collective itself is queued on the lane's stream
        "a summed",
        "compute waits for what the lane has queued",
    ]


def test_the_cpu_has_a_host_lane_and_a_device_is_the_one_given_or_that_of_the_mesh() -> None:
    assert isinstance(make_lane(torch.device("cpu")), HostLane)
    assert {resolve_device(given, "cpu") for given in ("cpu", torch.device("cpu"), None)} == {torch.device("cpu")}
