"""Fixtures of the whole suite: worker pools that live for the session, the two suites, and the `gpu` marker."""

import gc
import os
import socket
from pathlib import Path

# The suite gives the same verdict wherever and however pytest starts it: what decides that is set here, before torch is
# imported, and inherited by workers and by the programs that tests start. They import this checkout, whatever is
# installed. Sums of several threads round differently, so there is one thread per process; ranks talk on loopback.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(str(Path(__file__).parents[1] / folder) for folder in ("src", "")), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("COLUMNS", None)  # parallel workers are told 80; what folds lines takes 100 without a terminal
os.environ["GLOO_SOCKET_IFNAME"] = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")

from collections.abc import Callable, Generator, Iterator
from multiprocessing import get_context
from typing import Any

import hypothesis
import pytest
import torch

from tests.support import immediate_failures
from tests.support.tiers import leave_out_full
from tests.support.worker_pool import DEFAULT_TIMEOUT_S, WorkerPool, preloaded_modules


class RunRanks:
    """The `run_ranks` fixture: one worker pool per world size and device type, each started when first used."""

    def __init__(self, warning_filters: tuple[str, ...]) -> None:
        self._warning_filters = warning_filters
        self._pools: dict[tuple[int, str], WorkerPool] = {}

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device_type: str = "cpu",
    ) -> list[Any]:
        """Run `fn(*args)` on each rank and return the results in rank order."""
        if device_type == "cuda" and torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} CUDA device(s), this machine has {torch.cuda.device_count()}")
        key = (world_size, device_type)
        if key not in self._pools:
            self._pools[key] = WorkerPool(world_size, self._warning_filters, device_type)
        return self._pools[key].run(fn, *args, timeout_s=timeout_s)

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()


@pytest.fixture(scope="session")
def run_ranks(pytestconfig: pytest.Config) -> Iterator[RunRanks]:
    """Run a module-level function on `world_size` ranks: `run_ranks(2, fn, *args) -> [result of rank 0, of rank 1]`.

    Each rank runs `fn(*args)` in its own process with `torch.distributed` initialised (gloo; with
    `device_type="cuda"` NCCL for CUDA tensors, rank i on device i). What a rank raises comes back as `WorkerError`.
    """
    made = RunRanks(tuple(pytestconfig.getini("filterwarnings")))
    yield made
    made.stop()


def pytest_configure(config: pytest.Config) -> None:
    """Make property tests repeatable, and free of hypothesis' own timing checks; show failures at once."""
    immediate_failures.pytest_configure(config)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):  # of a job that pytest runs in
        os.environ.pop(name, None)
    # Whoever is woken waits for the thread that runs, in ranks and programs, too: gloo's loop spins where it preempts
    # the one that holds the lock of its connection, for two thirds of the CPU time of a small collective.
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    slow = [hypothesis.HealthCheck.too_slow]
    examples = 30 if config.getoption("--short") else 100
    hypothesis.settings.register_profile(
        "suite", max_examples=examples, deadline=None, derandomize=True, suppress_health_check=slow
    )
    hypothesis.settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from 700,000 objects of tests, which live to the end: 0.5 s each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish() -> None:
    """Say what the server of the forks imports, before any test starts it: it is one for all that fork from it."""
    get_context("forkserver").set_forkserver_preload(preloaded_modules())


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Merge small units, as users' models do, except in marked tests, which count messages or name units."""
    if item.get_closest_marker("unmerged") is not None:
        os.environ["MFSDP_MESSAGE_BYTES"] = "0"
    elif "fsdp2" in item.path.parts:  # whose models are so small that none would be
        os.environ["MFSDP_MESSAGE_BYTES"] = str(2**20)
    else:
        os.environ.pop("MFSDP_MESSAGE_BYTES", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the short suite."""
    parser.addoption("--short", action="store_true", help="leave out the cases marked `full` (tests/support/tiers.py)")
    parser.addoption("--beyond-short", action="store_true", help="run what `--short` leaves out, or draws less of")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose, so that files are seen whole
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave full cases out of the short suite; skip tests marked `gpu` where there is no CUDA device."""
    if config.getoption("--short") or config.getoption("--beyond-short"):
        everything = list(items)
        left_out = leave_out_full(items, whole_files=not any("::" in arg for arg in config.args))
        if config.getoption("--beyond-short"):
            short = {item for item in items if not hypothesis.is_hypothesis_test(getattr(item, "obj", None))}
            left_out, items[:] = list(short), [item for item in everything if item not in short]
        config.hook.pytest_deselected(items=left_out)
    # Files are handed out in this order: what takes long must not be begun last, when one process works alone.
    items.sort(key=lambda item: not {"train", "automodel", "doctor", "test_torchrun.py"} & set(item.path.parts))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
