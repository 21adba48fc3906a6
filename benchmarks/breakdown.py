"""Where the time of a step goes, from the engine's own trace: `python benchmarks/breakdown.py --help`."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contenders import OURS, Contender, Setting, build_contender
from benchmarks.launching import measure_on_ranks
from benchmarks.output import show
from benchmarks.workloads import WORKLOADS, make_batch
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.trace import Timeline, compare, trace


@dataclass(frozen=True)
class BreakdownRequest:
    """What to trace.

    Attributes:
        model: Name of a workload.
        ranks: Processes.
        rounds: Steps of each contender that are traced.
        warmup: Steps before them.
        contenders: Of this engine.
    """

    model: str
    ranks: int
    rounds: int
    warmup: int
    contenders: tuple[str, ...]


def run_rank(rank: int, request: BreakdownRequest, store_port: int, threads: int, answer: Path) -> None:
    """Train each contender alone, trace its last steps, and let the first rank write `{name: [timelines]}`."""
    torch.set_num_threads(threads)
    store = TCPStore("127.0.0.1", store_port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.ranks)
    mesh = init_device_mesh("cpu", (request.ranks,), mesh_dim_names=("dp",))
    setting = Setting(WORKLOADS[request.model], torch.float32, torch.device("cpu"), mesh)
    found: dict[str, list[Timeline]] = {}
    for name in request.contenders:
        timeline = _traced(request, build_contender(name, setting), setting)
        everyone: list[Any] = [None] * request.ranks
        dist.all_gather_object(everyone, timeline)
        found[name] = everyone
    if rank == 0:
        answer.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _traced(request: BreakdownRequest, contender: Contender, setting: Setting) -> Timeline:
    batch = make_batch(setting.workload, setting.device, dist.get_rank())
    for _ in range(request.warmup):
        contender.step([batch])
    assert isinstance(contender.model, MegatronFSDP)
    with trace(contender.model, steps=request.rounds) as recording:
        for _ in range(request.rounds):
            contender.step([batch])
    return recording.result()


def measure(request: BreakdownRequest) -> dict[str, Any]:
    """Trace and sum up; times in nanoseconds, means over steps and, for units, over ranks."""
    timelines: dict[str, list[Timeline]] = measure_on_ranks(run_rank, request, request.ranks)
    together = {name: asdict(compare(found)) for name, found in timelines.items()}
    return {"what": "breakdown", "request": asdict(request), "breakdown": together}


def main(argv: Sequence[str]) -> int:
    """Measure, print JSON, and write it where asked."""
    parser = argparse.ArgumentParser(prog="breakdown.py", description="Trace steps of this engine.")
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=OURS, default=[OURS[3]])
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    found = measure(BreakdownRequest(given.model, given.ranks, given.rounds, given.warmup, tuple(given.contenders)))
    show(found, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
