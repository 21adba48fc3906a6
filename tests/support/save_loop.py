"""A process that forks processes that do nothing but save, to be killed at any moment."""

import os
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_fsdp.checkpoint.store import CheckpointStore

FILES = 4
LINES = 2000


def nursery(connection: Connection, root: Path) -> None:
    """For every request fork a child that sends its process id and saves; tell when it has ended; until None."""
    while connection.recv() is not None:
        child = os.fork()
        if child == 0:
            try:
                connection.send(os.getpid())
                save_for_ever(root)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        connection.send(os.waitstatus_to_exitcode(status))


def save_for_ever(root: Path) -> None:
    """Go on from the latest iteration; replace every third one at once."""
    store = CheckpointStore(root, keep_last=2)
    latest = store.latest()
    iteration = 0 if latest is None else iteration_in(latest)
    while True:
        iteration += 1
        save(store, iteration, "first")
        if iteration % 3 == 0:
            save(store, iteration, "second", overwrite=True)


def save(store: CheckpointStore, iteration: int, version: str, overwrite: bool = False) -> None:
    """Save files that all tell the same iteration and version."""

    def write(folder: Path) -> None:
        for number in range(FILES):
            (folder / f"part{number}").write_text(f"{iteration} {version}\n" * LINES)
        (folder / ".metadata").write_text(f"{iteration} {version}")

    store.write(iteration, write, overwrite=overwrite)


def iteration_in(folder: Path) -> int:
    """The iteration that a checkpoint holds; all of its files are looked at."""
    said = (folder / ".metadata").read_text()
    for number in range(FILES):
        assert (folder / f"part{number}").read_text() == f"{said}\n" * LINES, f"{folder} is not whole"
    return int(said.split()[0])
