"""The measurement on each rank: memory, the reference, then contenders in turns, step by step."""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import Contender, Setting, build_contender, make_optimizer
from benchmarks.counting import collectives_by_group
from benchmarks.launching import timed
from benchmarks.operators import Moved, MovedModel
from benchmarks.report import LiveBytes, RankReading, Request, RunReading
from benchmarks.workloads import WORKLOADS, Microbatch, build_model, loss_of, make_batch
from megatron_fsdp.comm.collectives import Traffic

_MEASURED_ACTS = 3
"""Steps whose highest peak counts: what the threads of gloo still hold differs a little."""


@dataclass
class _Notes:
    """The records of one contender while it runs."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    collectives: int = 0
    traffic: Traffic | None = None


def setting_of(request: Request, device: torch.device, mesh: DeviceMesh) -> Setting:
    """Return the common settings of a run's contenders on this rank."""
    return Setting(
        WORKLOADS[request.model],
        getattr(torch, request.dtype),
        device,
        mesh,
        request.bucket_mib,
        getattr(torch, request.comm_dtype),
    )


def measure_here(request: Request, device: torch.device, mesh: DeviceMesh) -> RunReading:
    """Measure on this rank; return the same on all ranks, but the reference on the first only. Collective."""
    setting, rank = setting_of(request, device, mesh), dist.get_rank()
    live, absent = _measure_memory(request, setting, rank)
    reference = reference_losses(request, setting) if rank == 0 else ()
    dist.barrier()  # the others leave the cores to the first rank
    contenders = [build_contender(name, setting) for name in live]
    notes = _take_turns(request, setting, contenders, rank)
    sent = [_sent(contender, note.traffic, request.steps) for contender, note in zip(contenders, notes, strict=True)]
    extra = microbatches_of(request, setting, 0, rank)
    moved = [_moved(contender, extra, setting) if request.measures_memory else None for contender in contenders]
    mine = {
        contender.name: RankReading(
            tuple(note.wall_s),
            tuple(note.cpu_s),
            tuple(loss.item() for loss in note.losses),
            live[contender.name],
            counted,
            note.collectives / request.steps,
            seen,
        )
        for contender, note, counted, seen in zip(contenders, notes, sent, moved, strict=True)
    }
    everyone: list[dict[str, RankReading]] = [{} for _ in range(request.ranks)]
    dist.all_gather_object(everyone, mine)
    return RunReading(
        sum(param.numel() for param in contenders[0].model.parameters()),
        reference,
        {name: tuple(one[name] for one in everyone) for name in live},
        absent,
    )


def _measure_memory(request: Request, setting: Setting, rank: int) -> tuple[dict[str, LiveBytes], dict[str, str]]:
    """Run each contender alone; return their memory, and the errors of those that failed."""
    if not request.measures_memory:
        return dict.fromkeys(request.contenders, LiveBytes(0, 0)), {}
    live, absent = dict[str, LiveBytes](), dict[str, str]()
    for name in request.contenders:
        problem, found = _tried(partial(live_bytes, name, setting, microbatches_of(request, setting, 0, rank)))
        gc.collect()  # a wrapped model is a cycle; its memory must not count for the next one
        if found is None:
            absent[name] = problem
        else:
            live[name] = found
    return live, absent


_Found = TypeVar("_Found")


def _tried(attempt: Callable[[], _Found]) -> tuple[str, _Found | None]:
    """Run a function on all ranks; if it fails on one, return the error on all."""
    problem, found = "", None
    try:
        found = attempt()
    except Exception as error:  # noqa: BLE001  whatever it is, the other contenders go on
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next(filter(None, problems), "")
    return first, None if first else found


def _moved(contender: Contender, microbatches: Sequence[Microbatch], setting: Setting) -> Moved | None:
    """Count operators in one more step, untimed."""
    if setting.device.type != "cpu":
        return None
    with MovedModel(setting.mesh.size()) as counted:
        contender.step(microbatches)
    return counted.moved


def _take_turns(request: Request, setting: Setting, contenders: Sequence[Contender], rank: int) -> list[_Notes]:
    """Run every contender's next step, one after another, so that disturbances of the machine hit all."""
    notes = [_Notes() for _ in contenders]
    for step in range(request.warmup + request.steps):
        microbatches = microbatches_of(request, setting, step, rank)
        for position in turns(len(contenders), step):
            contender, note = contenders[position], notes[position]
            if step == request.warmup:
                note.traffic = contender.traffic()
            before = _count_collectives()
            loss, wall_s, cpu_s = timed(partial(contender.step, microbatches), setting.device)
            note.losses.append(loss)
            if step >= request.warmup:
                note.collectives += _count_collectives() - before - 1  # the barrier
                note.wall_s.append(wall_s)
                note.cpu_s.append(cpu_s)
    return notes


def turns(count: int, round_index: int) -> list[int]:
    """Return the order of a round: each rotation forwards, then backwards.

    Everybody comes first, and last, equally often, and nobody always runs behind the same other.
    """
    order = [(turn + round_index // 2) % count for turn in range(count)]
    return order[::-1] if round_index % 2 else order


def _count_collectives() -> int:
    return sum(collectives_by_group().values())


def microbatches_of(request: Request, setting: Setting, step: int, rank: int) -> list[Microbatch]:
    """Make this rank's data of a step, different for each rank, step and microbatch."""
    first = (step * request.ranks + rank) * request.microbatches
    return [make_batch(setting.workload, setting.device, first + index) for index in range(request.microbatches)]


def reference_losses(request: Request, setting: Setting) -> tuple[float, ...]:
    """Return the mean loss per step of one process on the data of all ranks."""
    model = build_model(setting.workload, setting.dtype, setting.device)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(request.warmup + request.steps):
        batches = [batch for rank in range(request.ranks) for batch in microbatches_of(request, setting, step, rank)]
        total = torch.zeros((), device=setting.device)
        for batch in batches:
            loss = loss_of(model, batch) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return tuple(losses)


def _sent(contender: Contender, before: Traffic | None, steps: int) -> Traffic | None:
    after = contender.traffic()
    if after is None or before is None:
        return None
    return Traffic(*(count // steps for count in astuple(after.since(before))))


def live_bytes(name: str, setting: Setting, microbatches: Sequence[Microbatch]) -> LiveBytes:
    """Count allocations of a contender over its build and three steps. Slow; never timed."""
    if setting.device.type == "cpu":

        def build() -> Contender:
            contender = build_contender(name, setting)
            _settle(contender, microbatches)
            return contender

        return live_host_bytes(
            build, lambda contender: contender.step(microbatches), lambda contender: contender.hidden_bytes()
        )
    before = torch.accelerator.memory_allocated(setting.device)
    contender = build_contender(name, setting)
    _settle(contender, microbatches)
    torch.accelerator.reset_peak_memory_stats(setting.device)
    contender.step(microbatches)
    peak = torch.accelerator.max_memory_allocated(setting.device)
    gc.collect()
    return LiveBytes(torch.accelerator.memory_allocated(setting.device) - before, peak - before)


def _settle(contender: Contender, microbatches: Sequence[Microbatch]) -> None:
    """Make lasting objects exist and collect garbage, neither of which is a contender's memory."""
    for _ in range(2):
        contender.step(microbatches)
    gc.collect()


def live_host_bytes(
    build: Callable[[], _Found], act: Callable[[_Found], object], hidden: Callable[[_Found], int] = lambda _: 0
) -> LiveBytes:
    """Return the live bytes of what is built, and of an act: the most of several, after each operator of torch.

    The first are those of tensors, without earlier ones, and of `hidden`: what no Python object holds. What the act
    adds is read from the allocator, which sees the memory of gloo's threads and of the back ends as well.
    """
    before = _bytes_of_tensors()
    built = build()
    gc.collect()
    held = _bytes_of_tensors() - before + hidden(built)
    added = []
    for _ in range(_MEASURED_ACTS):
        dist.barrier()
        with _HeapPeak() as heap:
            act(built)
        added.append(heap.peak - heap.before)
    return LiveBytes(held, held + max(added))


class _AllocatorState(ctypes.Structure):
    """`struct mallinfo2` of glibc: ten sizes."""

    _fields_: ClassVar = [("sizes", ctypes.c_size_t * 10)]


def _heap_bytes() -> int:
    """Return the bytes that this process has allocated and not freed: those mapped by themselves, and of arenas."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _AllocatorState
    *_, mapped, _, _, in_arenas, _, _ = read().sizes
    return int(mapped + in_arenas)


class _HeapPeak(TorchDispatchMode):
    """The most bytes that are allocated after any operator inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.before = self.peak = _heap_bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, _heap_bytes())
        return result


def _bytes_of_tensors() -> int:
    """Return the bytes of all tensors' storages in this process, each once; of a DTensor, the local one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    plain = (each for each in tensors if not isinstance(each, DTensor) and each.layout is torch.strided)
    storages = {storage._cdata: storage.nbytes() for storage in (each.untyped_storage() for each in plain)}
    return sum(storages.values())
