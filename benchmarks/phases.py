"""Times of single phases beside FSDP2's: `python benchmarks/phases.py --help`."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.contenders import FLOOR, FSDP2, FSDP2_MUON, OUR_MUON, OURS, Contender, Setting, build_contender
from benchmarks.launching import describe_machine, measure_on_ranks, timed, write_document
from benchmarks.page import phase_table
from benchmarks.report import ratios, spread_of
from benchmarks.worker import live_bytes, live_host_bytes, turns
from benchmarks.workloads import WORKLOADS, Microbatch, build_model, loss_of, make_batch
from megatron_fsdp import MegatronFSDP
from megatron_fsdp.weights import WeightSource
from megatron_fsdp.weights.source import digest_of

_MAX_NORM = 1.0
_WIRE = torch.bfloat16
OPTIMIZER_STEP, CLIPPING = "optimizer.step", "clip_grad_norm_"
WRAPPING, FIRST_STEP = "wrapping", "first step"
FORWARD, BACKWARD, STEP = "forward", "backward", "whole step"
PASS = "pass of whole weights"
FULL_TENSOR, FULL_STATE = "fsdp2, full_tensor()", "fsdp2, full state dict"
OUR_PASS, OUR_PASS_TO_ONE = "ours-3, to all ranks", "ours-3, to one rank"
PASSES = (FULL_TENSOR, FULL_STATE, OUR_PASS, OUR_PASS_TO_ONE)


@dataclass(frozen=True)
class PhaseRequest:
    """The arguments of a measurement."""

    model: str
    ranks: int  # processes; 1 for a host's time
    rounds: int  # turns of everybody, at least 1
    warmup: int  # turns before them
    contenders: tuple[str, ...]  # the first is who the others are set against
    # "step" (optimizer and clipping), "start" (wrapping and first step), "host" (forward and backward), or "weights"
    what: str
    simulated_ranks: int = 0  # the size of the job that one process pretends to be the first rank of; 0: none
    device_type: str = "cpu"  # "cpu" or "cuda"
    dtype: str = "float32"  # of weights, gradients and optimizer state, "float32" or "bfloat16"


@dataclass
class PhaseNotes:
    """Seconds per turn of one contender on one rank, by phase."""

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)  # of all threads of the process
    peak: int = 0  # live bytes at the peak of a step; 0 where it was not asked


def phase_rows(names: Sequence[str], notes: Mapping[str, Sequence[PhaseNotes]]) -> list[dict[str, Any]]:
    """Make a row per phase and contender, by the order of names; ratios within a turn are to the first of them.

    Wall time is that of the slowest rank, CPU time the mean of all.
    """
    rows = []
    for phase in notes[names[0]][0].wall_s:
        walls = {name: list(map(max, _turns(ranks, "wall_s", phase))) for name, ranks in notes.items()}
        cpus = {name: list(map(mean, _turns(ranks, "cpu_s", phase))) for name, ranks in notes.items()}
        rows += [
            {
                "phase": phase,
                "name": name,
                "wall_s": spread_of(walls[name]),
                "cpu_s": spread_of(cpus[name]),
                "wall_over": spread_of(ratios(walls[name], walls[names[0]])),
                "cpu_over": spread_of(ratios(cpus[name], cpus[names[0]])),
                "peak": max(rank.peak for rank in notes[name]),
            }
            for name in names
        ]
    return rows


def host_microseconds_by_pass(rows: Sequence[Mapping[str, Any]], units: int) -> dict[str, dict[str, float]]:
    """Return the CPU time per unit that each contender adds to the floor, in microseconds, by pass and contender."""
    found = {}
    for phase in {row["phase"] for row in rows}:
        medians = {row["name"]: row["cpu_s"]["median"] for row in rows if row["phase"] == phase}
        bare = medians.pop(FLOOR)
        found[phase] = {name: (seconds - bare) / units * 1e6 for name, seconds in medians.items()}
    return found


def _turns(ranks: Sequence[PhaseNotes], kind: str, phase: str) -> list[tuple[float, ...]]:
    return list(zip(*(getattr(rank, kind)[phase] for rank in ranks), strict=True))


Notes = dict[str, PhaseNotes]


# ---- in the rank -----------------------------------------------------------------------------------------------------


def measure_here(request: PhaseRequest, device: torch.device, mesh: DeviceMesh) -> Notes:
    """Measure on this rank; collective."""
    dtype = getattr(torch, request.dtype)
    setting = Setting(WORKLOADS[request.model], dtype, device, mesh, comm_dtype=dtype)
    return _MEASURED[request.what](request, setting)


def steps(request: PhaseRequest, setting: Setting) -> Notes:
    """Measure clipping and the optimizer's step, alone and in a whole step."""
    batch = _batch(setting)
    contenders = {name: build_contender(name, setting) for name in request.contenders}
    notes = {name: PhaseNotes() for name in contenders}

    def turn(name: str, noted: PhaseNotes) -> None:
        contender = contenders[name]
        _timed(noted, STEP, partial(contender.backward, [batch]), setting.device)
        _timed(noted, CLIPPING, lambda: _clip(contender), setting.device)
        _timed(noted, OPTIMIZER_STEP, contender.optimizer.step, setting.device)
        for seconds in (noted.wall_s, noted.cpu_s):
            seconds[STEP][-1] += seconds[CLIPPING][-1] + seconds[OPTIMIZER_STEP][-1]
        contender.optimizer.zero_grad()

    _rounds(request, notes, turn)
    return notes


def starts(request: PhaseRequest, setting: Setting) -> Notes:
    """Measure wrapping and the first step, with a new model each time."""
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
    """Measure the host time of forward and backward, and the memory at a step's peak."""
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


def weights(request: PhaseRequest, setting: Setting) -> Notes:
    """Measure a pass over all weights in bfloat16, and its peak beside the model, once bits are compared."""
    ours, theirs = (build_contender(name, setting).model for name in (OURS[3], FSDP2))
    sources = {
        name: WeightSource(ours, dtype=_WIRE, names="model", destination=destination)
        for name, destination in ((OUR_PASS, "all"), (OUR_PASS_TO_ONE, 0))
    }
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    passes: dict[str, Callable[[], Iterable[tuple[str, Tensor | None]]]] = {
        FULL_TENSOR: lambda: ((name, _whole(param).to(_WIRE)) for name, param in theirs.named_parameters()),
        FULL_STATE: lambda: (
            (name, value.to(_WIRE))
            for name, value in get_model_state_dict(theirs, options=whole).items()
            if isinstance(value, Tensor)
        ),
        **{name: partial(iter, source) for name, source in sources.items()},
    }
    notes = {name: PhaseNotes() for name in passes}
    found = {name: _digests(each()) for name, each in passes.items()}
    for name, digests in found.items():
        if any(digests[key] != found[FULL_TENSOR][key] for key in digests):
            raise AssertionError(f"{name} gives other weights than {FULL_TENSOR}")
        notes[name].peak = live_host_bytes(lambda: passes, partial(_exhaust_one, name)).peak
    _rounds(request, notes, lambda name, noted: _timed(noted, PASS, lambda: _exhaust(passes[name]()), setting.device))
    return notes


def _whole(param: Tensor) -> Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def _exhaust_one(name: str, passes: Mapping[str, Callable[[], Iterable[tuple[str, Tensor | None]]]]) -> None:
    _exhaust(passes[name]())


def _exhaust(tensors: Iterable[tuple[str, Tensor | None]]) -> None:
    for _, tensor in tensors:
        del tensor


def _digests(tensors: Iterable[tuple[str, Tensor | None]]) -> dict[str, str]:
    return {name: digest_of(tensor) for name, tensor in tensors if tensor is not None}


_MEASURED: Mapping[str, Callable[[PhaseRequest, Setting], Notes]] = {
    "step": steps,
    "start": starts,
    "host": host,
    "weights": weights,
}


def _rounds(request: PhaseRequest, notes: Notes, turn: Callable[[str, PhaseNotes], None]) -> None:
    names = list(notes)
    for index in range(request.warmup + request.rounds):
        for position in turns(len(names), index):
            turn(names[position], notes[names[position]] if index >= request.warmup else PhaseNotes())


def _timed(noted: PhaseNotes, phase: str, act: Callable[[], Any], device: torch.device) -> Any:
    found, wall_s, cpu_s = timed(act, device)
    noted.wall_s.setdefault(phase, []).append(wall_s)
    noted.cpu_s.setdefault(phase, []).append(cpu_s)
    return found


def _clip(contender: Contender) -> float:
    """Clip as each contender's users do; return the norm as a number."""
    if isinstance(contender.model, MegatronFSDP):
        return contender.model.clip_grad_norm_(_MAX_NORM).item()
    norm = nn.utils.clip_grad_norm_(contender.model.parameters(), _MAX_NORM)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _batch(setting: Setting) -> Microbatch:
    return make_batch(setting.workload, setting.device, dist.get_rank())


# ---- the command -----------------------------------------------------------------------------------------------------


def measure(request: PhaseRequest) -> dict[str, Any]:
    """Start the ranks and return their measurements as plain values; times in seconds."""
    everyone: list[Notes] = measure_on_ranks(
        measure_here,
        request,
        request.ranks,
        threads=1,
        device_type=request.device_type,
        simulated_ranks=request.simulated_ranks,
    )
    rows = phase_rows(request.contenders, {name: [notes[name] for notes in everyone] for name in request.contenders})
    facts = describe_machine(request.device_type, request.ranks)
    found: dict[str, Any] = {"facts": facts, "request": asdict(request), "rows": rows}
    if request.what == "host":
        found["host_us_by_pass"] = host_microseconds_by_pass(rows, WORKLOADS[request.model].layers)
    return found


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, and write the results if asked."""
    parser = argparse.ArgumentParser(prog="phases.py", description="Measure single phases beside FSDP2's.")
    parser.add_argument("what", choices=tuple(_MEASURED))
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--simulated-ranks", type=int, default=0, metavar="N", help="be the first of N ranks instead")
    parser.add_argument("--muon", action="store_true", help="Muon beside AdamW, with `step` or `start`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all that is stored")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    given = parser.parse_args(argv)
    if given.muon and given.what not in ("step", "start"):
        parser.error("--muon changes steps and starts; give it with one of them")
    contenders = (OUR_MUON, FSDP2_MUON, OURS[3], FSDP2) if given.muon else (FSDP2, OURS[3])
    if given.what == "host":
        contenders = (FLOOR, *contenders)
    request = PhaseRequest(
        given.model,
        1 if given.simulated_ranks else given.ranks,
        given.rounds,
        0 if given.what == "start" else given.warmup,
        PASSES if given.what == "weights" else contenders,
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
