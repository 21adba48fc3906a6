"""What each rank does to measure phases: the contenders take turns within one phase, values are checked elsewhere."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.contenders import Contender, Setting, build_contender
from benchmarks.phase_readings import PhaseNotes, PhaseRequest
from benchmarks.worker import finish_queued_work, live_bytes, turns
from benchmarks.workloads import WORKLOADS, Microbatch, build_model, loss_of, make_batch
from megatron_fsdp import MegatronFSDP

_MAX_NORM = 1.0
OPTIMIZER_STEP, CLIPPING = "optimizer.step", "clip_grad_norm_"
WRAPPING, FIRST_STEP = "wrapping", "first step"
FORWARD, BACKWARD, STEP = "forward", "backward", "whole step"

Notes = dict[str, PhaseNotes]


def run_rank(rank: int, request: PhaseRequest, store_port: int, threads: int, answer: Path) -> None:
    """Join the ranks, or pretend to be the first of many, measure, and let the first write `{name: [per rank]}`."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # what simulated ranks receive is whatever lies in memory
    device = torch.device(request.device_type, rank) if request.device_type != "cpu" else torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
        torch.empty(0, device=device)  # a mesh of more ranks than devices is taken only from a device in use
    if request.simulated_ranks:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.simulated_ranks)
    else:
        store = TCPStore("127.0.0.1", store_port)
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=request.ranks)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    kernels, dtype = cast(Any, request.optimizer), getattr(torch, request.dtype)
    setting = Setting(WORKLOADS[request.model], dtype, device, mesh, comm_dtype=dtype, step_kernels=kernels)
    notes = _MEASURED[request.what](request, setting)
    everyone: list[Notes] = [notes]
    if not request.simulated_ranks:
        everyone = [{} for _ in range(request.ranks)]
        dist.all_gather_object(everyone, notes)
    if rank == 0:
        together = {name: [one[name] for one in everyone] for name in request.contenders}
        answer.write_bytes(pickle.dumps(together))
    if not request.simulated_ranks:
        dist.barrier()
    dist.destroy_process_group()


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
