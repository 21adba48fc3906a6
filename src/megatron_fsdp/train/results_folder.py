"""The folders that a run writes into, which are its own while it lives: of its results, and of its checkpoints."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from megatron_fsdp.checkpoint.publish import claim
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.ranks import Rank, agree
from megatron_fsdp.train.options.job import Job

MARK_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
_RESULTS_CLAIM, _SAVES_CLAIM = ".claim", ".claim-of-saves"  # one folder may be both
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
    if not _claim(folder / _RESULTS_CLAIM, job, held):
        raise ConfigurationError(f"--out {folder}: another run writes into it now; give another folder")
    if not goes_on and any((folder / name).exists() for name in (MARK_FILE, SUMMARY_FILE)):
        checkpoint = job.options.checkpoint
        none_yet = f", and {checkpoint.save} holds no checkpoint to go on from" if checkpoint.is_same_folder else ""
        raise ConfigurationError(
            f"--out {folder} holds an earlier run{none_yet}: give a new folder, or remove that one; or let this run go "
            "on from it, with one folder for --load and --save"
        )
    return folder


@contextmanager
def saving_alone(job: Job, rank: Rank) -> Iterator[None]:
    """Keep the folder of `--save`, which is made where it is missing, for this run over the block; collective.

    Raises:
        ConfigurationError: Another run saves into it now, or it cannot be written.
    """
    folder = job.options.checkpoint.save
    with ExitStack() as held:
        if folder is not None:
            agree(rank, lambda: _take_saves(folder, job, held))
        yield


def _take_saves(folder: Path, job: Job, held: ExitStack) -> None:
    require_writable(folder)
    if not _claim(folder / _SAVES_CLAIM, job, held):
        raise ConfigurationError(
            f"--save {folder}: another run saves into it now; give another folder, or start again when that one has "
            "ended"
        )


def require_writable(folder: Path) -> None:
    """Make the folder of `--save`, and write to it, so that a run does not find out after training that it cannot.

    Raises:
        ConfigurationError: It cannot be made or written.
    """
    probe = folder / f".probe-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"--save {folder} cannot be written ({error.strerror}): give a folder that can be"
        ) from error


def _claim(file: Path, job: Job, held: ExitStack) -> bool:
    """Claim the folder of a file until `held` ends, or the process; false where another run has it."""
    with suppress(OSError):
        file.touch()
    return claim(file, held) or job.restarts > 0  # a rank before a restart may still be about to end
