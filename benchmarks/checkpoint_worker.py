"""What each rank does: every way of saving saves and loads in turn; values first, then counts, memory and times."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from benchmarks.checkpoint_contenders import Saver, build_savers, differences, forget, local_values
from benchmarks.contenders import Setting
from benchmarks.counting import Counts, counting
from benchmarks.worker import turns
from benchmarks.workloads import WORKLOADS, make_batch


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        model: Name of a workload.
        ranks: Number of processes.
        rounds: Measured saves and loads of everybody.
        savers: Names, in table order.
        folder: Where to save.
        measures_memory: Whether to find out what tensors take, which costs a save and a load of everybody more.
    """

    model: str
    ranks: int
    rounds: int
    savers: tuple[str, ...]
    folder: Path
    measures_memory: bool = True


@dataclass
class Act:
    """What one rank measured of saving, or of loading.

    Attributes:
        wall_s: Per round, until control returns.
        cpu_s: Per round, of all threads of the process.
        counts: Of one act.
        tensor_bytes: The most that was allocated for tensors at a time by the calling thread, beyond what was before.
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    tensor_bytes: int = 0


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


def run_rank(rank: int, request: Request, store_port: int, answer: Path) -> None:
    """Join the ranks, measure, and let the first write a pickle of `{name: [reading of each rank]}`."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # of the round before, to be replaced
    store = TCPStore("127.0.0.1", store_port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.ranks)
    device = torch.device("cpu")
    mesh = init_device_mesh("cpu", (request.ranks,), mesh_dim_names=("dp",))
    setting = Setting(WORKLOADS[request.model], torch.float32, device, mesh)
    batch = make_batch(setting.workload, device, rank)
    savers = build_savers(list(request.savers), setting, batch, request.folder)
    readings = {name: _prepare(saver, request.measures_memory) for name, saver in savers.items()}
    for turn in range(request.rounds):
        for position in turns(len(savers), turn):
            name = request.savers[position]
            _timed(readings[name].save, savers[name].save, savers[name].finish)
            forget(savers[name])
            _timed(readings[name].load, savers[name].load)
    for saver in savers.values():
        saver.close()
    everyone: list[dict[str, Reading]] = [{} for _ in range(request.ranks)]
    dist.all_gather_object(everyone, readings)
    if rank == 0:
        answer.write_bytes(pickle.dumps({name: [one[name] for one in everyone] for name in request.savers}))
    dist.barrier()  # nobody leaves while a peer still needs the connection
    dist.destroy_process_group()


def _prepare(saver: Saver, measures_memory: bool) -> Reading:
    """Compare values, count, and measure memory; these saves and loads are not timed."""
    expected = {key: value.clone() for key, value in local_values(saver.job).items()}
    reading = Reading(sum(value.nbytes for value in expected.values()))
    measures = (_tensor_peak, _counted) if measures_memory else (_counted,)
    for act, note in ((saver.save, reading.save), (saver.load, reading.load)):
        for measure in measures:  # memory first: what is kept for the next save counts
            if act == saver.load:
                forget(saver)
            dist.barrier()
            measure(note, act, saver.finish)
    reading.problems = differences(saver.job, expected)
    return reading


def _counted(note: Act, act: Callable[[], None], finish: Callable[[], None]) -> None:
    with counting() as note.counts:
        act()
        finish()


def _tensor_peak(note: Act, act: Callable[[], None], finish: Callable[[], None]) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    finish()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    held = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            note.tensor_bytes = max(note.tensor_bytes, held)


def _timed(note: Act, act: Callable[[], None], finish: Callable[[], None] | None = None) -> None:
    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    act()
    note.wall_s.append(time.perf_counter() - wall_s)
    note.cpu_s.append(time.process_time() - cpu_s)
    if finish is not None:
        finish()
