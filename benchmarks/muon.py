"""Measures a step of Muon: ours, FSDP2 whose every rank gathers and iterates every matrix, and ours with AdamW.

python benchmarks/muon.py --width 512 --layers 8 --ranks 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from benchmarks.launching import describe_machine, measure_on_ranks, write_document
from megatron_fsdp import fully_shard_model, fully_shard_optimizer

_LR = 1e-3


@dataclass(frozen=True)
class Request:
    """What is measured: blocks of two matrices, width x 4 width and back."""

    width: int = 512
    layers: int = 8
    tokens: int = 256  # of each rank
    steps: int = 6
    warmup: int = 2
    device_type: str = "cpu"


class Block(nn.Module):
    """A residual block. (tokens, width) -> (tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the two matrices make of the input."""
        return cast(Tensor, x + self.down(torch.tanh(self.up(x))))


def build(request: Request, device: torch.device) -> nn.Sequential:
    """Build the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(request.width) for _ in range(request.layers))).to(device)


class GatheredMuon(torch.optim.Optimizer):
    """Muon over DTensors of FSDP2: momentum on shards; every rank gathers and iterates every matrix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, torch.optim.Muon([nn.Parameter(torch.ones(1, 1))], lr=_LR).defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix; collective."""
        for group in self.param_groups:
            for param in group["params"]:
                if "momentum" not in self.state[param]:
                    self.state[param]["momentum"] = torch.zeros_like(param.grad)
                buffer = self.state[param]["momentum"]
                buffer.lerp_(param.grad, 1 - group["momentum"])
                operand = param.grad.lerp(buffer, group["momentum"]).bfloat16().full_tensor()
                whole = _zeropower_via_newtonschulz(operand, group["ns_coefficients"], group["ns_steps"], group["eps"])
                update = DTensor.from_local(whole, param.device_mesh).redistribute(placements=param.placements)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], param.shape))


def _ours(kind: type[torch.optim.Optimizer], model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    wrapped = fully_shard_model(model, mesh, dp_shard_dim="dp", fsdp_unit_modules=[Block])
    return wrapped, fully_shard_optimizer(kind(wrapped.parameters(), lr=_LR))  # type: ignore[call-arg]


def _fsdp2(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    for block in cast(nn.Sequential, model):
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model, GatheredMuon(model.parameters())


CONTENDERS: dict[str, Callable[[nn.Module, DeviceMesh], tuple[nn.Module, Any]]] = {
    "ours, Muon": lambda model, mesh: _ours(torch.optim.Muon, model, mesh),
    "FSDP2, gathered Muon": _fsdp2,
    "ours, AdamW": lambda model, mesh: _ours(torch.optim.AdamW, model, mesh),
}


@dataclass(frozen=True)
class Reading:
    """Seconds of whole steps and of the optimizer's part, medians; and the losses of this rank."""

    step_s: float
    optimizer_s: float
    losses: list[float]


def measure(request: Request, device: torch.device, mesh: DeviceMesh) -> dict[str, Reading]:
    """Train all contenders in turn, so that what else the machine does meets them alike."""
    made = {name: make(build(request, device), mesh) for name, make in CONTENDERS.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    losses: dict[str, list[float]] = {name: [] for name in made}
    for step in range(request.warmup + request.steps):
        torch.manual_seed(1000 * step + mesh.get_local_rank())
        batch = torch.randn(request.tokens, request.width, device=device)
        for name, (model, optimizer) in made.items():
            begin = _now(device)
            loss = model(batch).square().mean()
            loss.backward()
            middle = _now(device)
            optimizer.step()
            optimizer.zero_grad()
            end = _now(device)
            losses[name].append(loss.item())
            if step >= request.warmup:
                seconds[name].append((end - begin, end - middle))
    return {
        name: Reading(*(statistics.median(column) for column in zip(*taken, strict=True)), losses[name])
        for name, taken in seconds.items()
    }


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write a document where a file is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("layers", 8), ("tokens", 256), ("steps", 6), ("warmup", 2), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="write a document as JSON, too")
    given = parser.parse_args(arguments)
    request = Request(given.width, given.layers, given.tokens, given.steps, given.warmup, given.device)
    readings = measure_on_ranks(measure, request, given.ranks, device_type=given.device)[0]
    machine = describe_machine(given.device, given.ranks)
    print(", ".join(machine.values()))
    print(f"{'':24}{'step':>10}{'optimizer':>12}")
    for name, reading in readings.items():
        print(f"{name:24}{1e3 * reading.step_s:7.1f} ms{1e3 * reading.optimizer_s:9.1f} ms")
    ours, gathered, _ = (reading.losses[-1] for reading in readings.values())
    print(f"the last losses of the two Muons differ by {100 * abs(ours / gathered - 1):.3f} %")
    results = {name: asdict(reading) for name, reading in readings.items()}
    document = {"request": asdict(request), "ranks": given.ranks, "machine": machine, "results": results}
    write_document(document, given.output)


if __name__ == "__main__":
    main()
