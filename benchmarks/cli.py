"""The command line: arguments, the ranks, the report and its files."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.contenders import ALL_COMPILED, DDP, DEEPSPEED, FLOOR, FSDP2, OURS, OURS_BY_BUCKETS, PEERS
from benchmarks.launching import measure_on_ranks
from benchmarks.readings import Request, RunReading
from benchmarks.report import TOLERANCES, disagreements, document, markdown, summarise, tolerance_of
from benchmarks.variants import variants
from benchmarks.worker import run_rank
from benchmarks.workloads import WORKLOADS
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.launch.launcher import choose_ranks, count_cores, find_device_type

EXIT_DISAGREEMENT = 1


def parse(argv: Sequence[str]) -> tuple[Request, Path | None]:
    """Read the arguments; returns what to run and the files for the results, without their suffix."""
    parser = argparse.ArgumentParser(prog="compare.py", description="Compare this engine with PyTorch's.")
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=_positive, help="default: 2 on the CPU, all devices elsewhere")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=_positive, default=20, help="measured steps")
    parser.add_argument("--warmup", type=_positive, default=3, help="steps before them (the first ones build up state)")
    parser.add_argument("--strategies", type=int, nargs="*", choices=range(4), default=[3], help="of this engine")
    parser.add_argument("--ddp", nargs="*", choices=OURS_BY_BUCKETS, default=[], help="this engine by buckets")
    parser.add_argument("--variants", nargs="*", choices=list(variants()), default=[], help="strategy 3, changed")
    parser.add_argument("--compiled", action="store_true", help="floor, ours-3 and fsdp2 with compiled blocks, too")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[FSDP2, DDP])
    parser.add_argument("--bucket-mib", type=_size, default=25.0, metavar="MIB", help="of all that cut by size")
    parser.add_argument("--grad-accumulation", type=_positive, default=1, metavar="N", help="microbatches per step")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="of all that is stored or sent")
    parser.add_argument("--comm-dtype", choices=list(TOLERANCES), help="of gradients on the wire; default: as --dtype")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused", help="AdamW's kernels")
    parser.add_argument("--no-memory", action="store_true", help="only time steps; count no bytes and copies")
    parser.add_argument("--name", help="of the files of results; default: model, ranks and dtype")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the results there, as Markdown and JSON")
    given = parser.parse_args(argv)
    try:
        device_type = find_device_type(given.device)
        accelerators = torch.accelerator.device_count() if device_type != "cpu" else 0
        ranks = choose_ranks(given.ranks, num_accelerators=accelerators, num_cores=count_cores())
    except ConfigurationError as error:
        parser.error(str(error))
    ours = [*(OURS[strategy] for strategy in given.strategies), *given.ddp]
    compiled = ALL_COMPILED if given.compiled else ()
    contenders = (FLOOR, *dict.fromkeys([*ours, *given.variants, *given.peers, *compiled]))
    request = Request(
        given.model,
        ranks,
        device_type,
        given.steps,
        given.warmup,
        contenders,
        given.grad_accumulation,
        given.dtype,
        given.bucket_mib,
        given.comm_dtype or given.dtype,
        given.optimizer,
        not given.no_memory,
    )
    name = given.name or f"compare-{request.model}-{request.ranks}x{request.device_type}-{request.dtype}"
    return request, None if given.out is None else given.out / name


def run(request: Request) -> RunReading:
    """Start the ranks, wait for them, and return what they measured."""
    reading: RunReading = measure_on_ranks(run_rank, request, request.ranks)
    return reading


def command_of(request: Request) -> str:
    """The command that repeats a run, defaults spelled out."""
    strategies = [str(OURS.index(name)) for name in request.contenders if name in OURS]
    by_buckets = [name for name in request.contenders if name in OURS_BY_BUCKETS]
    varied = [name for name in request.contenders if name in variants()]
    peers = [name for name in request.contenders if name in PEERS]
    compiled = "--compiled " if ALL_COMPILED[0] in request.contenders else ""
    timed = "" if request.measures_memory else " --no-memory"
    return (
        f"python benchmarks/compare.py --model {request.model} --ranks {request.ranks} --device {request.device_type} "
        f"--steps {request.steps} --warmup {request.warmup} {_listed('--strategies', strategies)}"
        f"{_listed('--ddp', by_buckets)}{_listed('--variants', varied)}{_listed('--peers', peers)}{compiled}"
        f"--grad-accumulation {request.microbatches} --dtype {request.dtype} --bucket-mib {request.bucket_mib:g} "
        f"--comm-dtype {request.comm_dtype} --optimizer {request.optimizer}{timed}"
    )


def _listed(option: str, values: Sequence[str]) -> str:
    return " ".join([option, *values, ""])


def describe_run(request: Request) -> dict[str, str]:
    """What somebody needs to repeat the run: date, command, versions, hardware."""
    packages = ["deepspeed"] * any(name in DEEPSPEED for name in request.contenders) + ["transformers"]
    machine = describe_machine(request.device_type, request.ranks, packages)
    return {
        "date": machine.pop("date"),
        "command": command_of(request),
        **machine,
        "threads per rank": os.environ["OMP_NUM_THREADS"],
        "tokens per rank and step": str(tokens_per_rank(request)),
    }


def describe_machine(device_type: str, ranks: int, packages: Sequence[str] = ()) -> dict[str, str]:
    """Date, versions and hardware of a run.

    Args:
        device_type: "cpu" or "cuda".
        ranks: Processes, each with a device of its own on "cuda".
        packages: Whose versions are told besides torch's, where they are installed.
    """
    versions = [f"{package} {installed}" for package in packages if (installed := _version(package))]
    described = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"megatron-fsdp {__version__}, torch {torch.__version__}, "
        + ", ".join([*versions, f"Python {platform.python_version()}"]),
        "hardware": f"{count_cores()} CPU cores ({platform.machine()}), {platform.system()}",
    }
    if device_type == "cuda":
        described["hardware"] += f", {ranks} x {torch.cuda.get_device_name(0)}"
    return described


def tokens_per_rank(request: Request) -> int:
    """Tokens that one rank trains on in a step."""
    workload = WORKLOADS[request.model]
    return workload.samples * workload.tokens * request.microbatches


def main(argv: Sequence[str]) -> int:
    """Run the comparison, print the report, and write it where asked; returns the exit code."""
    request, files = parse(argv)
    reading = run(request)
    facts = describe_run(request)
    lines = summarise(reading, request.contenders)
    text = markdown(lines, request, reading, facts)
    print(text)
    if files is not None:
        files.parent.mkdir(parents=True, exist_ok=True)
        files.with_name(files.name + ".md").write_text(text, encoding="utf-8")
        content = json.dumps(document(lines, request, reading, facts), indent=1)
        files.with_name(files.name + ".json").write_text(content + "\n", encoding="utf-8")
    wrong = disagreements(reading, tolerance_of(request))
    if wrong:
        print("no speed of those whose results are wrong:", file=sys.stderr)
        print(*(f"{name}: {why}" for name, why in wrong.items()), sep="\n  ", file=sys.stderr)
    return EXIT_DISAGREEMENT if wrong else 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
