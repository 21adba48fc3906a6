"""Run the trainer many times, with kills, restarts and resumes; check for growth and leftovers.

    make soak                                  # an hour
    make soak ARGS="--minutes 5"

Some are programs whose ranks are killed at random, and which have to end as a run that nobody disturbed. The others
are runs one after another in ranks that live on, whose memory, open files and threads are compared.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing.util import get_temp_dir
from pathlib import Path

from tests.support.forked_programs import Program
from tests.support.train_program import by_step, differences, run, start, torment, train, write_text
from tests.support.worker_pool import WorkerPool

ROOT = Path(__file__).resolve().parents[1]
STEPS, EVERY, KILLS = 60, 10, 2
NUMBERS = ("loss", "grad_norm", "samples", "data_checksum")
WARM_UP = 3
MOST_GROWTH = 32 << 20
"""The allowed growth of a rank's resident memory after the first rounds, in bytes, for malloc's cache."""


@dataclass(frozen=True)
class Footprint:
    """The resources of one process."""

    resident: int
    files: int
    threads: int


@dataclass
class Tally:
    """The results of the soak."""

    # ranks that were killed, and how many of them while a checkpoint was written
    killed: list[bool] = field(default_factory=list)
    disturbed: int = 0  # programs whose ranks were killed
    in_process: int = 0  # runs in ranks that live on
    footprints: list[list[Footprint]] = field(default_factory=list)  # of every such rank, after every run
    problems: list[str] = field(default_factory=list)


def footprint(*options: str) -> Footprint:
    """Train in this rank and measure its resources."""
    train(*options)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return Footprint(resident, len(list(Path("/proc/self/fd").iterdir())), threading.active_count())


def use_temporary_folder(folder: Path) -> None:
    """Use a private folder for temporary files of this process and its children."""
    get_temp_dir()  # multiprocessing keeps its own, which it removes last, where it was made
    folder.mkdir()
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None


def temporary_folders() -> set[str]:
    """Return the launchers' temporary folders."""
    return {path.name for path in Path(tempfile.gettempdir()).glob("mfsdp-run-*")}


def leftovers(saved: Path, before: set[str], ranks: list[int]) -> list[str]:
    """Return leftovers of a finished program: hidden files of saves, temporary folders, processes."""
    found = [
        f"{path.name} in the folder of checkpoints"
        for path in saved.iterdir()
        if path.name.startswith((".iter_", ".latest_"))
    ]
    found += [f"the folder {name}" for name in sorted(temporary_folders() - before)]
    return found + [f"process {pid}" for pid in ranks if Path(f"/proc/{pid}").exists()]


def disturbed_run(place: Path, quiet: Path, data: tuple[str, ...], seed: int, tally: Tally) -> None:
    """Run a program whose ranks are killed, and compare it with an undisturbed one."""
    out, saved = place / "out", place / "saved"
    background = ("--async-save",) if seed % 2 else ()
    options = (*data, *background, "--save", str(saved), "--out", str(out), "--max-restarts", str(KILLS))
    before = temporary_folders()
    program: Program = start(*options)
    killed = torment(program, out, saved, seed=seed, kills=KILLS, during_saves=seed % (KILLS + 1))
    _, errors = program.communicate(timeout=600)
    tally.disturbed += 1
    tally.killed += killed
    if program.returncode != 0:
        tally.problems.append(f"seed {seed} ended with {program.returncode}: {errors}")
        return
    last = f"iter_{STEPS:07}"
    if by_step(out, *NUMBERS) != by_step(quiet / "out", *NUMBERS):
        tally.problems.append(f"seed {seed}: other numbers than those of the run that nobody disturbed")
    if found := [*differences(saved / last, quiet / "saved" / last), *leftovers(saved, before, [program.pid])]:
        tally.problems.append(f"seed {seed}: {', '.join(found)}")


def growth(footprints: list[list[Footprint]]) -> list[str]:
    """Return the growth since the first rounds, in words."""
    found = []
    if len(footprints) <= WARM_UP:
        return ["too few runs to tell growth: give more --minutes"]
    for rank, (before, after) in enumerate(zip(footprints[WARM_UP - 1], footprints[-1], strict=True)):
        if after.resident - before.resident > MOST_GROWTH:
            found.append(f"rank {rank}: {before.resident >> 20} MiB have become {after.resident >> 20}")
        if after.files > before.files or after.threads > before.threads:
            found.append(f"rank {rank}: {before} has become {after}")
    return found


def soak(minutes: float, place: Path) -> Tally:
    """Run rounds until the time is over."""
    tally, until = Tally(), time.monotonic() + 60.0 * minutes
    text = write_text(place / "text.txt")
    data = ("--data-path", str(text), "--train-iters", str(STEPS), "--save-interval", str(EVERY), "--keep-last", "2")
    quiet = place / "quiet"
    run(*data, "--save", str(quiet / "saved"), "--out", str(quiet / "out"))
    pool = WorkerPool(2, (), "cpu")
    seed = 0
    try:
        while time.monotonic() < until:
            seed += 1
            here = place / str(seed)
            disturbed_run(here / "a", quiet, data, seed, tally)
            for number in range(2):
                options = (*data, "--save", str(here / f"b{number}" / "s"), "--out", str(here / f"b{number}"))
                tally.footprints.append(pool.run(footprint, *options, timeout_s=300.0))
                tally.in_process += 1
            shutil.rmtree(here)
    finally:
        pool.stop()
    tally.problems += growth(tally.footprints)
    return tally


def report(tally: Tally, minutes: float) -> str:
    """Return the report as Markdown."""
    programs = f"{tally.disturbed} programs of {STEPS} steps with {len(tally.killed)} ranks killed"
    saving = f"{sum(tally.killed)} of them while a checkpoint was written"
    lines = [
        f"# Soak of {minutes:g} minutes",
        "",
        f"{programs}, {saving}; {tally.in_process} runs in ranks that live on.",
        "",
        "| after runs | rank | resident MiB | open files | threads |",
        "|---|---|---|---|---|",
    ]
    for number in sorted({WARM_UP - 1, len(tally.footprints) // 2, len(tally.footprints) - 1}):
        for rank, held in enumerate(tally.footprints[number] if 0 <= number < len(tally.footprints) else []):
            lines.append(f"| {number + 1} | {rank} | {held.resident / 2**20:.1f} | {held.files} | {held.threads} |")
    told = [f"- {problem}" for problem in tally.problems] or ["Nothing differed, grew or was left over."]
    return "\n".join([*lines, "", *told, ""])


def main() -> int:
    """Soak, write the report, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the report")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mfsdp-soak-") as place:
        use_temporary_folder(Path(place) / "temporary")
        tally = soak(given.minutes, Path(place))
    text = report(tally, given.minutes)
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / f"soak-{datetime.now().astimezone():%Y-%m-%d}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
