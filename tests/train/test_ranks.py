"""Work that the first rank of each machine does: all wait for it, and all hear of what went wrong."""

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


def agreed(counts: list[str]) -> int:
    rank = this_rank()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = counts[rank.index]
    try:
        return restarts_so_far(rank)
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_ranks_agree_on_restarts_where_an_agent_came_back_and_counts_anew(run_ranks: RunRanks) -> None:
    assert run_ranks(2, agreed, ["1", "0"]) == [1, 1]
    assert run_ranks(2, agreed, ["0", "0"]) == [0, 0]


# ---- two hosts on one machine: network namespaces with addresses of their own, or two loopback addresses -------------

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: Of its network namespace; empty where there is none.
        address: Its own.
        interface: With this address.
        port: Free there, to meet at.
    """

    name: str
    address: str
    interface: str
    port: int


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that can reach each other, and nobody else where the kernel allows namespaces."""
    mark = f"{os.getpid()}n{next(_numbers)}"
    port = _free_port()
    hosts = tuple(
        Host(f"mfsdp{side}{mark}", f"10.231.7.{i + 1}", f"v{side}{mark}", port) for i, side in enumerate("ab")
    )
    if sys.platform == "linux" and _call("ip", "netns", "add", hosts[0].name):
        try:
            _call("ip", "netns", "add", hosts[1].name)
            _call("ip", "link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
            for host in hosts:
                _call("ip", "link", "set", host.interface, "netns", host.name)
                _call("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
                for interface in (host.interface, "lo"):
                    _call("ip", "-n", host.name, "link", "set", interface, "up")
            yield hosts[0], hosts[1]
        finally:
            for host in hosts:
                _call("ip", "netns", "del", host.name)
    else:
        yield Host("", "127.0.0.1", "lo", port), Host("", "127.0.0.2", "lo", port)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _call(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def start_agent(host: Host, store: Host, *options: str) -> Program:
    """Start torchrun's agent, with two ranks of the trainer, on a host; ranks meet at the address of another."""
    described = (host.name, host.address, f"{store.address}:{store.port}")
    # Without it an agent that comes back waits for an address that the agent which stayed has told only once.
    env = environment(GLOO_SOCKET_IFNAME=host.interface, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    return Program(_agent, [*described, *OPTIONS, *options], env)


def _agent(argv: Sequence[str]) -> int:
    namespace, address, store, *options = argv
    if namespace:
        with Path(f"/var/run/netns/{namespace}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=2,
        run_id="two-hosts",
        rdzv_backend="c10d",
        rdzv_endpoint=store,
        rdzv_configs={"is_host": address == store.partition(":")[0], "keep_alive_interval": 1, "last_call_timeout": 1},
        local_addr=address,
        max_restarts=3,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _rank)(namespace, *options)
    return 0


def _rank(namespace: str, *options: str) -> None:
    """One rank; leaves word of its host and of the ranks that it shards with beside the results."""
    from megatron_fsdp.train import run_job
    from megatron_fsdp.train.program import run_rank

    module: Any = run_job
    build = module.build

    def noting(*args: Any) -> Any:
        trained = build(*args)
        mesh = next(trained.model.parameters()).device_mesh.mesh.tolist()
        out = Path(options[options.index("--out") + 1])
        (out / f"mesh{os.environ['RANK']}.txt").write_text(f"{namespace} {mesh}")
        return trained

    module.build = noting
    code = run_rank(options)
    if code:
        sys.exit(code)


STEPS = 60
NUMBERS = ("loss", "grad_norm", "samples", "data_checksum")
GONE_S = 8.0  # the others notice after three missed signs of life, a second each
LAST = f"iter_{STEPS:07}"


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="uses network namespaces")
def test_a_host_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text.txt"))
    same: tuple[str, ...] = ("--data-path", text, "--train-iters", str(STEPS), "--save-interval", "5")
    same = (*same, "--num-distributed-optimizer-instances", "2", "--micro-batch-size", "1")
    alone, out, saved = tmp_path / "alone", tmp_path / "out", tmp_path / "saved"
    run(*same, "--nproc", "4", "--save", str(alone / "saved"), "--out", str(alone))
    with two_hosts() as (first, second):
        options = (*same, "--save", str(saved), "--out", str(out))
        agent = start_agent(first, first, *options)
        lost = start_agent(second, first, *options)
        wait_for(lambda: (saved / "iter_0000010").exists(), agent)
        meshes = [(out / f"mesh{rank}.txt").read_text().split(maxsplit=1) for rank in range(4)]
        ranks = children_of(lost.pid)
        for pid in (lost.pid, *ranks):  # a host that loses its power
            os.kill(pid, signal.SIGKILL)
        time.sleep(GONE_S)
        back = start_agent(second, first, *options)
        ended = [program.communicate(timeout=LIMIT_S) for program in (agent, back)]
    assert (agent.returncode, back.returncode) == (0, 0), [errors[-3000:] for _, errors in ended]
    assert {mesh for _, mesh in meshes} == {"[[0, 1], [2, 3]]"}  # inner groups are rows
    assert meshes[0][0] == meshes[1][0] != meshes[2][0] == meshes[3][0] or not first.name
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1))
    assert by_step(out, *NUMBERS) == by_step(alone, *NUMBERS)
    assert differences(saved / LAST, alone / "saved" / LAST) == []


def test_without_torchrun_all_ranks_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [is_first_here(Rank(index, 2, torch.device("cpu"), 1)) for index in (0, 1)] == [True, False]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_first_here(Rank(8, 16, torch.device("cpu"), 1))
