"""Work that the first rank of each machine does: all wait for it, and all hear of what went wrong."""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train import ranks
from megatron_fsdp.train.failures import OutOfMemoryError
from megatron_fsdp.train.ranks import Rank, is_first_here, restarts_so_far, work_on_machines
from tests.conftest import RunRanks
from tests.support.forked_programs import Program, children_of
from tests.support.on_ranks import on_ranks
from tests.support.train_program import (
    LIMIT_S,
    OPTIONS,
    by_step,
    differences,
    environment,
    run,
    this_rank,
    wait_for,
    write_text,
)


def on_two_machines(local: str, seconds: float, failing: dict[int, str]) -> tuple[bool, str | None]:
    """Work as `local` says; returns whether this rank worked, and what was raised."""
    rank, done = this_rank(), []
    os.environ["LOCAL_RANK"] = local.split(",")[rank.index]

    def work() -> None:
        time.sleep(seconds)
        done.append(rank.index)
        if rank.index in failing:
            raise {"usage": ConfigurationError, "memory": OutOfMemoryError, "bug": KeyError}[failing[rank.index]](
                "no text"
            )

    beat, ranks._BEAT_S = ranks._BEAT_S, 0.05
    try:
        work_on_machines(rank, work)
    except (ConfigurationError, OutOfMemoryError, RuntimeError) as error:
        return bool(done), f"{type(error).__name__} {error}"
    finally:
        ranks._BEAT_S = beat
        del os.environ["LOCAL_RANK"]
    return bool(done), None


def test_the_first_rank_of_each_machine_works_and_all_wait_longer_than_a_beat(run_ranks: RunRanks) -> None:
    assert run_ranks(3, on_two_machines, "0,1,0", 0.0, {}) == [(True, None), (False, None), (True, None)]
    assert run_ranks(3, on_two_machines, "0,1,2", 0.4, {}) == [(True, None), (False, None), (False, None)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("usage", "ConfigurationError no text"),
        ("memory", "OutOfMemoryError no text"),
        ("bug", "RuntimeError rank 2: KeyError('no text')"),
    ],
)
def test_what_goes_wrong_on_one_machine_is_raised_on_all(run_ranks: RunRanks, kind: str, said: str) -> None:
    found = run_ranks(3, on_two_machines, "0,1,0", 0.0, {2: kind})
    assert found == [(True, said), (False, said), (True, said)]


@on_ranks(2)
def test_ranks_agree_on_restarts_where_an_agent_came_back_and_counts_anew() -> None:
    rank = this_rank()
    for counts, agreed in ((("1", "0"), 1), (("0", "0"), 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_RESTART_COUNT", counts[rank.index])
            assert restarts_so_far(rank) == agreed


# ---- two hosts on one machine: two loopback addresses ---------------------------------------------------------------


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _agent(argv: Sequence[str]) -> int:
    """Torchrun's agent, with two ranks of the trainer, at an address; the first host has the store."""
    address, store, *options = argv
    is_host = address == store.partition(":")[0]
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=2,
        run_id="two-hosts",
        rdzv_backend="c10d",
        rdzv_endpoint=store,
        rdzv_configs={"is_host": is_host, "keep_alive_interval": 1, "last_call_timeout": 1},
        local_addr=address,
        max_restarts=3,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _rank)(*options)
    return 0


def _rank(*options: str) -> None:
    """One rank; leaves word of the ranks that it shards with beside the results."""
    from megatron_fsdp.train import run_job
    from megatron_fsdp.train.program import run_rank

    module: Any = run_job
    build = module.build

    def noting(*args: Any) -> Any:
        trained = build(*args)
        mesh = next(trained.model.parameters()).device_mesh.mesh.tolist()
        Path(options[options.index("--out") + 1], f"mesh{os.environ['RANK']}.txt").write_text(str(mesh))
        return trained

    module.build = noting
    if code := run_rank(options):
        sys.exit(code)


STEPS = 60
NUMBERS = ("loss", "grad_norm", "samples", "data_checksum")
GONE_S = 8.0  # the others notice after three missed signs of life, a second each
LAST = f"iter_{STEPS:07}"


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="has a second loopback address on Linux alone")
def test_a_host_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text.txt"))
    same: tuple[str, ...] = ("--data-path", text, "--train-iters", str(STEPS), "--save-interval", "5")
    same = (*same, "--num-distributed-optimizer-instances", "2", "--micro-batch-size", "1")
    alone, out, saved = tmp_path / "alone", tmp_path / "out", tmp_path / "saved"
    run(*same, "--nproc", "4", "--save", str(alone / "saved"), "--out", str(alone))
    store = f"127.0.0.1:{_free_port()}"
    options = (*OPTIONS, *same, "--save", str(saved), "--out", str(out))

    def start(address: str) -> Program:
        # Without it an agent that comes back waits for an address that the agent which stayed has told only once.
        return Program(_agent, [address, store, *options], environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))

    agent, lost = start("127.0.0.1"), start("127.0.0.2")
    wait_for(lambda: (saved / "iter_0000010").exists(), agent)
    meshes = {(out / f"mesh{rank}.txt").read_text() for rank in range(4)}
    for pid in (lost.pid, *children_of(lost.pid)):  # a host that loses its power
        os.kill(pid, signal.SIGKILL)
    time.sleep(GONE_S)
    back = start("127.0.0.2")
    ended = [program.communicate(timeout=LIMIT_S) for program in (agent, back)]
    assert (agent.returncode, back.returncode) == (0, 0), [errors[-3000:] for _, errors in ended]
    assert meshes == {"[[0, 1], [2, 3]]"}  # inner groups are rows: those of one host
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1))
    assert by_step(out, *NUMBERS) == by_step(alone, *NUMBERS)
    assert differences(saved / LAST, alone / "saved" / LAST) == []


def test_without_torchrun_all_ranks_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [is_first_here(Rank(index, 2, torch.device("cpu"), 1)) for index in (0, 1)] == [True, False]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_first_here(Rank(8, 16, torch.device("cpu"), 1))
