"""Two hosts on one machine: network namespaces with addresses of their own, or two loopback addresses."""

import ctypes
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.forked_programs import Program
from tests.support.train_program import OPTIONS, environment

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


def start_agent(host: Host, store: Host, nodes: str, restarts: int, *options: str) -> Program:
    """Start torchrun's agent, with two ranks of the trainer, on a host; ranks meet at the address of another."""
    described = (host.name, host.address, f"{store.address}:{store.port}", nodes, str(restarts))
    # Without it an agent that comes back waits for an address that the agent which stayed has told only once.
    env = environment(GLOO_SOCKET_IFNAME=host.interface, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    return Program(_agent, [*described, *OPTIONS, *options], env)


def _agent(argv: Sequence[str]) -> int:
    namespace, address, store, nodes, restarts, *options = argv
    if namespace:
        with Path(f"/var/run/netns/{namespace}").open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
    least, _, most = nodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(least),
        max_nodes=int(most),
        nproc_per_node=2,
        run_id="two-hosts",
        rdzv_backend="c10d",
        rdzv_endpoint=store,
        rdzv_configs={"is_host": address == store.partition(":")[0], "keep_alive_interval": 1, "last_call_timeout": 1},
        local_addr=address,
        max_restarts=int(restarts),
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
