"""Times of single phases beside FSDP2's, and exact figures: `python benchmarks/phases.py --help`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

from benchmarks.cli import describe_machine
from benchmarks.contenders import FLOOR, FSDP2, OURS
from benchmarks.launching import measure_on_ranks
from benchmarks.output import show
from benchmarks.phase_readings import (
    PhaseNotes,
    PhaseRequest,
    host_microseconds,
    host_microseconds_by_pass,
    phase_document,
    phase_rows,
)
from benchmarks.phase_worker import run_rank
from benchmarks.workloads import WORKLOADS
from megatron_fsdp.sharding.layout import plan_layout

_OF_ALL = (FSDP2, OURS[3])
_IMPORTS = {
    "megatron_fsdp": "import megatron_fsdp",
    "megatron_fsdp and its engine": "import megatron_fsdp.megatron_fsdp",
    "fsdp2": "from torch.distributed.fsdp import fully_shard",
}
_TIMED_IMPORT = "import time, torch; t = time.process_time(); {}; print(time.process_time() - t)"


def measure(request: PhaseRequest) -> dict[str, Any]:
    """Start the ranks and return what they measured, as data for programs."""
    notes: dict[str, list[PhaseNotes]] = measure_on_ranks(run_rank, request, request.ranks, threads=1)
    rows = phase_rows(request, notes)
    found = {"facts": describe_machine(request.device_type, request.ranks), **phase_document(request, rows)}
    if request.what == "host":
        units = WORKLOADS[request.model].layers
        found["host_us_per_unit_and_pass"] = host_microseconds(rows, FLOOR, units)
        found["host_us_by_pass"] = host_microseconds_by_pass(rows, FLOOR, units)
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


def padding() -> list[tuple[str, float, float]]:
    """By layer of docs/padding.md: the largest fractions that a layout, and the rule of the LCM, pad at any count."""
    from tools.padding_table import BF16_ALIGNMENT_NUMEL, RANK_COUNTS, groups, lcm_rule_numel

    found = []
    for group in groups():
        layouts = [plan_layout(group.shapes, count, alignment_numel=BF16_ALIGNMENT_NUMEL) for count in RANK_COUNTS]
        payload = layouts[0].payload_numel
        lcm = max(lcm_rule_numel(group.shapes, count) / payload - 1 for count in RANK_COUNTS)
        found.append((group.name, max(layout.padding_fraction for layout in layouts), lcm))
    return found


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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all that is stored")
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    if given.what == "facts":
        padded = padding()
        found: dict[str, Any] = {
            "import_cpu_s": import_seconds(given.rounds),
            "padding": padded,
            "largest_padding": max(worst for _, worst, _ in padded),
        }
    else:
        names = (FLOOR, *_OF_ALL) if given.what == "host" else _OF_ALL
        ranks = 1 if given.simulated_ranks else given.ranks
        warmup = 0 if given.what == "start" else given.warmup
        found = measure(
            PhaseRequest(
                given.model,
                ranks,
                given.rounds,
                warmup,
                names,
                given.what,
                given.optimizer,
                given.simulated_ranks,
                given.device,
                given.dtype,
            )
        )
    show(found, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
