"""What each optimisation gives, all in one run with the whole engine: `python benchmarks/ablation.py --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

from benchmarks.cli import EXIT_DISAGREEMENT, describe_run, run
from benchmarks.contenders import FLOOR
from benchmarks.optimisations import OPTIMISATIONS
from benchmarks.output import show
from benchmarks.readings import Request
from benchmarks.report import disagreements, document, summarise, tolerance_of
from benchmarks.workloads import WORKLOADS

NAMES = tuple(each.name for each in OPTIMISATIONS)


def request_of(model: str, ranks: int, rounds: int, warmup: int, names: Sequence[str] = NAMES) -> Request:
    """The comparison of contenders without an optimisation and with it.

    Args:
        model: Name of a workload.
        ranks: Processes.
        rounds: Measured steps.
        warmup: Steps before them.
        names: Which optimisations.
    """
    chosen = [each for each in OPTIMISATIONS if each.name in names]
    contenders = dict.fromkeys(name for each in chosen for name in (each.base, each.name))
    return Request(model, ranks, "cpu", rounds, warmup, (FLOOR, *contenders), 1, "float32", 25.0)


def measure(request: Request) -> dict[str, Any]:
    """Run the comparison; a document as those of `compare.py`, with the optimisations that it is about."""
    reading = run(request)
    facts = describe_run(request)
    names = [name for name in NAMES if name in request.contenders]
    facts["command"] = (
        f"python benchmarks/ablation.py --model {request.model} --ranks {request.ranks} --rounds {request.steps} "
        f"--warmup {request.warmup} --names {' '.join(names)}"
    )
    listed = [(each.name, each.title, each.base) for each in OPTIMISATIONS if each.name in names]
    found = document(summarise(reading, request.contenders), request, reading, facts)
    return {"what": "ablation", "optimisations": listed, **found} | {
        "wrong": disagreements(reading, tolerance_of(request))
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print JSON, and write it where asked; returns the exit code, 1 where losses disagree."""
    parser = argparse.ArgumentParser(prog="ablation.py", description="Switch single optimisations off.")
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--names", nargs="*", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    found = measure(request_of(given.model, given.ranks, given.rounds, given.warmup, given.names))
    show(found, given.out)
    return EXIT_DISAGREEMENT if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
