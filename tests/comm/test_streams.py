"""Communication streams: the CPU's launches at once and finishes when waited for, once; CUDA's keeps order."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.comm.collectives import CudaCommStream, HostCommStream, make_comm_stream, resolve_device


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
        self.stream = HostCommStream()
        self.log: list[str] = []

    def launch(self, name: str, async_op: bool) -> dist.Work | None:
        self.log.append(f"{name} starts")
        return cast(dist.Work, LoggedWork(name, self.log)) if async_op else None

    def note(self, text: str) -> None:
        self.log.append(text)


def test_a_launch_runs_at_once_and_its_finish_when_waited_for() -> None:
    recorder = Recorder()
    work = recorder.stream.submit(partial(recorder.launch, "a"), lambda: recorder.note("a summed"))
    assert recorder.log == ["a starts"]
    for _ in range(3):
        work.wait()
    assert recorder.log == ["a starts", "a done", "a summed"]


def test_a_finish_that_waits_on_its_own_work_runs_once() -> None:
    recorder = Recorder()
    works = []

    def finish() -> None:
        recorder.note("summed")
        works[0].wait()

    works.append(recorder.stream.submit(partial(recorder.launch, "a"), finish))
    works[0].wait()
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
        self.side, self.compute = LoggedStream("the stream", log), LoggedStream("compute", log)

    def Stream(self, _device: torch.device, priority: int) -> LoggedStream:  # noqa: N802 (torch's name)
        assert priority < 0, "compute's streams have priority 0"
        return self.side

    def current_stream(self, _device: torch.device) -> LoggedStream:
        return self.compute

    def stream(self, stream: LoggedStream) -> AbstractContextManager[None]:
        assert stream is self.side
        return nullcontext()


class Listener:
    """Stands for an observer of streams that listens or does not."""

    def __init__(self, listens: bool) -> None:
        self.active = listens

    def number(self) -> int:
        return 0

    def communicates(self, *_: Any, **__: Any) -> None:
        """Take no note."""


@pytest.mark.parametrize("is_observed", [False, True])
def test_a_cuda_stream_runs_behind_what_compute_has_queued_and_compute_waits_for_it(is_observed: bool) -> None:
    recorder = Recorder()
    stream = CudaCommStream(torch.device("cuda"), watch=Listener(is_observed), streams=LoggedStreams(recorder.log))
    stream.submit(partial(recorder.launch, "a"), lambda: recorder.note("a summed")).wait()
    assert recorder.log == [
        "the stream waits for compute",
        "a starts",
        *(["a done"] if is_observed else []),  # else the collective itself is queued on the side stream
        "a summed",
        "compute waits for what the stream has queued",
    ]


def test_the_cpu_has_a_host_stream_and_a_device_is_the_one_given_or_that_of_the_mesh() -> None:
    assert isinstance(make_comm_stream(torch.device("cpu")), HostCommStream)
    assert {resolve_device(given, "cpu") for given in ("cpu", torch.device("cpu"), None)} == {torch.device("cpu")}
