"""Times of single phases beside FSDP2's, and exact figures: `python benchmarks/phases.py --help`."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.multiprocessing.spawn import spawn

from benchmarks.contenders import FLOOR, FSDP2, OURS
from benchmarks.phase_readings import PhaseNotes, PhaseRequest, host_microseconds, phase_document, phase_rows
from benchmarks.phase_worker import run_rank
from benchmarks.workloads import WORKLOADS
from megatron_fsdp.layout import plan_layout
from megatron_fsdp.train.launch.launcher import count_cores, rank_environment

_OF_ALL = (FSDP2, OURS[3])
_IMPORTS = {"megatron_fsdp": "import megatron_fsdp", "fsdp2": "from torch.distributed.fsdp import fully_shard"}
_TIMED_IMPORT = "import time, torch; t = time.process_time(); {}; print(time.process_time() - t)"


def measure(request: PhaseRequest) -> dict[str, Any]:
    """Start the ranks and return what they measured, as data for programs."""
    os.environ.update(rank_environment(os.environ, request.ranks, count_cores()))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "reading"
        spawn(run_rank, (request, store.port, answer), nprocs=request.ranks)
        notes: dict[str, list[PhaseNotes]] = pickle.loads(answer.read_bytes())
    rows = phase_rows(request, notes)
    found = phase_document(request, rows)
    if request.what == "host":
        found["host_us_per_unit_and_pass"] = host_microseconds(rows, FLOOR, WORKLOADS[request.model].layers)
    return found


def import_seconds(rounds: int) -> dict[str, list[float]]:
    """CPU seconds that imports take in a fresh process that has torch already, by what is imported."""
    found: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for _ in range(rounds):
        for name, statement in _IMPORTS.items():
            code = _TIMED_IMPORT.format(statement)
            done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True)
            found[name].append(float(done.stdout))
    return found


def largest_padding() -> float:
    """The largest fraction that a layout pads, of all real layers and rank counts of docs/padding.md."""
    from tools.padding_table import BF16_ALIGNMENT_NUMEL, RANK_COUNTS, groups

    return max(
        plan_layout(group.shapes, count, alignment_numel=BF16_ALIGNMENT_NUMEL).padding_fraction
        for group in groups()
        for count in RANK_COUNTS
    )


def main(argv: Sequence[str]) -> int:
    """Measure what was asked for, print it as JSON, and write it where asked."""
    parser = argparse.ArgumentParser(prog="phases.py", description="Measure single phases beside FSDP2's.")
    parser.add_argument("what", choices=("step", "start", "host", "facts"))
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused")
    parser.add_argument("--simulated-ranks", type=int, default=0, metavar="N", help="be the first of N ranks instead")
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    if given.what == "facts":
        found: dict[str, Any] = {"import_cpu_s": import_seconds(given.rounds), "largest_padding": largest_padding()}
    else:
        names = (FLOOR, *_OF_ALL) if given.what == "host" else _OF_ALL
        ranks = 1 if given.simulated_ranks else given.ranks
        warmup = 0 if given.what == "start" else given.warmup
        found = measure(
            PhaseRequest(
                given.model, ranks, given.rounds, warmup, names, given.what, given.optimizer, given.simulated_ranks
            )
        )
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
