"""A stand-in inference engine: a process for each of its ranks, with fused, tensor-parallel runtime parameters.

The trainer's side (`StandIn`) starts the processes, speaks to them over sockets, and has the four calls of vLLM's
client. Tensors come over a group of their own. Names that a rank does not know raise; those that do not come leave the
old value, so that a forgotten name shows in `stale`.
"""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
from torch import Tensor

from megatron_fsdp.weights import receive, stateless_group
from tests.support.source_tree import ROOT

LIMIT_S = 60.0
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "w13", "w3": "w13"}
_BY_COLUMNS = ("o_proj", "down_proj", "w2")

Shapes = Mapping[str, tuple[int, ...]]


def runtime_parameters(weights: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """The parameters of one rank, made of a checkpoint's tensors: parts of fused ones lie one after another."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(weights.items(), key=lambda each: [*_FUSED, _kind(each[0])].index(_kind(each[0]))):
        runtime, part = placed(name, tensor, rank, ranks)
        found.setdefault(runtime, []).append(part)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _kind(name: str) -> str:
    return name.split(".")[-2] if "." in name else name


def placed(name: str, tensor: Tensor, rank: int, ranks: int) -> tuple[str, Tensor]:
    """The runtime parameter that a tensor belongs to, and this rank's part of the tensor."""
    kind = _kind(name)
    runtime = name.replace(f".{kind}.", f".{_FUSED.get(kind, kind)}.")
    if kind in _BY_COLUMNS:
        return runtime, tensor.tensor_split(ranks, 1)[rank]
    if kind in _FUSED or re.search("embed_tokens|lm_head", name):
        return runtime, tensor.tensor_split(ranks)[rank]
    return runtime, tensor


class Worker:
    """One rank of the engine, in its own process; `faults` says when it dies."""

    def __init__(self, shapes: Shapes, rank: int, ranks: int, port: int, faults: Mapping[str, int]) -> None:
        self.names, self.rank, self.ranks, self.faults = list(shapes), rank, ranks, faults
        self.weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        self.group = stateless_group("localhost", port, rank + 1, ranks + 1, timeout_s=LIMIT_S)
        self.version, self.is_open, self.loaded = "", False, 0

    def start(self) -> None:
        if self.is_open:
            raise RuntimeError("an update is open already")
        if "rejects" in self.faults:
            raise RuntimeError("this engine takes no weights")
        self.is_open = True

    def update(self, info: Mapping[str, Any]) -> None:
        if not self.is_open:
            raise RuntimeError("no update was started")
        self.is_open = False  # if it fails
        receive(self.group, info, self.load)
        self.is_open = True

    def load(self, name: str, tensor: Tensor) -> None:
        if self.loaded == self.faults.get("dies_after"):
            os._exit(1)
        self.loaded += 1
        self.weights[name].copy_(tensor)  # a KeyError for a name that is not known

    def finish(self, version: str) -> None:
        if not self.is_open:
            raise RuntimeError("no update was started, or it failed")
        self.version, self.is_open = version, False

    def state(self) -> tuple[str, dict[str, str]]:
        """The version, and the digests of the runtime parameters."""
        return self.version, digests(runtime_parameters(self.weights, self.rank, self.ranks))


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    found = {name: t.contiguous().reshape(-1).view(torch.uint8).numpy() for name, t in tensors.items()}
    return {name: hashlib.sha256(each.tobytes()).hexdigest() for name, each in found.items()}


def serve(address: str, key: str) -> None:
    """Answer the trainer until it hangs up."""
    host, _, port = address.rpartition(":")
    with Client((host, int(port)), authkey=bytes.fromhex(key)) as trainer:
        worker = Worker(*trainer.recv())
        while True:
            try:
                call, *given = trainer.recv()
            except EOFError:
                return
            try:
                answer = getattr(worker, call)(*given)
            except Exception as error:  # noqa: BLE001  sent to the trainer
                trainer.send(error if isinstance(error, RuntimeError) else RuntimeError(repr(error)))
            else:
                trainer.send(answer)


class StandIn:
    """The trainer's side."""

    def __init__(self, shapes: Shapes, ranks: int = 1, **faults: int) -> None:
        key, self.shapes, self.ranks = os.urandom(8), shapes, ranks
        with Listener(("localhost", 0), authkey=key) as listener:
            words = [
                sys.executable,
                "-m",
                "tests.support.inference_engine",
                f"localhost:{listener.address[1]}",
                key.hex(),
            ]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
            self.processes = [subprocess.Popen(words, env=environment) for _ in range(ranks)]
            self.workers = [listener.accept() for _ in range(ranks)]
        port = free_port()
        for rank, worker in enumerate(self.workers):
            worker.send((dict(shapes), rank, ranks, port, faults))
        self.group = stateless_group("localhost", port, 0, ranks + 1, timeout_s=LIMIT_S)

    def _ask(self, *call: Any) -> list[Any]:
        for worker in self.workers:
            worker.send(call)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [worker.recv() for worker in self.workers]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def start(self) -> None:
        self._ask("start")

    def update(self, info: Mapping[str, Any]) -> None:
        """Begin; the answers are read by `finish`."""
        for worker in self.workers:
            worker.send(("update", info))

    def finish(self, version: str) -> None:
        self._answers()
        self._ask("finish", version)

    @property
    def version(self) -> str:
        (version,) = {version for version, _ in self._ask("state")}
        return str(version)

    def stale(self, weights: Mapping[str, Tensor]) -> Sequence[str]:
        """The runtime parameters that are not those of a checkpoint's tensors, on any rank."""
        found = set()
        for rank, (_, held) in enumerate(self._ask("state")):
            wanted = digests(runtime_parameters(weights, rank, self.ranks))
            assert wanted.keys() == held.keys()
            found |= {name for name, digest in wanted.items() if digest != held[name]}
        return sorted(found)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for process in self.processes:
            process.wait(LIMIT_S)


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(*sys.argv[1:])
