"""Train a model on several numbers of ranks, kill and resume it on others, and draw all losses: one curve.

    python tools/one_curve.py --out runs/one-curve            # a few minutes on two cores
    python tools/one_curve.py --out runs/one-curve --publish  # and write the losses into benchmarks/results

Every loss and gradient norm is compared as a float, bit for bit; the exit status is 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "one-curve.json"
STEPS, EVERY = 1000, 100
MODEL = (
    *("--preset", "tiny", "--hidden-size", "32", "--ffn-hidden-size", "88", "--seq-length", "32", "--device", "cpu"),
    *("--deterministic", "world", "--micro-batch-size", "2", "--global-batch-size", "12"),
    *("--eval-interval", "1000", "--log-interval", "50", "--exit-duration-in-mins", "100000"),
)
UNITS = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy")
HYBRID = ("--num-distributed-optimizer-instances", "2", "--outer-dp-sharding-strategy", "optim")


@dataclass(frozen=True)
class Part:
    """A run or a part of one: ranks, strategy, and the step at which its ranks are killed (None: never)."""

    ranks: int
    strategy: tuple[str, ...]
    killed_at: int | None = None


RUNS = {
    "1 rank, ZeRO-3": (Part(1, (*UNITS, "optim_grads_params")),),
    "2 ranks, ZeRO-2": (Part(2, (*UNITS, "optim_grads")),),
    "3 ranks, ZeRO-3": (Part(3, (*UNITS, "optim_grads_params")),),
    "4 ranks, HFSDP 2 x 2": (Part(4, (*UNITS, "optim_grads_params", *HYBRID)),),
    "killed twice: 3, 1, 4 ranks": (
        Part(3, (*UNITS, "optim_grads_params"), 350),
        Part(1, (*UNITS, "optim"), 650),
        Part(4, (*UNITS, "optim_grads")),
    ),
}


def play(folder: Path, parts: tuple[Part, ...], steps: int) -> dict[int, tuple[float, float]]:
    """Train, with kills, and return loss and gradient norm of each step."""
    saves = folder / "saves"
    words = (*MODEL, "--train-iters", str(steps), "--out", str(folder), "--save", str(saves), "--load", str(saves))
    for part in parts:
        command = [sys.executable, "-m", "megatron_fsdp.train", *words, *part.strategy]
        command += ["--save-interval", str(max(1, steps * EVERY // STEPS)), "--nproc", str(part.ranks)]
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            killed_at = None if part.killed_at is None else steps * part.killed_at // STEPS
            while process.poll() is None and (killed_at is None or len(losses_of(folder)) < killed_at):
                time.sleep(0.2)
            is_killed = process.poll() is None
            if is_killed:  # the launcher's children are the ranks
                for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                    os.kill(int(rank), signal.SIGKILL)
            code = process.wait()
        if (code != 0) is not is_killed or is_killed is not (killed_at is not None):
            raise SystemExit(f"{part} ended with {code}: see {log.name}")
    return losses_of(folder)


def losses_of(folder: Path) -> dict[int, tuple[float, float]]:
    """Read loss and gradient norm of each step so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records}


def published() -> dict[str, list[float]]:
    """Return the losses of each run, read from one file, since they are equal."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {name: list(map(float.fromhex, found["losses"])) for name in found["runs"]}


def plot(path: Path, found: dict[str, list[float]]) -> None:
    """Draw all losses, the first ones widest, as a PNG."""
    figure = Figure(figsize=(8.0, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (name, losses) in enumerate(found.items()):
        is_last = number + 1 == len(found)
        shown = {"color": "black", "linewidth": 0.8} if is_last else {"linewidth": 6.0 - 1.3 * number}
        axes.plot(range(1, len(losses) + 1), losses, label=name, **shown)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)", yscale="log")
    axes.set_title("Five runs, all drawn: every loss has the same bits", fontsize=11)
    axes.grid(alpha=0.3)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    figure.legend(loc="outside lower center", fontsize=9, ncols=3)
    figure.savefig(path)


def main() -> int:
    """Run the missing parts, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--publish", action="store_true")
    arguments = parser.parse_args()
    found = {}
    for number, (name, parts) in enumerate(RUNS.items()):
        folder = arguments.out / f"run-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        found[name] = losses_of(folder)
        if len(found[name]) < arguments.steps:
            found[name] = play(folder, parts, arguments.steps)
        print(f"{name}: {len(found[name])} steps, last loss {found[name][arguments.steps][0]!r}", flush=True)
    first, *others = found.values()
    different = [step for step in first for losses in others if losses.get(step) != first[step]]
    print(f"{len(first)} steps of {len(found)} runs, {len(different)} differ in a bit of loss or gradient norm")
    if arguments.publish and not different:
        losses = [loss.hex() for loss, _ in first.values()]
        RESULTS.write_text(json.dumps({"runs": list(found), "losses": losses}) + "\n", encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
