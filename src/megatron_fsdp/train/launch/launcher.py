"""Start the ranks of a run on this machine, start them again when one died, end them when the user has had enough.

Ranks find each other by a file and talk over the loopback interface, so that nothing listens to the outside. That is
why torchrun's agent is not used here: it opens a port on every interface.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.crew import FOLDER_PREFIX, GRACE_S, POLL_S, Crew, Start
from megatron_fsdp.train.launch.failures import EXIT_DONE, EXIT_FAILED, EXIT_TERMINATED, EXIT_USAGE, Failure, find_cause
from megatron_fsdp.train.launch.network import loopback_interface
from megatron_fsdp.train.launch.streams import tell

CPU_RANKS = 2
MODULE = "megatron_fsdp.train"
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DIED_OF_IT = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL}


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun (or this launcher) started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def find_device_type(name: str) -> str:
    """Return the type of device for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigurationError: That accelerator is not here.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if found is None else found.type
    if name == "auto":
        return available
    if name not in ("cpu", available):
        raise ConfigurationError(f"--device {name} is not available here: use --device {available}, or leave it out")
    return name


def choose_ranks(requested: int | None, *, num_accelerators: int, num_cores: int) -> int:
    """Return how many ranks to start.

    Args:
        requested: What the user asked for, if anything.
        num_accelerators: Accelerators to use; 0 runs on the CPU.
        num_cores: CPU cores this process may use.

    Raises:
        ConfigurationError: More ranks were asked for than there are accelerators.
    """
    if num_accelerators == 0:
        return requested if requested is not None else min(CPU_RANKS, max(1, num_cores))
    if requested is not None and requested > num_accelerators:
        raise ConfigurationError(
            f"--nproc {requested} needs as many accelerators and {num_accelerators} are here: "
            f"give at most {num_accelerators}, or --device cpu"
        )
    return requested if requested is not None else num_accelerators


def count_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(environment: Mapping[str, str], ranks: int, num_cores: int) -> dict[str, str]:
    """Return the variables to add for the ranks: a fair share of the cores, and traffic that stays on this machine.

    What the user has set already is left alone.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores // ranks)), **loopback_interface()}
    return {name: value for name, value in wanted.items() if name not in environment}


@dataclass
class Asked:
    """What the user, or whoever runs the machine, asked of the launcher.

    Attributes:
        number: The first signal; 0: none.
        times: How often Ctrl-C came.
        is_passed_on: Whether the ranks know.
    """

    number: int = 0
    times: int = 0
    is_passed_on: bool = False

    @property
    def exit_code(self) -> int:
        """Of a run that ends for this reason."""
        return 128 + (signal.SIGINT if self.number == signal.SIGINT else signal.SIGTERM)


def launch(argv: Sequence[str], ranks: int, max_restarts: int = 0) -> int:
    """Run this module once per rank, again where a rank died, and return the exit code of the whole.

    The first Ctrl-C or SIGTERM is passed on: ranks that have a folder to save to finish the step and save, the others
    end at once. The second Ctrl-C ends all at once.

    Args:
        argv: Options of the run.
        ranks: How many processes.
        max_restarts: How often all ranks may start again.
    """
    environment = {**os.environ, **rank_environment(os.environ, ranks, count_cores())}
    command = (sys.executable, "-m", MODULE, *argv)
    now = datetime.now().astimezone()
    run_id = os.environ.get("TORCHELASTIC_RUN_ID") or f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"  # two may start in a second
    with _asking() as asked, tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        restart = 0
        while True:
            crew = Crew(Start(command, ranks, run_id, restart, max_restarts, Path(folder)), environment)
            try:
                cause = _watch(crew, asked)
            finally:
                crew.end(grace_s=0.0 if asked.times > 1 else GRACE_S)
            if asked.number:
                return _report_asked(cause, asked)
            if cause is None:
                return _end_of(crew)
            if restart == max_restarts or not cause.is_worth_repeating:
                return _report(cause)
            restart += 1
            tell(f"{_told(cause)}\nstarting all ranks again, {restart} of at most {max_restarts} times")


def _watch(crew: Crew, asked: Asked) -> Failure | None:
    """Wait for the ranks; None: they ended well."""
    while (failures := crew.poll()) is None:
        if asked.times > 1:
            return None
        if asked.number and not asked.is_passed_on:
            asked.is_passed_on = True
            crew.ask_to_end()  # by SIGTERM: while Python starts, SIGINT would show a traceback
        time.sleep(POLL_S)
    if asked.number and {failure.exitcode for failure in failures.values()} <= _DIED_OF_IT:
        return None
    return find_cause(failures) if failures else None


@contextmanager
def _asking() -> Iterator[Asked]:
    """While the block runs, signals are noted, but for those that whoever started us wants ignored, as nohup does."""
    asked = Asked()

    def note(number: int, _: FrameType | None) -> None:
        asked.number = asked.number or number
        asked.times += number == signal.SIGINT

    heard = [number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_of(crew: Crew) -> int:
    """The exit code of ranks that ended well."""
    if not crew.is_interrupted:
        return EXIT_DONE
    tell("stopped, since a rank was asked to end; what was written so far is kept")
    return EXIT_TERMINATED


def _report_asked(cause: Failure | None, asked: Asked) -> int:
    if cause is not None and not cause.is_echo:
        return _report(cause)
    tell("stopped; what was written so far is kept")
    return asked.exit_code


def _told(cause: Failure) -> str:
    if cause.code == EXIT_FAILED:
        return f"rank {cause.rank} failed, all ranks were ended:\n{cause.text.rstrip()}"
    return f"rank {cause.rank}: {cause.text}"


def _report(cause: Failure) -> int:
    """Show the first failure and return the exit code."""
    tell(f"error: {cause.text}" if cause.code == EXIT_USAGE else _told(cause))
    return cause.code
