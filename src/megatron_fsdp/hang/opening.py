"""Beginning the log of a model on this rank."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_fsdp.engine.collective_log import PHASES, Ring
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.flight_recorder import flight_name
from megatron_fsdp.hang.processes import Process, is_alive, this_process
from megatron_fsdp.hang.reading import read_writer
from megatron_fsdp.hang.writer import UnitFacts, Writer, as_json, file_name, rank_and_model

_RUN_KEY = "megatron_fsdp_hang_log_run"


def open_ring(folder: Path, engine: Engine) -> tuple[Ring, Writer]:
    """A new log in a folder, which is made where it is missing.

    A log that another process left there under the same name is replaced, if that process is over. Models of one
    process get numbers, in the order in which their logs begin, which has to be the same on all ranks.

    Raises:
        ConfigurationError: The folder cannot be written, or a job that still runs keeps its logs there.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
    group = engine.reaching_all[0]
    process = this_process()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = _run() if is_distributed else uuid.uuid4().hex
        model = _first_free(folder, rank, run, process)
        writer = Writer(
            rank,
            world,
            tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,),
            model,
            run,
            time.time_ns(),
            process,
            _facts(engine.units),
            tuple(phase.value for phase in PHASES),
        )
        (folder / flight_name(rank, model)).unlink(missing_ok=True)  # of an earlier run
        return Ring(folder / file_name(rank, model), as_json(writer)), writer
    except OSError as error:
        raise ConfigurationError(
            f"the log for hangs cannot be written to {folder} ({type(error).__name__}: {error}); name a folder that "
            "can be made and written"
        ) from error


def _first_free(folder: Path, rank: int, run: str, process: Process) -> int:
    """One more than the last model whose log this process has begun in the folder.

    Raises:
        ConfigurationError: A process of another run that still lives writes a log of this rank.
    """
    found = (rank_and_model(path.name) for path in folder.iterdir())
    models = sorted((place[1] for place in found if place is not None and place[0] == rank), reverse=True)
    for model in models:  # those of this process come before what is left of earlier ones
        try:
            writer = read_writer(folder / file_name(rank, model))
        except (OSError, ValueError):
            continue
        if writer.process == process:
            return model + 1
        if writer.run != run and is_alive(writer.process):
            raise ConfigurationError(
                f"{folder} holds the log of rank {rank} of another job, which still runs (process "
                f"{writer.process.pid} on {writer.process.host}); give each job its own folder for logs of hangs"
            )
    return 0


def _run() -> str:
    """The name of the run: that of the first rank that asked, by way of the store that all of them share."""
    store = distributed_c10d._get_default_store()
    return bytes(store.compare_set(_RUN_KEY, "", uuid.uuid4().hex)).decode()


def _facts(units: Sequence[Unit]) -> tuple[UnitFacts, ...]:
    return tuple(
        UnitFacts(
            unit.label,
            tuple(name for group in unit.groups for name in group.names),
            sum(group.plan.layout.payload_numel * group.plan.precision.compute.itemsize for group in unit.groups),
        )
        for unit in units
    )
