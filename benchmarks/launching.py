"""Starting the ranks of a measurement on this machine, and writing down what the first of them measured."""

from __future__ import annotations

import json
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.multiprocessing.spawn import spawn

from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.launch.launcher import count_cores, rank_environment

RankFunction = Callable[[int, Any, int, int, Path], None]
"""Is called with rank, request, port of the store, threads per rank, and where the first rank writes its answer."""


def measure_on_ranks(function: RankFunction, request: Any, ranks: int, threads: int | None = None) -> Any:
    """Run a function on every rank and wait for them.

    Args:
        function: At the top of a module; the first rank writes a pickle.
        request: What to measure; travels as a pickle.
        ranks: Number of processes.
        threads: Of each; None: a fair share of the cores.

    Returns:
        What the pickle holds.
    """
    os.environ.update(rank_environment(os.environ, ranks, count_cores()))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop are no news
    share = int(os.environ["OMP_NUM_THREADS"]) if threads is None else threads
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "reading"
        spawn(function, (request, store.port, share, answer), nprocs=ranks)
        return pickle.loads(answer.read_bytes())


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
