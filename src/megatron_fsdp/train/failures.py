"""The end of a run: exit codes, error reports to the user, and advice when memory ran out."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_fsdp.config.command_parser import EXIT_INTERRUPTED
from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.errors import CheckpointError, ConfigurationError, MegatronFSDPError, RankError, first_line, words_of
from megatron_fsdp.train.options.job import Job

if TYPE_CHECKING:
    from megatron_fsdp.train.ranks import Rank

MEETING_VARIABLE = "MEGATRON_FSDP_MEETING"
"""The variable with the URL of the file through which locally started ranks meet."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_NOT_FINITE = 4
EXIT_NOT_SAVED = 6
EXIT_KILLED = 7
EXIT_TERMINATED = 128 + signal.SIGTERM

ENDS: Mapping[int, str] = {
    EXIT_DONE: "all steps are done",
    EXIT_FAILED: "an error that is none of the others; its traceback is shown",
    EXIT_USAGE: "a wrong option, data or checkpoint; one line says what to do",
    EXIT_OUT_OF_MEMORY: "a rank had no memory left",
    EXIT_NOT_FINITE: "more steps in a row than --max-nan-steps were not finite",
    EXIT_NOT_SAVED: "more saves in a row than --max-failed-saves failed, or the last one",
    EXIT_KILLED: "a rank was ended by a signal from outside",
    EXIT_INTERRUPTED: "Ctrl-C",
    EXIT_TERMINATED: "SIGTERM or SIGUSR1 to the launcher, or the terminal was closed",
}
"""The meaning of every exit code of the program, if this package started the ranks."""

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set for every rank by torch's agent

_TOLD_IN_ONE_LINE = (ConfigurationError, CheckpointError)
_SURE_CODES = (EXIT_USAGE, EXIT_OUT_OF_MEMORY, EXIT_NOT_FINITE, EXIT_NOT_SAVED)
"""Exit codes that, almost certainly, only this package uses: they are trusted without an error file."""
_NOTICED_WITHIN_NS = 5 * 10**9
_ECHOES = (signal.SIGABRT, signal.SIGTERM, signal.SIGPIPE)
"""Signals by which a rank may end because a peer did."""


class RunError(MegatronFSDPError):
    """An error with its own exit code, reported without a traceback."""

    exit_code = EXIT_FAILED


class OutOfMemoryError(RunError):
    """A rank had no memory left."""

    exit_code = EXIT_OUT_OF_MEMORY


class NonFiniteStepError(RunError):
    """Too many steps in a row had a loss or gradient that is NaN or infinite."""

    exit_code = EXIT_NOT_FINITE


class NotSavedError(RunError):
    """Too many saves in a row failed, or the last one."""

    exit_code = EXIT_NOT_SAVED


@dataclass(frozen=True)
class Failure:
    """The failure that ended a rank: its traceback or a sentence, the program's exit code, and its time.

    `is_echo`: it may be the consequence of another rank's end.
    """

    rank: int
    text: str
    code: int
    time_ns: int
    is_echo: bool = False


def exit_code_of(error: BaseException) -> int:
    """Return the program's exit code for an error."""
    if isinstance(error, RunError):
        return error.exit_code
    return EXIT_USAGE if isinstance(error, _TOLD_IN_ONE_LINE) else EXIT_FAILED


def write_failure(error: BaseException, path: Path) -> None:
    """Write an error in the format of torchrun's error files.

    Peers of a failed rank fail within milliseconds, so a finer time than torchrun's seconds separates cause from
    consequence. An error with an exit code of its own is a sentence instead of the traceback, which torchrun shows.
    """
    now_ns, code = time.time_ns(), exit_code_of(error)
    shown = "".join(traceback.format_exception(error)) if code == EXIT_FAILED else f"error: {error}"
    extra = {"py_callstack": shown, "timestamp": str(now_ns // 10**9), "time_ns": now_ns, "exit_code": code}
    path.write_text(json.dumps({"message": {"message": words_of(error), "extraInfo": extra}}))


def report_failure(error: BaseException, rank: int) -> int:
    """Write an error for the agent, print it if nothing else will, and return the exit code.

    Printed is its sentence, or its traceback. The launcher of this package prints the first error of all ranks when it
    gives up; torchrun does so for tracebacks, at the end of a long report. The first rank prints an error that all
    ranks share.
    """
    code, path = exit_code_of(error), os.environ.get(_ERROR_FILE)
    restarts, limit = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    is_reported = path is not None and restarts >= limit and (code == EXIT_FAILED or MEETING_VARIABLE in os.environ)
    try:
        if path is not None:
            write_failure(error, Path(path))
    except OSError:  # as on a full disk
        is_reported = False
        with suppress(OSError):
            Path(path or "").unlink()  # half a file would hide the exit code
    if not is_reported and code == EXIT_USAGE:
        tell(f"error: {error}" if rank == 0 else "")
    elif not is_reported:
        tell(f"rank {rank}: {error}" if code != EXIT_FAILED else "".join(traceback.format_exception(error)))
    return code


def find_cause(failures: Mapping[int, ProcessFailure]) -> Failure:
    """Return the earliest failure; possible consequences of another come last.

    An agent ends the remaining ranks when a rank has failed: by SIGTERM, which a rank that saves may catch, and by
    SIGKILL half a minute later. A rank that is killed from outside is noticed at once.
    """
    found = [read_failure(rank, failure) for rank, failure in failures.items()]
    late_ns = min(failure.time_ns for failure in found) + _NOTICED_WITHIN_NS
    return min(found, key=lambda f: (f.is_echo or (f.code == EXIT_KILLED and f.time_ns > late_ns), f.time_ns, f.rank))


def read_failure(rank: int, failure: ProcessFailure) -> Failure:
    """Convert torch's record of a failed rank."""
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        extra = message["extraInfo"]
        code = int(extra.get("exit_code", EXIT_FAILED))
        text = extra["py_callstack"] if code == EXIT_FAILED else message["message"]
        return Failure(rank, text, code, int(extra.get("time_ns", failure.timestamp * 10**9)), code == EXIT_FAILED)
    noticed_ns = failure.timestamp * 10**9 + 10**9  # ended from outside, or before it could write an error file
    if failure.exitcode >= 0:
        text = f"it ended with exit code {failure.exitcode} and without a word"
        code = failure.exitcode if failure.exitcode in _SURE_CODES else EXIT_FAILED
        return Failure(rank, text, code, noticed_ns, is_echo=code == EXIT_FAILED)
    name = signal.Signals(-failure.exitcode).name
    hint = ", as after kill -9 or when the machine's memory runs out" if name == "SIGKILL" else ""
    return Failure(rank, f"it was ended by {name}{hint}", EXIT_KILLED, noticed_ns, is_echo=-failure.exitcode in _ECHOES)


def tell(text: str) -> None:
    """Write lines to standard error, if there is one; nothing without text."""
    if text and sys.stderr is not None:
        with suppress(OSError, ValueError):  # full, closed, or without a reader
            sys.stderr.write(f"{text.rstrip()}\n")
            sys.stderr.flush()


# ---- memory that runs out --------------------------------------------------------------------------------------------


_OUT_OF_MEMORY = re.compile(
    "can't allocate memory|not enough memory|Cannot allocate memory|CUDA error: out of memory|"
    "CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|(?i:nccl(?s:.*)out of memory)"
)
"""Phrases of untyped out-of-memory errors of drivers and libraries."""
_OF_PEERS = re.compile(r"\b(OutOf)?MemoryError\b")  # ranks exchange the type and the message of an error
_MET_TOGETHER = (CheckpointError, RankError, ConfigurationError)  # whose messages name the ranks that met something


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or its cause, means that an accelerator or the machine is out of memory."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(seen, (RuntimeError, OSError, *_MET_TOGETHER)) and _OUT_OF_MEMORY.search(str(seen)):
            return True
        if isinstance(seen, _MET_TOGETHER) and _OF_PEERS.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextmanager
def describing_memory_errors(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Raise an `OutOfMemoryError` with a description if the block runs out of memory."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(describe(error)) from error


def memory_advice(job: Job, rank: Rank, step: int, error: BaseException) -> str:
    """Describe which rank ran out of memory in which step (0: before any), with advice, the cheapest first."""
    options, device, ways = job.options, rank.device, []
    where = "" if isinstance(error, _MET_TOGETHER) else f" on rank {rank.index}"
    reason = first_line(error)
    peak = f"{in_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} resident"
    if device.type != "cpu":
        peak = f"{in_bytes(torch.accelerator.max_memory_allocated(device))} allocated on the device"
    if (less := job.batch.micro // 2) > 0:
        ways.append(f"--micro-batch-size {less} --global-batch-size {job.batch.total} (the same steps)")
    if options.training.recompute_granularity is None:
        ways.append("--recompute-granularity full")
    if job.engine == "megatron_fsdp" and job.ddp.data_parallel_sharding_strategy != "optim_grads_params":
        ways.append("--data-parallel-sharding-strategy optim_grads_params")
    if step == 0 and not options.parallel.init_model_with_meta_device:
        ways.append("--init-model-with-meta-device")
    preset = next((said.split()[1] for said in options.origins.values() if said.startswith("preset ")), "MODEL")
    return (
        f"out of memory{where} {f'in step {step}' if step else 'outside of a step'} on {device}: {reason}\n"
        f"  peak so far: {peak}\n"
        f"  try: {'; '.join([*ways, 'more ranks'])}\n"
        f"  mfsdp plan {options.model.source or preset} --ranks {rank.count} --sequence-length {job.seq_length} "
        f"--micro-batch-size {job.batch.micro} --strategy auto --dtype {str(job.dtype).removeprefix('torch.')}   says "
        "what would fit"
    )
