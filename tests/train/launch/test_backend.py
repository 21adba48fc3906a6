"""The back end of the process group is the one that the options name."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train import program
from megatron_fsdp.train.launch.crew import STORE_FILE_VARIABLE
from megatron_fsdp.train.launch.ranks import Rank, join_ranks
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World
from megatron_fsdp.train.options.resolve import resolve


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The back ends of process groups that are set up, without any that is."""
    made: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        STORE_FILE_VARIABLE: str(tmp_path / "f"),
    }.items():
        monkeypatch.setenv(name, value)
    return made


def test_a_group_has_the_back_end_that_was_asked_for(groups: list[str]) -> None:
    with join_ranks("cpu"), join_ranks("cuda"), join_ranks("cuda", backend="gloo"), join_ranks("cuda", backend="nccl"):
        pass
    assert groups == ["gloo", "nccl", "gloo", "nccl"]


@pytest.mark.parametrize(("words", "expected"), [([], "auto"), (["--distributed-backend", "gloo"], "gloo")])
def test_a_rank_asks_for_what_the_options_say(monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str) -> None:
    asked: list[tuple[str, str]] = []

    @contextmanager
    def join(device_type: str, _: timedelta, backend: str = "auto") -> Iterator[Rank]:
        asked.append((device_type, backend))
        yield Rank(0, 1, torch.device("cpu"), 0)

    def do_nothing(*_: Any) -> None:
        return None

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(program.signal, "signal", do_nothing)
    monkeypatch.setattr(program, "join_ranks", join)
    monkeypatch.setattr("megatron_fsdp.train.run_job.run_job", do_nothing)
    assert program.run_rank(["--preset", "tiny", "--device", "cpu", *words]) == 0
    assert asked == [("cpu", expected)]


def test_nccl_without_an_accelerator_is_refused() -> None:
    options = parse_options(["--preset", "tiny", "--distributed-backend", "nccl"])
    with pytest.raises(ConfigurationError, match="--distributed-backend nccl does not go with --device cpu"):
        resolve(options, World(2, "cpu"))
    assert resolve(options, World(2, "cuda")).options.parallel.distributed_backend == "nccl"
