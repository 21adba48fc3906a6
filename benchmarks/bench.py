"""The whole benchmark, one page: `python benchmarks/bench.py --help` (`make bench`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

from benchmarks.environment import prepare
from benchmarks.page import comparisons, page
from benchmarks.suite import CHECKPOINTS, Run, gpu_runs, runs
from benchmarks.targets import judge
from megatron_fsdp.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]
_DISAGREEMENT = 1
"""The exit code of a comparison that has results, though not for everybody."""


def perform(run: Run, python: Path, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Run one process; a second time with fewer contenders where it fails.

    Returns:
        Its document, or None, and what went wrong, or "".
    """
    told = ""
    for arguments in (run.arguments, run.spare):
        if not arguments:
            continue
        document, problem = _attempt(run, arguments, python, folder)
        if document is not None:
            return document, f"{told}; what is shown is a run without DeepSpeed" if told else ""
        told = told or problem
    return None, told


def _attempt(run: Run, arguments: Sequence[str], python: Path, folder: Path) -> tuple[dict[str, Any] | None, str]:
    file = folder / f"{run.name}.json"
    file.unlink(missing_ok=True)
    where = ("--out", str(folder), "--name", run.name) if run.script == "compare.py" else ("--out", str(file))
    command = [str(python), "-W", "ignore", str(ROOT / "benchmarks" / run.script), *arguments, *where]
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    finished = run_to_end(command, environment, run.limit_s)
    if finished is None:
        return None, f"given up after {run.limit_s:.0f} s"
    code, errors = finished
    if file.exists() and code in (0, _DISAGREEMENT):
        return json.loads(file.read_text(encoding="utf-8")), ""
    last = (errors.strip().splitlines() or ["it said nothing"])[-1]
    return None, f"ended with exit code {code}: {last}"


def run_to_end(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int, str] | None:
    """Run a program that starts processes of its own, and leave none of them behind.

    Ranks that outlive a program that was given up would take time from every run that follows.

    Args:
        command: The program and its arguments.
        environment: All its variables.
        limit_s: When to give it up.

    Returns:
        The exit code and what it wrote to its standard error; None where it was given up.
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


def _has_gpu(python: Path) -> bool:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def write_page(results: dict[str, dict[str, Any]], failures: dict[str, str], folder: Path, stem: str) -> Path:
    """Write the page, its pictures and the results for programs; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[str] = []
    if comparisons(results):
        try:
            from benchmarks.plots import draw

            pictures = draw(results, folder, stem)
        except ConfigurationError as error:
            failures = {**failures, "pictures": str(error)}
    verdicts = judge(results)
    text = page("Benchmark", results, failures, verdicts, pictures)
    (folder / f"{stem}.json").write_text(
        json.dumps(shortened({"results": results, "failures": failures})) + "\n", encoding="utf-8"
    )
    path = folder / f"{stem}.md"
    path.write_text(text, encoding="utf-8")
    return path


def shortened(value: Any) -> Any:
    """The same with six significant digits of every float, which is more than any measurement has."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def stored_checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """What the benchmark of checkpoints has left in a folder."""
    files = {name: folder / f"{name}.json" for name in CHECKPOINTS}
    return {
        name: {"what": "checkpoints", **json.loads(file.read_text(encoding="utf-8"))}
        for name, file in files.items()
        if file.exists()
    }


def main(argv: Sequence[str]) -> int:
    """Run everything and write the page; returns the exit code, 1 where no run gave results."""
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure this engine beside its peers; one page.")
    parser.add_argument("--quick", action="store_true", help="few rounds, fewer models and ranks")
    parser.add_argument("--rounds", type=int, metavar="N", help="measured steps of every run")
    parser.add_argument("--minutes", type=float, default=33.0, help="after which no further run is begun")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="runs whose name has one of these words")
    parser.add_argument("--again", action="store_true", help="measure nothing; write the page of the results in --out")
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-bench", help="made where it is not there")
    parser.add_argument("--no-environment", action="store_true", help="use this interpreter; install nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench", help="where single runs write")
    given = parser.parse_args(argv)
    until = time.monotonic() + 60 * given.minutes
    chosen = [run for run in runs(given.quick, given.rounds) if _is_wanted(run.name, given.only)]
    if given.list:
        print(*(run.name for run in [*chosen, *gpu_runs()]), sep="\n")
        return 0
    stem = f"bench-{os.cpu_count()}xcpu"
    if given.again:
        before = json.loads((given.out / f"{stem}.json").read_text(encoding="utf-8"))
        print(write_page(before["results"], before["failures"], given.out, stem))
        return 0
    failures: dict[str, str] = {}
    python, missing = (Path(sys.executable), "") if given.no_environment else prepare(given.environment)
    if missing:
        failures["peers"] = missing
        print(missing, file=sys.stderr)
    if _has_gpu(python):
        chosen = [*gpu_runs(), *chosen]
    else:
        failures["gpu"] = "there is no CUDA device here"
    results = _perform_all(chosen, python, given.work, failures, until)
    stored = {} if given.only else stored_checkpoints(ROOT / "benchmarks" / "results")
    print(write_page({**results, **stored}, failures, given.out, stem))
    return 0 if results else 1


def _perform_all(
    chosen: Sequence[Run], python: Path, folder: Path, failures: dict[str, str], until: float
) -> dict[str, dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for index, run in enumerate(chosen, 1):
        begun = time.monotonic()
        if begun > until:
            failures[run.name] = "the time was over (--minutes)"
            continue
        document, problem = perform(run, python, folder)
        if document is not None:
            results[run.name] = document
        if problem:
            failures[run.name] = problem
        print(f"{index}/{len(chosen)} {run.name}: {problem or 'done'} ({time.monotonic() - begun:.0f} s)", flush=True)
    return results


def _is_wanted(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
