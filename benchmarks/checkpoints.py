"""Compare saving and loading with plain `dcp.save` and `dcp.load` of FSDP2: `python benchmarks/checkpoints.py -h`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from benchmarks.launching import describe_machine, measure_on_ranks, write_document
from benchmarks.page import checkpoint_table
from benchmarks.worker import turns
from benchmarks.workloads import WORKLOADS, Microbatch, make_batch
from megatron_fsdp.checkpoint import Checkpointer

OURS_NOW = "ours"
OURS_BACKGROUND = "ours, in the background"
PEER = "fsdp2, dcp"
SAVERS = (OURS_NOW, OURS_BACKGROUND, PEER)
EXIT_DISAGREEMENT = 1
_ITERATION = 1


# ---- who saves and loads ---------------------------------------------------------------------------------------------


class Saver(ABC):
    """One way to save a trained model with its optimizer, and to load it again.

    Attributes:
        job: Model and optimizer.
        folder: Where to save; all ranks share it.
    """

    def __init__(self, job: Contender, folder: Path) -> None:
        self.job = job
        self.folder = folder

    @abstractmethod
    def save(self) -> None:
        """Save; returns when training may go on."""

    @abstractmethod
    def load(self) -> None:
        """Load what was saved."""

    def finish(self) -> None:  # noqa: B027  most have nothing to finish
        """Wait until what was saved is on the disk."""

    def close(self) -> None:  # noqa: B027
        """Let go of what is kept between saves."""


class OursSaver(Saver):
    """`Checkpointer`, which verifies, publishes and prunes."""

    def __init__(self, job: Contender, folder: Path, in_background: bool = False) -> None:
        super().__init__(job, folder)
        self._checkpoints = Checkpointer(folder, in_background=in_background)

    def save(self) -> None:
        """As `Saver` says."""
        self._checkpoints.save(_ITERATION, self.job.model, self.job.optimizer, overwrite=True)

    def finish(self) -> None:
        """As `Saver` says."""
        self._checkpoints.wait()

    def load(self) -> None:
        """As `Saver` says."""
        report = self._checkpoints.load(self.job.model, self.job.optimizer)
        assert report.is_complete

    def close(self) -> None:
        """As `Saver` says."""
        self._checkpoints.close()


class NamedSaver(Saver):
    """torch's `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`: what its documentation tells to do."""

    def save(self) -> None:
        """As `Saver` says."""
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder)

    def load(self) -> None:
        """As `Saver` says."""
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.job.model, self.job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def build_savers(names: list[str], setting: Setting, batch: Microbatch, folder: Path) -> dict[str, Saver]:
    """Train one job of this library and one of FSDP2 for a step, and make every way to save them; collective."""
    ours, theirs = (_trained(name, setting, batch) for name in (OURS[3], FSDP2))
    makers = {
        OURS_NOW: lambda where: OursSaver(ours, where),
        OURS_BACKGROUND: lambda where: OursSaver(ours, where, in_background=True),
        PEER: lambda where: NamedSaver(theirs, where),
    }
    return {name: makers[name](folder / str(position)) for position, name in enumerate(names)}


def _trained(name: str, setting: Setting, batch: Microbatch) -> Contender:
    job = build_contender(name, setting)
    job.step([batch])
    return job


def local_values(job: Contender) -> dict[str, Tensor]:
    """Return this rank's elements of every weight and optimizer state; the live ones."""
    found = {}
    names = {id(param): name for name, param in job.model.named_parameters()}
    for name, value in job.model.state_dict().items():
        if isinstance(value, Tensor):
            found[f"model.{name}"] = _local(value)
    for param, slots in job.optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{names[id(param)]}.{slot}"] = _local(value)
    return found


def _local(value: Tensor) -> Tensor:
    return (value._local_tensor if isinstance(value, DTensor) else value).detach()


def forget(saver: Saver) -> None:
    """Make weights and optimizer state such that a load has to bring them back."""
    with torch.no_grad():
        for value in local_values(saver.job).values():
            value.fill_(torch.nan)
    saver.job.optimizer.state.clear()


def differences(job: Contender, expected: dict[str, Tensor]) -> list[str]:
    """Keys whose bits are not as expected."""
    found = local_values(job)
    wrong = sorted(found.keys() ^ expected.keys())
    return wrong + [key for key in found.keys() & expected.keys() if not torch.equal(found[key], expected[key])]


# ---- in the rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        model: Name of a workload.
        ranks: Number of processes.
        rounds: Measured saves and loads of everybody.
        savers: Names, in table order.
        folder: Where to save.
    """

    model: str
    ranks: int
    rounds: int
    savers: tuple[str, ...]
    folder: Path


@dataclass
class Act:
    """What one rank measured of saving, or of loading.

    Attributes:
        wall_s: Per round, until control returns.
        cpu_s: Per round, of all threads of the process.
        counts: Of one act.
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


@dataclass
class Reading:
    """What one rank measured of one way.

    Attributes:
        payload_bytes: Of this rank's weights and optimizer state.
        save: Saving.
        load: Loading.
        problems: Keys that did not come back bit for bit.
    """

    payload_bytes: int
    save: Act = field(default_factory=Act)
    load: Act = field(default_factory=Act)
    problems: list[str] = field(default_factory=list)


def measure_here(request: Request, device: torch.device, mesh: DeviceMesh) -> dict[str, Reading]:
    """Measure on this rank; collective."""
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # of the round before, to be replaced
    setting = Setting(WORKLOADS[request.model], torch.float32, device, mesh)
    batch = make_batch(setting.workload, device, dist.get_rank())
    savers = build_savers(list(request.savers), setting, batch, request.folder)
    readings = {name: _prepare(saver) for name, saver in savers.items()}
    for turn in range(request.rounds):
        for position in turns(len(savers), turn):
            name = request.savers[position]
            _timed(readings[name].save, savers[name].save, savers[name].finish)
            forget(savers[name])
            _timed(readings[name].load, savers[name].load)
    for saver in savers.values():
        saver.close()
    return readings


def _prepare(saver: Saver) -> Reading:
    """Compare values and count; this save and this load are not timed."""
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


def _timed(note: Act, act: Callable[[], None], finish: Callable[[], None] | None = None) -> None:
    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    act()
    note.wall_s.append(time.perf_counter() - wall_s)
    note.cpu_s.append(time.process_time() - cpu_s)
    if finish is not None:
        finish()


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> tuple[Request, Path | None]:
    """Read the arguments; returns what to run and the file for the results."""
    parser = argparse.ArgumentParser(prog="checkpoints.py", description=__doc__)
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, choices=range(1, 9), default=2)
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=5, metavar="N", help="1 to 100")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    given = parser.parse_args(argv)
    return Request(given.model, given.ranks, given.rounds, SAVERS, Path()), given.out


def measure(request: Request, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Start the ranks, wait for them, and return what they measured, as data for programs."""
    with tempfile.TemporaryDirectory() as folder:
        asked = replace(request, folder=Path(folder) / "saved")
        everyone: list[dict[str, Reading]] = measure_on_ranks(measure_here, asked, request.ranks, threads=1)
    facts = describe_machine("cpu", request.ranks) | {"command": f"python benchmarks/checkpoints.py {' '.join(argv)}"}
    told = {name: [asdict(readings[name]) for readings in everyone] for name in request.savers}
    asked_for = {"model": request.model, "ranks": request.ranks}
    return {"what": "checkpoints", "facts": facts, "request": asked_for, "readings": told}


def main(argv: Sequence[str]) -> int:
    """Run, print a table, and write the results where asked; returns the exit code."""
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
