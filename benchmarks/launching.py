"""Starting the ranks of a measurement on this machine, and getting back what the first of them wrote."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.multiprocessing.spawn import spawn

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
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes beside the ranks
    share = int(os.environ["OMP_NUM_THREADS"]) if threads is None else threads
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "reading"
        spawn(function, (request, store.port, share, answer), nprocs=ranks)
        return pickle.loads(answer.read_bytes())
