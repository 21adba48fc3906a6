"""How the error of one rank reaches the person who started the run: once, and the first one only."""

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_fsdp.errors import CheckpointError, ConfigurationError

EXIT_FAILED = 1
EXIT_USAGE = 2
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # set for every rank by torchrun

_TOLD_IN_ONE_LINE = (ConfigurationError, CheckpointError)


@dataclass(frozen=True)
class Failure:
    """What ended a rank.

    Attributes:
        rank: Global rank.
        text: What to show: one line for a wrong setting or checkpoint, a traceback for anything else.
        is_usage: Whether a setting or a checkpoint was wrong.
        time_ns: When it was raised, in nanoseconds since 1970.
    """

    rank: int
    text: str
    is_usage: bool
    time_ns: int


def write_failure(error: BaseException, path: Path) -> None:
    """Write an error in the format of torchrun's error files, with a finer time than torchrun's whole seconds.

    When one rank fails, its peers fail within milliseconds because the connection is gone; the finer time tells
    cause from consequence.
    """
    now_ns = time.time_ns()
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(now_ns // 10**9),
        "time_ns": now_ns,
        "is_usage": isinstance(error, _TOLD_IN_ONE_LINE),
    }
    path.write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}))


def report_failure(error: BaseException, rank: int) -> int:
    """Hand an error to torchrun, or show it where there is no torchrun; return the exit code."""
    is_usage = isinstance(error, _TOLD_IN_ONE_LINE)
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file is not None:
        write_failure(error, Path(error_file))
    elif rank == 0 or not is_usage:
        traceback.print_exception(error)
    return EXIT_USAGE if is_usage else EXIT_FAILED


def read_failure(rank: int, failure: ProcessFailure) -> Failure:
    """Turn torchrun's record of a failed rank into ours."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):  # killed from outside: no error file
        return Failure(rank, str(failure.message), is_usage=False, time_ns=failure.timestamp * 10**9 + 10**9)
    extra = message["extraInfo"]
    is_usage = bool(extra.get("is_usage", False))
    text = message["message"] if is_usage else extra["py_callstack"]
    return Failure(rank, text, is_usage, int(extra.get("time_ns", failure.timestamp * 10**9)))


def find_cause(failures: Mapping[int, ProcessFailure]) -> Failure:
    """Return the failure that came first."""
    return min((read_failure(rank, failure) for rank, failure in failures.items()), key=lambda f: (f.time_ns, f.rank))
