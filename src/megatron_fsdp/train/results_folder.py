"""The folder that a run writes its results into; a run that goes on writes into the same one."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.ranks import Rank, agree
from megatron_fsdp.train.options.job import Job

MARK_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
CLAIM_FILE = ".claim"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_NO_NAMES = ("", "none")


def name_folder(out: Path | None, environment: Mapping[str, str], now: datetime) -> Path:
    """Return the absolute path: what the user said, or `runs/` and the name of the job, or the date."""
    if out is not None:
        return out.absolute()
    return Path("runs", _run_id(environment) or now.strftime("%Y%m%d-%H%M%S")).absolute()


def _run_id(environment: Mapping[str, str]) -> str | None:
    """The name of the job, where it has one that can be a folder's."""
    run_id = environment.get(_RUN_ID, "")
    is_name = run_id not in _NO_NAMES and run_id.replace("-", "").replace("_", "").isalnum()
    return run_id if is_name else None


def new_folder(path: Path) -> Path:
    """Make a folder that was not there: of this name, or with -2, -3 and so on where another run was faster.

    Raises:
        OSError: It cannot be made.
    """
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


@contextmanager
def results_folder(job: Job, rank: Rank, *, goes_on: bool) -> Iterator[Path]:
    """Make the folder, or find that of the run that this one goes on from, for this run alone; collective.

    Args:
        job: The run.
        rank: This process.
        goes_on: Whether it goes on from a run of its own, and with its files.

    Raises:
        ConfigurationError: It holds an earlier run that this one does not go on from, another run writes into it now,
            or it cannot be made.
    """
    with ExitStack() as held:
        yield agree(rank, lambda: _take(job, held, goes_on=goes_on))


def _take(job: Job, held: ExitStack, *, goes_on: bool) -> Path:
    out = job.options.reporting.out
    folder = name_folder(out, os.environ, datetime.now().astimezone())
    try:
        if out is None and _run_id(os.environ) is None:
            folder = new_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {folder} cannot be made ({error.strerror}): give another folder") from None
    if not _claim(folder, held) and job.restarts == 0:  # a rank before a restart may still be about to end
        raise ConfigurationError(f"--out {folder}: another run writes into it now; give another folder")
    if not goes_on and any((folder / name).exists() for name in (MARK_FILE, SUMMARY_FILE)):
        checkpoint = job.options.checkpoint
        none_yet = f", and {checkpoint.save} holds no checkpoint to go on from" if checkpoint.is_same_folder else ""
        raise ConfigurationError(
            f"--out {folder} holds an earlier run{none_yet}: give a new folder, or remove that one; or let this run go "
            "on from it, with one folder for --load and --save"
        )
    return folder


def _claim(folder: Path, held: ExitStack) -> bool:
    """Claim a folder until `held` ends, or the process, however that ends; false where another run has it.

    Where the file system knows no locks, or nothing can be written, nobody is refused.
    """
    try:
        file = held.enter_context((folder / CLAIM_FILE).open("a"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # also where a forked child still has the file open
    return True
