"""Compare saving and loading with plain `dcp.save` and `dcp.load` of FSDP2: `python benchmarks/checkpoints.py -h`."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.multiprocessing.spawn import spawn

from benchmarks.checkpoint_contenders import (
    FSDP2_NAMED,
    FSDP2_RAW,
    OURS_BACKGROUND,
    OURS_BY_TORCH,
    OURS_NOW,
    OURS_VERIFIED,
    PEER,
)
from benchmarks.checkpoint_worker import Act, Reading, Request, run_rank
from benchmarks.workloads import WORKLOADS
from megatron_fsdp.package_info import __version__

SAVERS = (OURS_NOW, OURS_VERIFIED, OURS_BACKGROUND, OURS_BY_TORCH, FSDP2_NAMED, FSDP2_RAW)
EXIT_DISAGREEMENT = 1

_MIB = 2**20
_LEGEND = (
    "Medians over rounds. Wall is the slowest rank, CPU the mean of the ranks over all threads. Ratios are taken "
    f"within a round, over *{PEER}* (`get_state_dict` and `dcp.save`, `dcp.load` and `set_state_dict`). A save in the "
    "background is timed until control returns. Collectives, pickled bytes, files opened, and bytes read and written "
    "are exact and of the rank with most; so is what the calling thread allocates for tensors at its peak, in the "
    "first save: the copy of a save in the background counts, and is kept for the next."
)


def parse(argv: Sequence[str]) -> tuple[Request, Path | None]:
    """Read the arguments; returns what to run and the files for the results, without their suffix."""
    parser = argparse.ArgumentParser(prog="checkpoints.py", description=__doc__)
    parser.add_argument("--model", choices=list(WORKLOADS), default="many-small")
    parser.add_argument("--ranks", type=int, choices=range(1, 9), default=2)
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=5, metavar="N", help="1 to 100")
    parser.add_argument("--savers", nargs="*", choices=SAVERS, default=list(SAVERS), metavar="NAME")
    parser.add_argument("--no-memory", action="store_true", help="do not measure what tensors take")
    parser.add_argument("--name", help="of the files of results; default: model and ranks")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the results there, as Markdown and JSON")
    given = parser.parse_args(argv)
    names = tuple(name for name in SAVERS if name in given.savers or name == PEER)
    name = given.name or f"checkpoints-{given.model}-{given.ranks}xcpu"
    request = Request(given.model, given.ranks, given.rounds, names, Path(), not given.no_memory)
    return request, given.out and given.out / name


def run(request: Request) -> dict[str, list[Reading]]:
    """Start the ranks, wait for them, and return what they measured."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop are no news
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "reading"
        asked = replace(request, folder=Path(folder) / "saved")
        spawn(run_rank, (asked, store.port, answer), nprocs=request.ranks)
        found: dict[str, list[Reading]] = pickle.loads(answer.read_bytes())
    return found


def table(readings: dict[str, list[Reading]], what: str) -> list[str]:
    """The rows of "save" or "load"."""
    acts = {name: [getattr(one, what) for one in ranks] for name, ranks in readings.items()}
    heads = ["", "wall ms", "CPU ms", "wall ratio", "CPU ratio", "collectives", "pickled KiB", "opened", "read MiB"]
    heads += ["written MiB", "synced", "tensors MiB"]
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " --- |" * (len(heads) - 1)]
    return lines + [_row(name, ranks, acts[PEER]) for name, ranks in acts.items()]


def _row(name: str, ranks: list[Act], peers: list[Act]) -> str:
    wall, peer_wall = _slowest(ranks), _slowest(peers)
    cpu, peer_cpu = _mean_cpu(ranks), _mean_cpu(peers)
    counts = [one.counts for one in ranks]
    cells = [
        name,
        f"{1e3 * median(wall):.0f}",
        f"{1e3 * median(cpu):.0f}",
        f"{median(a / b for a, b in zip(wall, peer_wall, strict=True)):.2f}",
        f"{median(a / b for a, b in zip(cpu, peer_cpu, strict=True)):.2f}",
        str(max(one.collectives for one in counts)),
        f"{max(one.object_bytes for one in counts) / 1024:.1f}",
        str(max(one.opened for one in counts)),
        f"{max(one.read_bytes for one in counts) / _MIB:.2f}",
        f"{max(one.written_bytes for one in counts) / _MIB:.2f}",
        str(max(one.synced for one in counts)),
        f"{largest / _MIB:.2f}" if (largest := max(one.tensor_bytes for one in ranks)) else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _slowest(ranks: list[Act]) -> list[float]:
    return [max(of_round) for of_round in zip(*(one.wall_s for one in ranks), strict=True)]


def _mean_cpu(ranks: list[Act]) -> list[float]:
    return [sum(of_round) / len(of_round) for of_round in zip(*(one.cpu_s for one in ranks), strict=True)]


def markdown(request: Request, readings: dict[str, list[Reading]], facts: dict[str, str]) -> str:
    """The results page."""
    payload = max(one.payload_bytes for one in readings[PEER]) / _MIB
    lines = [
        f"# Checkpoints: {request.model}, {request.ranks} ranks, cpu",
        "",
        f"{payload:.1f} MiB of weights and AdamW state on the rank with most; {request.rounds} rounds.",
        "Every value that was loaded is bit for bit what was saved.",
    ]
    for what in ("save", "load"):
        lines += ["", f"## {what.capitalize()}", "", *table(readings, what)]
    return "\n".join([*lines, "", _LEGEND, "", *(f"- {key}: {value}" for key, value in facts.items())]) + "\n"


def describe_run(request: Request) -> dict[str, str]:
    """What somebody needs to repeat the run, and how busy the machine was."""
    command = f"python benchmarks/checkpoints.py --model {request.model} --ranks {request.ranks}"
    command += f" --rounds {request.rounds} --savers " + " ".join(f"'{name}'" for name in request.savers)
    command += "" if request.measures_memory else " --no-memory"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "versions": f"megatron-fsdp {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), {platform.system()}",
        "threads per rank": "1",
        "load of the machine at the end": f"{os.getloadavg()[0]:.1f} (1 minute)",
    }


def main(argv: Sequence[str]) -> int:
    """Run, print, and write where asked; returns the exit code."""
    request, files = parse(argv)
    readings = run(request)
    wrong = {name: one.problems[:3] for name, ranks in readings.items() for one in ranks if one.problems}
    if wrong:
        print(f"no numbers, since values did not come back: {wrong}", file=sys.stderr)
        return EXIT_DISAGREEMENT
    facts = describe_run(request)
    text = markdown(request, readings, facts)
    print(text)
    if files is not None:
        files.parent.mkdir(parents=True, exist_ok=True)
        files.with_name(files.name + ".md").write_text(text, encoding="utf-8")
        content = {"facts": facts, "readings": {key: [asdict(one) for one in ranks] for key, ranks in readings.items()}}
        document = {"what": "checkpoints", "request": {"model": request.model, "ranks": request.ranks}, **content}
        files.with_name(files.name + ".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
