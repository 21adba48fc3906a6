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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

from benchmarks.environment import prepare
from benchmarks.kept import commit_of, joined, stamped
from benchmarks.page import comparisons, page
from benchmarks.suite import Run, gpu_runs, runs
from benchmarks.targets import judge, told_amiss
from megatron_fsdp.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = "there is no CUDA device here"
_NAMED = ("compare.py", "checkpoints.py")
"""Programs that write more than one file, by `--name` into a folder."""

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
    where = ("--out", str(folder), "--name", run.name) if run.script in _NAMED else ("--out", str(file))
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


def write_page(results: Mapping[str, Any], failures: dict[str, str], folder: Path, stem: str) -> Path:
    """Write the page, its pictures and the results for programs; returns the page."""
    write_results(results, failures, folder, stem)
    pictures: list[str] = []
    if comparisons(results):
        try:
            from benchmarks.plots import draw

            pictures = draw(results, folder, stem)
        except ConfigurationError as error:
            failures = {**failures, "pictures": str(error)}
    path = folder / f"{stem}.md"
    path.write_text(page("Benchmark", results, failures, judge(results), pictures), encoding="utf-8")
    return path


def write_results(results: Mapping[str, Any], failures: Mapping[str, str], folder: Path, stem: str) -> None:
    """Write the results for programs; a benchmark that is ended early leaves those that it has."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(shortened({"results": results, "failures": failures})) + "\n"
    (folder / f"{stem}.json").write_text(text, encoding="utf-8")


def shortened(value: Any) -> Any:
    """The same with six significant digits of every float, which is more than any measurement has."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _read_results(folder: Path, stem: str) -> dict[str, Any]:
    file = folder / f"{stem}.json"
    found: dict[str, Any] = {"results": {}, "failures": {}}
    return {**found, **json.loads(file.read_text(encoding="utf-8"))} if file.exists() else found


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure this engine beside its peers; one page.")
    parser.add_argument("--quick", action="store_true", help="few rounds, fewer models and ranks")
    parser.add_argument("--rounds", type=int, metavar="N", help="measured steps of every run")
    parser.add_argument("--minutes", type=float, default=38.0, help="after which no further run is begun")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="runs whose name has one of these words")
    parser.add_argument("--keep", action="store_true", help="runs that give nothing now keep their results on the page")
    parser.add_argument("--gpu", action="store_true", help="only the runs on a CUDA device, on a page of their own")
    parser.add_argument("--again", action="store_true", help="measure nothing; write the page of the results in --out")
    parser.add_argument("--list", action="store_true", help="name the runs and stop")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-bench", help="made where it is not there")
    parser.add_argument("--no-environment", action="store_true", help="use this interpreter; install nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench", help="where single runs write")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run everything and write the page; returns the exit code, 1 where no run gave results."""
    given = _parse(argv)
    until = time.monotonic() + 60 * given.minutes
    on_cpu = () if given.gpu else runs(given.quick, given.rounds)
    stem = "bench-gpu" if given.gpu else f"bench-{os.cpu_count()}xcpu"
    before = _read_results(given.out, stem) if given.again or given.keep else {"results": {}, "failures": {}}
    if given.list:
        print(*(run.name for run in [*on_cpu, *gpu_runs()] if _is_wanted(run.name, given.only)), sep="\n")
        return 0
    if given.again:
        return _finish(before["results"], before["failures"], given.out, stem)
    failures: dict[str, str] = {}
    python, missing = (Path(sys.executable), "") if given.no_environment else prepare(given.environment)
    if missing:
        failures["peers"] = missing
        print(missing, file=sys.stderr)
    has_gpu = _has_gpu(python)
    if not has_gpu:
        failures["gpu"] = NO_GPU
    if given.gpu and not has_gpu:
        print(f"bench.py: {NO_GPU}, nothing measured")
        return 0
    chosen = [run for run in [*(gpu_runs() if has_gpu else ()), *on_cpu] if _is_wanted(run.name, given.only)]
    names = [run.name for run in [*runs(is_quick=False), *gpu_runs()]]
    results: dict[str, Any] = {}
    for name, document in _performed(chosen, python, given.work, failures, until):
        results[name] = document
        write_results(*joined(before, results, failures, names), given.out, stem)
    return _finish(*joined(before, results, failures, names), given.out, stem)


def _finish(results: Mapping[str, Any], failures: dict[str, str], folder: Path, stem: str) -> int:
    """Write the page, and say where `reasons.py` does not fit it; returns the exit code."""
    unexplained, stale = told_amiss(judge(results))
    for title in unexplained:
        print(f"missed, and reasons.py says nothing: {title}")
    for title in stale:
        print(f"no missed target needs this row of reasons.py: {title}")
    print(write_page(results, failures, folder, stem))
    return 0 if results else 1


def _performed(
    chosen: Sequence[Run], python: Path, folder: Path, failures: dict[str, str], until: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one after another; yields those that gave a document, and notes in `failures` those that did not."""
    folder.mkdir(parents=True, exist_ok=True)
    commit = commit_of(ROOT)
    for index, run in enumerate(chosen, 1):
        begun, worked = time.monotonic(), _children_cpu_s()
        if begun > until:
            failures[run.name] = "the time was over (--minutes)"
            continue
        document, problem = perform(run, python, folder)
        if problem:
            failures[run.name] = problem
        took = f"{time.monotonic() - begun:.0f} s, of the CPUs {_children_cpu_s() - worked:.0f} s"
        wrong = [line["name"] for line in (document or {}).get("contenders", ()) if line["disagrees"]]
        told = problem or (f"no speed of {', '.join(wrong)}, whose losses are wrong" if wrong else "done")
        print(f"{index}/{len(chosen)} {run.name}: {told} ({took})", flush=True)
        if document is not None:
            yield run.name, stamped(document, commit, f"python benchmarks/{run.script} {' '.join(run.arguments)}")


def _children_cpu_s() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = os.times()
    return used.children_user + used.children_system


def _is_wanted(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
