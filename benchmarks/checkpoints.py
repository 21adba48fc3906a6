"""Compare saving and loading with plain `dcp.save` and `dcp.load` of FSDP2: `python benchmarks/checkpoints.py -h`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.contenders import FSDP2, OURS, Contender, Setting, build_contender
from benchmarks.counting import Counts, counting
from benchmarks.launching import describe_machine, measure_on_ranks, timed, write_document
from benchmarks.page import checkpoint_table
from benchmarks.worker import turns
from benchmarks.workloads import WORKLOADS, Microbatch, make_batch
from megatron_fsdp.checkpoint import Checkpointer

OURS_NOW = "ours"
OURS_BACKGROUND = "ours, in the background"
PEER = "fsdp2, dcp"
EXIT_DISAGREEMENT = 1
_ITERATION = 1


# ---- who saves and loads ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saver:
    """One way to save a trained model with its optimizer, and to load it again."""

    job: Contender
    optimizer: torch.optim.Optimizer
    save: Callable[[], object]  # returns when training may go on
    load: Callable[[], object]
    finish: Callable[[], object] = lambda: None  # waits until what was saved is on the disk
    close: Callable[[], object] = lambda: None  # lets go of what is kept between saves


def optimizer_of(job: Contender) -> torch.optim.Optimizer:
    """Return the optimizer of a job that has one."""
    assert isinstance(job.optimizer, torch.optim.Optimizer)
    return job.optimizer


def our_saver(job: Contender, folder: Path, *, in_background: bool) -> Saver:
    """Save with `Checkpointer`, which verifies, publishes and prunes."""
    checkpoints = Checkpointer(folder, in_background=in_background)

    optimizer = optimizer_of(job)

    def load() -> None:
        assert checkpoints.load(job.model, optimizer).is_complete

    save = partial(checkpoints.save, _ITERATION, job.model, optimizer, overwrite=True)
    return Saver(job, optimizer, save, load, checkpoints.wait, checkpoints.close)


def dcp_saver(job: Contender, folder: Path) -> Saver:
    """Save with torch's `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`, as its documentation does."""
    optimizer = optimizer_of(job)

    def state() -> dict[str, Any]:
        names = ("model", "optimizer")
        return dict(zip(names, get_state_dict(job.model, optimizer), strict=True))

    def load() -> None:
        found = state()
        dcp.load(found, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_state_dict(job.model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return Saver(job, optimizer, lambda: dcp.save(state(), checkpoint_id=folder), load)  # type: ignore[attr-defined]


def build_savers(setting: Setting, batch: Microbatch, folder: Path) -> dict[str, Saver]:
    """Train a job of this library and one of FSDP2 for a step, and make their savers. Collective."""
    ours, theirs = (_trained(name, setting, batch) for name in (OURS[3], FSDP2))
    return {
        OURS_NOW: our_saver(ours, folder / "now", in_background=False),
        OURS_BACKGROUND: our_saver(ours, folder / "background", in_background=True),
        PEER: dcp_saver(theirs, folder / "peer"),
    }


def _trained(name: str, setting: Setting, batch: Microbatch) -> Contender:
    job = build_contender(name, setting)
    job.step([batch])
    return job


def local_values(job: Contender) -> dict[str, Tensor]:
    """Return this rank's elements of every weight and optimizer state, without copies."""
    found = {}
    names = {id(param): name for name, param in job.model.named_parameters()}
    for name, value in job.model.state_dict().items():
        if isinstance(value, Tensor):
            found[f"model.{name}"] = _local(value)
    for param, slots in optimizer_of(job).state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{names[id(param)]}.{slot}"] = _local(value)
    return found


def _local(value: Tensor) -> Tensor:
    return (value._local_tensor if isinstance(value, DTensor) else value).detach()


def forget(saver: Saver) -> None:
    """Overwrite weights and optimizer state, so that a load has to restore them."""
    with torch.no_grad():
        for value in local_values(saver.job).values():
            value.fill_(torch.nan)
    saver.optimizer.state.clear()


def differences(job: Contender, expected: dict[str, Tensor]) -> list[str]:
    """Return the keys whose bits differ."""
    found = local_values(job)
    wrong = sorted(found.keys() ^ expected.keys())
    return wrong + [key for key in found.keys() & expected.keys() if not torch.equal(found[key], expected[key])]


# ---- in the rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The arguments of a measurement."""

    model: str
    ranks: int
    rounds: int  # measured saves and loads of everybody
    folder: Path


@dataclass
class Act:
    """One rank's measurements of saving, or of loading."""

    wall_s: list[float] = field(default_factory=list)  # per round, until control returns
    cpu_s: list[float] = field(default_factory=list)  # per round, of all threads of the process
    counts: Counts = field(default_factory=Counts)  # of one act


@dataclass
class Reading:
    """One rank's measurements of one saver."""

    payload_bytes: int  # of this rank's weights and optimizer state
    save: Act = field(default_factory=Act)
    load: Act = field(default_factory=Act)
    problems: list[str] = field(default_factory=list)  # keys that did not come back bit for bit


def measure_here(request: Request, device: torch.device, mesh: DeviceMesh) -> dict[str, Reading]:
    """Measure on this rank; collective."""
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # of the round before, to be replaced
    setting = Setting(WORKLOADS[request.model], torch.float32, device, mesh)
    batch = make_batch(setting.workload, device, dist.get_rank())
    savers = build_savers(setting, batch, request.folder)
    readings = {name: _prepare(saver) for name, saver in savers.items()}
    for turn in range(request.rounds):
        for name in (list(savers)[position] for position in turns(len(savers), turn)):
            _timed(readings[name].save, savers[name].save, savers[name].finish)
            forget(savers[name])
            _timed(readings[name].load, savers[name].load)
    for saver in savers.values():
        saver.close()
    return readings


def _prepare(saver: Saver) -> Reading:
    """Compare values and count files and collectives, without timing."""
    expected = {key: value.clone() for key, value in local_values(saver.job).items()}
    reading = Reading(sum(value.nbytes for value in expected.values()))
    for act, note in ((saver.save, reading.save), (saver.load, reading.load)):
        if act == saver.load:
            forget(saver)
        dist.barrier()
        with counting() as note.counts:
            act()
            saver.finish()
    reading.problems = differences(saver.job, expected)
    return reading


def _timed(note: Act, act: Callable[[], object], finish: Callable[[], object] = lambda: None) -> None:
    _, wall_s, cpu_s = timed(act, torch.device("cpu"))
    note.wall_s.append(wall_s)
    note.cpu_s.append(cpu_s)
    finish()


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> tuple[Request, Path | None]:
    """Parse the arguments; return the request and the file for the results."""
    parser = argparse.ArgumentParser(prog="checkpoints.py", description=__doc__)
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, choices=range(1, 9), default=2)
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=5, metavar="N", help="1 to 100")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    given = parser.parse_args(argv)
    return Request(given.model, given.ranks, given.rounds, Path()), given.out


def measure(request: Request, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Start the ranks, wait for them, and return their measurements as plain values."""
    with tempfile.TemporaryDirectory() as folder:
        asked = replace(request, folder=Path(folder) / "saved")
        everyone: list[dict[str, Reading]] = measure_on_ranks(measure_here, asked, request.ranks, threads=1)
    facts = describe_machine("cpu", request.ranks) | {"command": f"python benchmarks/checkpoints.py {' '.join(argv)}"}
    told = {name: [asdict(readings[name]) for readings in everyone] for name in everyone[0]}
    asked_for = {"model": request.model, "ranks": request.ranks}
    return {"what": "checkpoints", "facts": facts, "request": asked_for, "readings": told}


def main(argv: Sequence[str]) -> int:
    """Run, print a table, write the results if asked, and return the exit code."""
    request, file = parse(argv)
    found = measure(request, argv)
    wrong = {name: one["problems"][:3] for name, ranks in found["readings"].items() for one in ranks if one["problems"]}
    if wrong:
        print(f"no numbers, since values did not come back: {wrong}", file=sys.stderr)
        return EXIT_DISAGREEMENT
    print(checkpoint_table({request.model: found}))
    write_document(found, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
