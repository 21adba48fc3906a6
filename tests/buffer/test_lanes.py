"""The lane of the CPU: launches at once, finishes when waited for, each once."""

from typing import cast

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.buffer.lanes import HostLane, make_lane, resolve_device


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

    def launch(self, name: str) -> dist.Work:
        self.log.append(f"{name} starts")
        return cast(dist.Work, LoggedWork(name, self.log))

    def note(self, text: str) -> None:
        self.log.append(text)


def test_a_launch_runs_at_once_and_its_finish_when_waited_for() -> None:
    recorder = Recorder()
    ticket = recorder.lane.submit(lambda: recorder.launch("a"), lambda: recorder.note("a summed"))
    assert recorder.log == ["a starts"]
    ticket.wait()
    assert recorder.log == ["a starts", "a done", "a summed"]


def test_a_finish_runs_once_however_often_one_waits() -> None:
    recorder = Recorder()
    ticket = recorder.lane.submit(lambda: recorder.launch("a"), lambda: recorder.note("a summed"))
    for _ in range(3):
        ticket.wait()
    assert recorder.log == ["a starts", "a done", "a summed"]


def test_tickets_finish_in_the_order_of_waiting() -> None:
    recorder = Recorder()
    tickets = [
        recorder.lane.submit(lambda: recorder.launch("a"), lambda: recorder.note("a summed")),
        recorder.lane.submit(lambda: recorder.launch("b"), lambda: recorder.note("b summed")),
    ]
    for ticket in tickets:
        ticket.wait()
    assert recorder.log == ["a starts", "b starts", "a done", "a summed", "b done", "b summed"]


def test_a_launch_without_a_collective_still_finishes() -> None:
    recorder = Recorder()
    ticket = recorder.lane.submit(lambda: None, lambda: recorder.note("summed"))
    assert recorder.log == []
    ticket.wait()
    assert recorder.log == ["summed"]


def test_a_submission_needs_no_finish() -> None:
    recorder = Recorder()
    recorder.lane.submit(lambda: recorder.launch("a")).wait()
    assert recorder.log == ["a starts", "a done"]


def test_a_finish_that_waits_on_its_own_ticket_runs_once() -> None:
    recorder = Recorder()
    tickets = []

    def finish() -> None:
        recorder.note("summed")
        tickets[0].wait()

    tickets.append(recorder.lane.submit(lambda: recorder.launch("a"), finish))
    tickets[0].wait()
    assert recorder.log == ["a starts", "a done", "summed"]


def test_the_cpu_has_a_host_lane() -> None:
    assert isinstance(make_lane(torch.device("cpu")), HostLane)


@pytest.mark.parametrize("given", ["cpu", torch.device("cpu"), None])
def test_a_device_is_the_one_given_or_that_of_the_mesh(given: str | torch.device | None) -> None:
    assert resolve_device(given, "cpu") == torch.device("cpu")
