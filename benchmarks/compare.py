"""Compare this engine with PyTorch's FSDP2 and DDP on the same model: `python benchmarks/compare.py --help`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch

from benchmarks.contenders import DDP, FLOOR, FSDP2, NAMES, OURS
from benchmarks.launching import describe_machine, measure_on_ranks, write_document
from benchmarks.page import comparison_table, notes
from benchmarks.report import TOLERANCES, Request, RunReading, document
from benchmarks.worker import measure_here
from benchmarks.workloads import WORKLOADS
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.program import choose_ranks, count_cores, find_device_type

EXIT_DISAGREEMENT = 1


def parse(argv: Sequence[str]) -> tuple[Request, Path | None]:
    """Parse the arguments; return the request and the file for the results."""
    parser = argparse.ArgumentParser(prog="compare.py", description="Compare this engine with PyTorch's.")
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=_positive, help="default: 2 on the CPU, all devices elsewhere")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=_positive, default=20, help="measured steps")
    parser.add_argument("--warmup", type=_positive, default=3, help="steps before them (the first ones build up state)")
    parser.add_argument(
        "--contenders",
        nargs="*",
        choices=NAMES,
        default=[OURS[3], FSDP2, DDP],
        metavar="NAME",
        help=f"besides the floor: {', '.join(NAMES[1:])}",
    )
    parser.add_argument("--bucket-mib", type=_size, default=25.0, metavar="MIB", help="of all that cut by size")
    parser.add_argument("--grad-accumulation", type=_positive, default=1, metavar="N", help="microbatches per step")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="of all that is stored or sent")
    parser.add_argument("--comm-dtype", choices=list(TOLERANCES), help="of gradients on the wire; default: as --dtype")
    parser.add_argument("--no-memory", action="store_true", help="only time steps; count no bytes and copies")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    given = parser.parse_args(argv)
    try:
        device_type = find_device_type(given.device)
        accelerators = torch.accelerator.device_count() if device_type != "cpu" else 0
        ranks = choose_ranks(given.ranks, num_accelerators=accelerators, num_cores=count_cores())
    except ConfigurationError as error:
        parser.error(str(error))
    request = Request(
        given.model,
        ranks,
        device_type,
        given.steps,
        given.warmup,
        tuple(dict.fromkeys((FLOOR, *given.contenders))),
        given.grad_accumulation,
        given.dtype,
        given.bucket_mib,
        given.comm_dtype or given.dtype,
        not given.no_memory,
    )
    return request, given.out


def measure(request: Request, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Start the ranks, wait for them, and return their measurements as plain values."""
    readings = measure_on_ranks(measure_here, request, request.ranks, device_type=request.device_type)
    reading: RunReading = readings[0]
    facts = {
        **describe_machine(request.device_type, request.ranks),
        "command": f"python benchmarks/compare.py {' '.join(argv)}".strip(),
        "threads per rank": os.environ["OMP_NUM_THREADS"],
        "tokens per rank and step": str(tokens_per_rank(request)),
    }
    return document(reading, request, facts)


def tokens_per_rank(request: Request) -> int:
    """Count the tokens that one rank trains on in a step."""
    workload = WORKLOADS[request.model]
    return workload.samples * workload.tokens * request.microbatches


def main(argv: Sequence[str]) -> int:
    """Run the comparison, print a table, write the results if asked, and return the exit code."""
    request, file = parse(argv)
    found = measure(request, argv)
    results = {f"{request.model}, {request.ranks} ranks": found}
    print(comparison_table(results), notes(results), sep="\n\n")
    write_document(found, file)
    return EXIT_DISAGREEMENT if any(line["disagrees"] for line in found["contenders"]) else 0


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not possible; give more than 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not possible; give at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
