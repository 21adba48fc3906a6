"""Starting the ranks of a measurement on this machine, and writing down what the first of them measured."""

from __future__ import annotations

import json
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

from megatron_fsdp.comm.groups import bound_device
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.program import count_cores, rank_environment

_PATIENCE = timedelta(minutes=5)
"""How long ranks wait for one that is gone."""

RankFunction = Callable[[Any, torch.device, DeviceMesh], Any]
"""Is called on every rank with the request, the rank's device and a mesh of one dimension, "dp"; returns a reading."""


@dataclass(frozen=True)
class _Job:
    """What every rank is given; see `measure_on_ranks`."""

    function: RankFunction
    request: Any
    ranks: int
    threads: int
    device_type: str
    simulated_ranks: int
    store_port: int
    folder: Path


def measure_on_ranks(
    function: RankFunction,
    request: Any,
    ranks: int,
    *,
    threads: int | None = None,
    device_type: str = "cpu",
    simulated_ranks: int = 0,
) -> list[Any]:
    """Run a function on every rank and wait for them.

    Args:
        function: At the top of a module.
        request: What to measure; travels as a pickle.
        ranks: Number of processes.
        threads: Of each; None: a fair share of the cores.
        device_type: "cpu" or "cuda".
        simulated_ranks: The size of the job that one process pretends to be the first rank of; 0: none.

    Returns:
        What each rank returned.
    """
    os.environ.update(rank_environment(os.environ, ranks, count_cores()))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop are no news
    share = int(os.environ["OMP_NUM_THREADS"]) if threads is None else threads
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(function, request, ranks, share, device_type, simulated_ranks, store.port, Path(folder))
        spawn(_run_rank, (job,), nprocs=ranks)
        return [pickle.loads((job.folder / str(rank)).read_bytes()) for rank in range(ranks)]


def _run_rank(rank: int, job: _Job) -> None:
    """Join the ranks, or pretend to be the first of many, measure, and write the reading."""
    torch.set_num_threads(job.threads)
    torch.set_flush_denormal(bool(job.simulated_ranks))  # what simulated ranks receive is whatever lies in memory
    device = torch.device("cpu")
    if job.device_type != "cpu":
        device = torch.device(job.device_type, rank)
        torch.accelerator.set_device_index(rank)
        torch.empty(0, device=device)  # a mesh of more ranks than devices is taken only from a device in use
    if job.simulated_ranks:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.simulated_ranks)
    else:
        store, backend = TCPStore("127.0.0.1", job.store_port), dist.get_default_backend_for_device(device)
        bound = bound_device(backend, device)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=job.ranks, timeout=_PATIENCE, device_id=bound
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    reading = job.function(job.request, device, mesh)
    (job.folder / str(rank)).write_bytes(pickle.dumps(reading))
    dist.barrier()  # nobody leaves while a peer still needs the connection
    dist.destroy_process_group()


def describe_machine(device_type: str, ranks: int) -> dict[str, str]:
    """Tell date, versions and hardware of a run on "cpu" or, with a device for each rank, on "cuda"."""
    hardware = f"{count_cores()} CPU cores ({platform.machine()}), {platform.system()}"
    if device_type == "cuda":
        hardware += f", {ranks} x {torch.cuda.get_device_name(0)}"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"megatron-fsdp {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "hardware": hardware,
    }


def write_document(document: Mapping[str, Any], file: Path | None) -> None:
    """Write a document as JSON where a file is asked for, with six significant digits of every float."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(shortened(document)) + "\n", encoding="utf-8")


def shortened(value: Any) -> Any:
    """Return the same with six significant digits of every float, which is more than any measurement has."""
    if isinstance(value, Mapping):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
