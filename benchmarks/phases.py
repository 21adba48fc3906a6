"""Times of single phases beside FSDP2's: `python benchmarks/phases.py --help`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.contenders import FLOOR, FSDP2, OURS, Contender, Setting, build_contender
from benchmarks.launching import describe_machine, measure_on_ranks, write_document
from benchmarks.page import phase_table
from benchmarks.report import Spread
from benchmarks.worker import finish_queued_work, live_bytes, turns
from benchmarks.workloads import WORKLOADS, Microbatch, build_model, loss_of, make_batch
from megatron_fsdp import MegatronFSDP

_MAX_NORM = 1.0
OPTIMIZER_STEP, CLIPPING = "optimizer.step", "clip_grad_norm_"
WRAPPING, FIRST_STEP = "wrapping", "first step"
FORWARD, BACKWARD, STEP = "forward", "backward", "whole step"


@dataclass(frozen=True)
class PhaseRequest:
    """What to measure.

    Attributes:
        model: Name of a workload.
        ranks: Processes; 1 for a host's time.
        rounds: Turns of everybody, at least 1.
        warmup: Turns before them.
        contenders: The first is who the others are set against.
        what: "step" (optimizer and clipping), "start" (wrapping and first step), or "host" (forward and backward).
        simulated_ranks: The size of the job that one process pretends to be the first rank of; 0: none.
        device_type: "cpu" or "cuda".
        dtype: Of weights, gradients and optimizer state, "float32" or "bfloat16".
    """

    model: str
    ranks: int
    rounds: int
    warmup: int
    contenders: tuple[str, ...]
    what: str
    simulated_ranks: int = 0
    device_type: str = "cpu"
    dtype: str = "float32"


@dataclass
class PhaseNotes:
    """Seconds per turn of one contender on one rank, by phase.

    Attributes:
        wall_s: By the clock.
        cpu_s: Of all threads of the process.
        peak: Live bytes at the peak of a step; 0 where it was not asked.
    """

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    peak: int = 0

    def add(self, phase: str, wall_s: float, cpu_s: float) -> None:
        """Note one turn."""
        self.wall_s.setdefault(phase, []).append(wall_s)
        self.cpu_s.setdefault(phase, []).append(cpu_s)


@dataclass(frozen=True)
class PhaseRow:
    """One phase of one contender.

    Attributes:
        phase: Such as "optimizer.step".
        name: The contender.
        wall_s: Of the slowest rank.
        cpu_s: Mean of the ranks.
        wall_over: Over that of the contender that was named first, in the same turn.
        cpu_over: The same for CPU time.
        peak: Live bytes at the peak; 0 where it was not asked.
    """

    phase: str
    name: str
    wall_s: Spread
    cpu_s: Spread
    wall_over: Spread
    cpu_over: Spread
    peak: int


def phase_rows(request: PhaseRequest, notes: Mapping[str, Sequence[PhaseNotes]]) -> list[PhaseRow]:
    """Make one row per phase and contender.

    Args:
        request: For the order.
        notes: By contender, one entry per rank.
    """
    first = request.contenders[0]
    rows = []
    for phase in notes[first][0].wall_s:
        walls = {name: [max(turn) for turn in _turns(ranks, "wall_s", phase)] for name, ranks in notes.items()}
        cpus = {
            name: [sum(turn) / len(turn) for turn in _turns(ranks, "cpu_s", phase)] for name, ranks in notes.items()
        }
        rows += [
            PhaseRow(
                phase,
                name,
                Spread.of(walls[name]),
                Spread.of(cpus[name]),
                Spread.of(_over(walls[name], walls[first])),
                Spread.of(_over(cpus[name], cpus[first])),
                max(rank.peak for rank in notes[name]),
            )
            for name in request.contenders
        ]
    return rows


def host_microseconds_by_pass(rows: Sequence[PhaseRow], floor: str, units: int) -> dict[str, dict[str, float]]:
    """Return the CPU time per unit that each contender adds to the bare model, in microseconds, by pass and contender.

    Args:
        rows: With the phases "forward" and "backward".
        floor: The contender that is the bare model.
        units: Of the model, the root left out.
    """
    found = {}
    for phase in {row.phase for row in rows}:
        medians = {row.name: row.cpu_s.median for row in rows if row.phase == phase}
        found[phase] = {
            name: (seconds - medians[floor]) / units * 1e6 for name, seconds in medians.items() if name != floor
        }
    return found


def _turns(ranks: Sequence[PhaseNotes], kind: str, phase: str) -> list[tuple[float, ...]]:
    return list(zip(*(getattr(rank, kind)[phase] for rank in ranks), strict=True))


def _over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


Notes = dict[str, PhaseNotes]


# ---- in the rank -----------------------------------------------------------------------------------------------------


def measure_here(request: PhaseRequest, device: torch.device, mesh: DeviceMesh) -> Notes:
    """Measure on this rank; collective."""
    dtype = getattr(torch, request.dtype)
    setting = Setting(WORKLOADS[request.model], dtype, device, mesh, comm_dtype=dtype)
    return _MEASURED[request.what](request, setting)


def steps(request: PhaseRequest, setting: Setting) -> Notes:
    """Clipping and the optimizer's step, after a backward that is not timed."""
    batch = _batch(setting)
    contenders = {name: build_contender(name, setting) for name in request.contenders}
    notes = {name: PhaseNotes() for name in contenders}

    def turn(name: str, noted: PhaseNotes) -> None:
        contender = contenders[name]
        contender.backward([batch])
        _timed(noted, CLIPPING, lambda: _clip(contender), setting.device)
        _timed(noted, OPTIMIZER_STEP, contender.optimizer.step, setting.device)
        contender.optimizer.zero_grad()

    _rounds(request, notes, turn)
    return notes


def starts(request: PhaseRequest, setting: Setting) -> Notes:
    """Wrapping a model that is there, and the first step, with a new model each time."""
    batch = _batch(setting)
    notes = {name: PhaseNotes() for name in request.contenders}

    def turn(name: str, noted: PhaseNotes) -> None:
        model = build_model(setting.workload, setting.dtype, setting.device)
        built = partial(build_contender, name, setting, model)
        contender: Contender = _timed(noted, WRAPPING, built, setting.device)
        _timed(noted, FIRST_STEP, partial(contender.step, [batch]), setting.device)
        del model, built, contender  # what they hold must not count for the next one
        gc.collect()

    _rounds(request, notes, turn)
    return notes


def host(request: PhaseRequest, setting: Setting) -> Notes:
    """Forward and backward of each, and what is alive at the peak of a step."""
    batch = _batch(setting)
    notes = {name: PhaseNotes() for name in request.contenders}
    peaks = {}
    if request.simulated_ranks:
        for name in request.contenders:
            peaks[name] = live_bytes(name, setting, [batch]).peak
            gc.collect()
    contenders = {name: build_contender(name, setting) for name in request.contenders}

    def turn(name: str, noted: PhaseNotes) -> None:
        contender = contenders[name]
        loss = _timed(noted, FORWARD, lambda: loss_of(contender.model, batch), setting.device)
        _timed(noted, BACKWARD, loss.backward, setting.device)
        contender.optimizer.step()
        contender.optimizer.zero_grad()

    _rounds(request, notes, turn)
    for name, peak in peaks.items():
        notes[name].peak = peak
    return notes


_MEASURED: Mapping[str, Callable[[PhaseRequest, Setting], Notes]] = {"step": steps, "start": starts, "host": host}


def _rounds(request: PhaseRequest, notes: Notes, turn: Callable[[str, PhaseNotes], None]) -> None:
    names = list(notes)
    for index in range(request.warmup + request.rounds):
        for position in turns(len(names), index):
            turn(names[position], notes[names[position]] if index >= request.warmup else PhaseNotes())


def _timed(noted: PhaseNotes, phase: str, act: Callable[[], Any], device: torch.device) -> Any:
    """CPU time is the host's until it has asked for everything, wall time until the device has done it."""
    finish_queued_work(device)
    if dist.get_backend() != "fake":
        dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = act()
    cpu_s = time.process_time() - cpu_s
    finish_queued_work(device)
    noted.add(phase, time.perf_counter() - wall_s, cpu_s)
    return found


def _clip(contender: Contender) -> float:
    """Clip as each one's users do, and have the norm as a number."""
    if isinstance(contender.model, MegatronFSDP):
        return contender.model.clip_grad_norm_(_MAX_NORM).item()
    norm = nn.utils.clip_grad_norm_(contender.model.parameters(), _MAX_NORM)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _batch(setting: Setting) -> Microbatch:
    return make_batch(setting.workload, setting.device, dist.get_rank())


# ---- the command -----------------------------------------------------------------------------------------------------


def measure(request: PhaseRequest) -> dict[str, Any]:
    """Start the ranks and return what they measured, as data for programs; times in seconds."""
    everyone: list[Notes] = measure_on_ranks(
        measure_here,
        request,
        request.ranks,
        threads=1,
        device_type=request.device_type,
        simulated_ranks=request.simulated_ranks,
    )
    rows = phase_rows(request, {name: [notes[name] for notes in everyone] for name in request.contenders})
    facts = describe_machine(request.device_type, request.ranks)
    found: dict[str, Any] = {"facts": facts, "request": asdict(request), "rows": [asdict(row) for row in rows]}
    if request.what == "host":
        found["host_us_by_pass"] = host_microseconds_by_pass(rows, FLOOR, WORKLOADS[request.model].layers)
    return found


def main(argv: Sequence[str]) -> int:
    """Measure what was asked for, print a table, and write the results where asked."""
    parser = argparse.ArgumentParser(prog="phases.py", description="Measure single phases beside FSDP2's.")
    parser.add_argument("what", choices=tuple(_MEASURED))
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--simulated-ranks", type=int, default=0, metavar="N", help="be the first of N ranks instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all that is stored")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    given = parser.parse_args(argv)
    request = PhaseRequest(
        given.model,
        1 if given.simulated_ranks else given.ranks,
        given.rounds,
        0 if given.what == "start" else given.warmup,
        (FLOOR, FSDP2, OURS[3]) if given.what == "host" else (FSDP2, OURS[3]),
        given.what,
        given.simulated_ranks,
        given.device,
        given.dtype,
    )
    found = measure(request)
    print(phase_table({given.what: found}))
    write_document(found, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
