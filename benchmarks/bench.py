"""The whole benchmark: `python benchmarks/bench.py --help` (`make bench`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

from benchmarks.contenders import (
    DDP,
    DDP_VIEWS,
    DDP_ZERO,
    DEEPSPEED_HOST,
    DEEPSPEED_RELEASES,
    FSDP2,
    OURS,
    OURS_BY_BUCKETS,
    OURS_FSDP2,
    WIRES,
)
from benchmarks.launching import write_document
from benchmarks.page import PUBLISHED, SCALE, TABLES, render, render_tables

ROOT = Path(__file__).resolve().parents[1]
_DISAGREEMENT = 1
"""The exit code of a comparison with results of some contenders, but not all."""


@dataclass(frozen=True)
class Run:
    """One process of the benchmark."""

    name: str  # of its file of results, unique
    script: str  # in this folder
    arguments: tuple[str, ...]  # without the one that says where the results go
    limit_s: float = 600  # when it is given up


# ---- which runs there are --------------------------------------------------------------------------------------------

EVERYBODY = (*WIRES, *OURS, OURS_FSDP2, *OURS_BY_BUCKETS, FSDP2, DDP, DDP_VIEWS, DDP_ZERO)


def runs(is_quick: bool, rounds: int | None = None) -> tuple[Run, ...]:
    """Return all runs on the CPU, most important first; about 15 minutes on two quiet cores, or 4."""
    few = rounds or 3
    if is_quick:
        return (_compared("many-small", 2, few, *EVERYBODY), *_phases(few), _muon("many-small", 2, few))
    each = rounds or 4
    return (
        *(_compared(model, 2, each, *EVERYBODY) for model in ("many-small", "large", "llama", "moe")),
        *_phases(rounds or 8),
        *(_muon(model, ranks, each) for model in ("many-small", "large", "llama") for ranks in (2, 4)),
        Run("checkpoints", "checkpoints.py", ("--model", "large", "--rounds", str(each))),
        _accumulating("many-small", few),
        *(_offloaded(model, few) for model in ("many-small", "large")),
        *(_compared(model, 4, few, "wire-3", "ours-3", "fsdp2", "ddp") for model in ("many-small", "large")),
    )


def _compared(model: str, ranks: int, rounds: int, *contenders: str) -> Run:
    sizes = ("--model", model, "--ranks", str(ranks), "--steps", str(rounds), "--warmup", "2")
    return Run(f"{model}-{ranks}", "compare.py", (*sizes, "--contenders", *contenders), 1200)


def _accumulating(model: str, rounds: int) -> Run:
    run = _compared(model, 2, rounds, "ours-3", "ours-3-deferred", "fsdp2", "fsdp2-deferred")
    return Run(f"{run.name}-accumulation", run.script, (*run.arguments, "--grad-accumulation", "4"), run.limit_s)


def _offloaded(model: str, rounds: int) -> Run:
    run = _compared(
        model, 2, rounds, "ours-3", "ours-3-host", "fsdp2", "fsdp2-host", DEEPSPEED_HOST, DEEPSPEED_RELEASES
    )
    return replace(run, name=f"{run.name}-host")


def _phases(rounds: int) -> Iterator[Run]:
    count = ("--rounds", str(rounds))
    yield Run("step-many-small-fused", "phases.py", ("step", "--model", "many-small", *count))
    yield Run("weights", "phases.py", ("weights", "--model", "gigabyte", "--rounds", "3"), 1200)
    yield Run("start-many-small", "phases.py", ("start", "--model", "many-small", *count))
    host = ("host", "--model", "narrow", "--simulated-ranks", "2")
    yield Run("host", "phases.py", (*host, *count))
    yield Run("simulated-8", "phases.py", ("host", "--model", "many-small", "--simulated-ranks", "8", *count))


def _muon(model: str, ranks: int, rounds: int) -> Run:
    arguments = ("step", "--model", model, "--ranks", str(ranks), "--rounds", str(rounds), "--muon")
    return Run(f"muon-{model}-{ranks}", "phases.py", arguments, 1200)


# ---- running them ----------------------------------------------------------------------------------------------------


def perform(run: Run, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Run one process; return its document, or None, and its error, or ""."""
    file = folder / f"{run.name}.json"
    file.unlink(missing_ok=True)
    script = str(ROOT / "benchmarks" / run.script)
    command = [
        sys.executable,
        "-W",
        "ignore",
        script,
        *run.arguments,
        "--out",
        os.path.relpath(file),
    ]  # it is published
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    finished = run_to_end(command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, run.limit_s)
    if finished is None:
        return None, f"given up after {run.limit_s:.0f} s"
    code, errors = finished
    if file.exists() and code in (0, _DISAGREEMENT):
        return json.loads(file.read_text(encoding="utf-8")), ""
    last = (errors.strip().splitlines() or ["it said nothing"])[-1]
    return None, f"ended with exit code {code}: {last}"


def run_to_end(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int, str] | None:
    """Run a program and end all its processes; return exit code and stderr, None after the time limit.

    Ranks that outlive a program that was given up would take time from every run that follows.
    """
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as program:
        try:
            _, errors = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(program.pid, signal.SIGKILL)
    return program.returncode, errors


def commit_of(folder: Path) -> str:
    """Return the commit checked out around a folder, with a plus sign if files differ from it."""
    answers = []
    for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "not noted"
        answers.append(done.stdout.strip())
    return answers[0] + ("+" if answers[1] else "")


def _performed(chosen: Sequence[Run], folder: Path, until: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Run one after another; return the documents, and the errors of the other runs."""
    results, failures, commit = dict[str, Any](), dict[str, str](), commit_of(ROOT)
    for index, run in enumerate(chosen, 1):
        begun = time.monotonic()
        if begun > until:
            failures[run.name] = "the time was over (--minutes)"
            continue
        document, problem = perform(run, folder)
        print(f"{index}/{len(chosen)} {run.name}: {problem or 'done'} ({time.monotonic() - begun:.0f} s)", flush=True)
        if document is None:
            failures[run.name] = problem
            continue
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        command = f"python benchmarks/{run.script} {' '.join(run.arguments)}"
        results[run.name] = {**document, "made": {"date": date, "commit": commit, "command": command}}
    return results, failures


def publish(results: Mapping[str, Any], failures: Mapping[str, str], root: Path = ROOT) -> None:
    """Write the results into the repository, and the pages made from them."""
    write_document({"results": results, "failures": failures}, root / PUBLISHED)
    (root / "docs" / "performance.md").write_text(render(published(root), published_scale(root)), encoding="utf-8")
    (root / TABLES).write_text(render_tables(published(root)), encoding="utf-8")


def published(root: Path = ROOT) -> dict[str, Any]:
    """Return the published results, if any."""
    file = root / PUBLISHED
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else {}
    return found


def published_scale(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the published cases of many ranks."""
    found: list[dict[str, Any]] = json.loads((root / SCALE).read_text(encoding="utf-8"))["cases"]
    return found


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure this engine beside its peers; one page.")
    parser.add_argument("--quick", action="store_true", help="one model and few rounds: about 4 minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help="measured steps of every run")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which no further run is begun")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="runs whose name has one of these words")
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    parser.add_argument("--publish", action="store_true", help=f"write {PUBLISHED} (--only: renew it) and its page")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="the page and the results of runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run everything and write the page; return the exit code, 1 if no run gave results."""
    given = _parse(argv)
    chosen = [
        run for run in runs(given.quick, given.rounds) if not given.only or any(word in run.name for word in given.only)
    ]
    if given.list:
        print(*(run.name for run in chosen), sep="\n")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    results, failures = _performed(chosen, given.out, time.monotonic() + 60 * given.minutes)
    page = given.out / "bench.md"
    left_out = "".join(f"\n- {name}: {why}" for name, why in failures.items())
    page.write_text(render_tables(results) + (f"\n## Left out\n{left_out}\n" if left_out else ""), encoding="utf-8")
    if given.publish and results:
        publish({**published(), **results} if given.only else results, failures)
    print(page)
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
