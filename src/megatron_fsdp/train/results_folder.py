"""The folder that a run writes its results into; a run that goes on writes into the same one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.ranks import Rank, agree
from megatron_fsdp.train.options.job import Job

MARK_FILE = "metrics.jsonl"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_NO_NAMES = ("", "none")


def name_folder(out: Path | None, environment: Mapping[str, str], now: datetime) -> Path:
    """Return the absolute path: what the user said, or `runs/` and the name of the job, or the date."""
    if out is not None:
        return out.absolute()
    run_id = environment.get(_RUN_ID, "")
    is_name = run_id not in _NO_NAMES and run_id.replace("-", "").replace("_", "").isalnum()
    return Path("runs", run_id if is_name else now.strftime("%Y%m%d-%H%M%S")).absolute()


def results_folder(job: Job, rank: Rank) -> Path:
    """Make the folder, or find that of the run that this one goes on from; collective.

    Raises:
        ConfigurationError: It holds an earlier run that this one does not go on from, or cannot be made.
    """

    def work() -> Path:
        folder = name_folder(job.options.reporting.out, os.environ, datetime.now().astimezone())
        is_own = job.load_is_optional or job.restarts > 0
        if (folder / MARK_FILE).exists() and not is_own:
            raise ConfigurationError(
                f"--out {folder} holds an earlier run: give a new folder, or remove that one; or let this run go on "
                "from it, with one folder for --load and --save"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--out {folder} cannot be made ({error.strerror}): give another folder") from None
        return folder

    return agree(rank, work)
