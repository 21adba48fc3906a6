"""What a program leaves behind: processes, temporary files, shared memory."""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.forked_programs import trainer
from tests.support.settling import settled


def trainer_with_its_own_temporaries(argv: Sequence[str], change: Callable[[], None] = lambda: None) -> int:
    """The trainer, whose temporary files go to TMPDIR, after a change to it that its ranks inherit."""
    tempfile.tempdir = None  # what it was when the server of the forks started
    change()
    return trainer(argv)


def remains(place: Path, sessions: Iterable[int]) -> list[str]:
    """What is there still, once processes that were killed had the time to die.

    Args:
        place: TMPDIR of the program.
        sessions: Ids of its ranks, each of which leads a session.

    Returns:
        Processes of these sessions, files in `place`, and shared memory that names one of these processes.
    """
    leaders = {str(session) for session in sessions}
    found = [path.name for path in place.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    found += settled(lambda: _processes(leaders), lambda living: not living)
    names = os.listdir("/dev/shm")  # noqa: PTH208  # names are all that is needed
    return found + [name for name in names if leaders.intersection(name.replace("-", "_").split("_"))]


def _processes(leaders: set[str]) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if session in leaders and state not in "ZX":
                found.append(f"process {process.name}")
    return found
