"""Beginning the log of a model on this rank."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.flight_recorder import flight_name
from megatron_fsdp.hang.processes import Process, this_process
from megatron_fsdp.hang.reading import read_log
from megatron_fsdp.hang.writer import UnitFacts, Writer, as_json, file_name
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.ring_log import PHASES, Ring
from megatron_fsdp.unit.unit import Unit

_RUN_KEY = "megatron_fsdp_hang_log_run"


def open_ring(folder: Path, engine: Engine) -> tuple[Ring, Writer]:
    """A new log in a folder, which is made where it is missing.

    A log that another process left there under the same name is replaced. Models of one process get numbers, in the
    order in which their logs begin, which has to be the same on all ranks.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
    group = engine.reaching_all[0]
    process = this_process()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model = _first_free(folder, rank, process)
        writer = Writer(
            rank,
            world,
            tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,),
            model,
            _run() if is_distributed else uuid.uuid4().hex,
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


def _first_free(folder: Path, rank: int, process: Process) -> int:
    """The first model whose log this process has not begun in the folder."""
    model = 0
    while True:
        try:
            if read_log(folder / file_name(rank, model)).writer.process != process:
                return model
        except (OSError, ValueError):
            return model
        model += 1


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
