"""Train the tiny model for 2,000 steps under several optimizers and formats, for tables of the pages.

    python -m tools.optimizer_curves          # train again, in about half an hour on a core, and write the losses

All runs begin with the same weights and see the same batches at the same steps, so that they differ in the optimizer,
or in the format that weights are rounded to, alone; AdamW on 2 ranks shows what rounding alone does in
such a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_fsdp.config.precision import WEIGHT_FORMAT_NAMES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "optimizer-curves.json"
STEPS, WINDOW = 2000, 20
RATES = (1.5e-3, 3e-3, 6e-3)
RATE = 3e-3
"""Learning rate of the preset, and of runs compared at one rate."""

Losses = Mapping[str, Sequence[float]]
"""By the name of a run the mean loss of each 20 steps in nats per byte; last the loss on held-out text."""


@dataclass(frozen=True)
class CurveRun:
    """One run of the trainer."""

    optimizer: str  # of `--optimizer`
    rate: float = RATE
    ranks: int = 1
    weight_format: str = ""  # of gathered weights; empty: none

    @property
    def name(self) -> str:
        """Return the name of the run's file."""
        parts = self.optimizer, f"rate {self.rate:g}", f"{self.ranks} ranks", self.weight_format
        return ", ".join(filter(None, parts))

    def words(self) -> list[str]:
        """Return the trainer's command line; 4 samples a step on any number of ranks."""
        asked = {
            "--preset": "tiny",
            "--nproc": self.ranks,
            "--train-iters": STEPS,
            "--micro-batch-size": 4 // self.ranks,
            "--global-batch-size": 4,
            "--optimizer": self.optimizer,
            "--lr": self.rate,
            "--min-lr": self.rate / 10,
            "--seed": 1,
            "--eval-interval": STEPS,
            "--eval-iters": 50,
            "--log-interval": 100,
            "--exit-duration-in-mins": 600,
        }
        if self.weight_format:
            asked["--megatron-fsdp-weight-format"] = self.weight_format
            asked["--data-parallel-sharding-strategy"] = "optim_grads_params"
        sharded = ["--use-megatron-fsdp"] if self.weight_format else []
        return [*(str(word) for pair in asked.items() for word in pair), *sharded]


FORMATS = {name: CurveRun("adam", weight_format=name) for name in WEIGHT_FORMAT_NAMES}
"""Runs by weight format."""

RUNS = (
    CurveRun("adam"),
    CurveRun("adamw8bit"),
    CurveRun("muon"),
    CurveRun("adam", ranks=2),
    *FORMATS.values(),
    *(CurveRun(optimizer, rate) for rate in RATES for optimizer in ("adam", "muon") if rate != RATE),
)


def measure(run: CurveRun) -> list[float]:
    """Train; return the run's entry in `Losses`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megatron_fsdp.train", *run.words(), "--out", folder]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, check=True)
        steps, held_out = (
            [json.loads(line)["loss"] for line in Path(folder, name).read_text("utf-8").splitlines()]
            for name in ("metrics.jsonl", "evaluations.jsonl")
        )
    windows = (steps[first : first + WINDOW] for first in range(0, STEPS, WINDOW))
    return [*(round(mean(window), 5) for window in windows), round(held_out[-1], 5)]


def published() -> dict[str, list[float]]:
    """Return the latest measurements."""
    losses: dict[str, list[float]] = json.loads(RESULTS.read_text("utf-8"))
    return losses


# ---- what the page shows ---------------------------------------------------------------------------------------------


def rate_table(losses: Losses) -> str:
    """Return the held-out loss of AdamW and Muon by learning rate."""
    head = "| held-out loss, nats per byte | " + " | ".join(f"rate {rate:g}" for rate in RATES) + " |"
    rows = [
        f"| {title} | " + " | ".join(f"{losses[CurveRun(kind, rate).name][-1]:.3f}" for rate in RATES) + " |"
        for kind, title in (("adam", "AdamW"), ("muon", "Muon for matrices, AdamW for the rest"))
    ]
    return "\n".join([head, "|---" * (len(RATES) + 1) + "|", *rows])


def optimizer_bands(losses: Losses) -> str:
    """Return a table of the distances of AdamW8bit, and AdamW on 2 ranks, from AdamW on one, in loss."""
    runs = (
        (CurveRun("adam"), "AdamW"),
        (CurveRun("adam", ranks=2), "AdamW, 2 ranks"),
        (CurveRun("adamw8bit"), "AdamW8bit"),
    )
    return band_table(losses, runs)


def format_bands(losses: Losses) -> str:
    """Return a table of the distances of rounded weights from exact ones, in loss."""
    runs = [(run, f"`{name}`") for name, run in FORMATS.items()]
    return band_table(losses, [(CurveRun("adam"), "float32"), *runs])


def band_table(losses: Losses, runs: Sequence[tuple[CurveRun, str]]) -> str:
    """Return a table of the distances of titled runs from AdamW on one rank, in loss."""
    lines = ["| run | largest gap of 20 steps | mean gap | held-out loss |", "|---|---:|---:|---:|"]
    wanted = losses[CurveRun("adam").name]
    for run, title in runs:
        own = losses[run.name]
        gaps = [a - b for a, b in zip(own[:-1], wanted[:-1], strict=True)]
        largest, average = max(gaps, key=abs), mean(gaps)
        lines.append(f"| {title} | {largest:+.4f} | {average:+.5f} | {own[-1]:.4f} |")
    return "\n".join(lines)


def plot(path: Path, losses: Losses) -> None:
    """Draw AdamW and Muon, each at its best learning rate by held-out loss, as a PNG."""
    figure = Figure(figsize=(8.0, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    best = {
        kind: min((CurveRun(kind, rate) for rate in RATES), key=lambda run: losses[run.name][-1])
        for kind in ("adam", "muon")
    }
    shown = (
        (best["adam"], f"AdamW, rate {best['adam'].rate:g}", "#1f77b4"),
        (best["muon"], f"Muon and AdamW, rate {best['muon'].rate:g}", "#d62728"),
    )
    for run, label, colour in shown:
        values = losses[run.name][:-1]
        axes.plot(range(WINDOW, STEPS + 1, WINDOW), values, color=colour, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte, mean of 20 steps)", ylim=(None, 3.5))
    axes.set_title("The tiny model under AdamW and under Muon", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="upper right")
    figure.savefig(path)


def plot_formats(path: Path, losses: Losses) -> None:
    """Draw the gap of each weight format to exact weights, a mean over the last 200 steps, as a PNG."""
    figure = Figure(figsize=(8.0, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    wanted, last = losses[CurveRun("adam").name][:-1], 200 // WINDOW
    for name, run in FORMATS.items():
        gaps = [a - b for a, b in zip(losses[run.name][:-1], wanted, strict=True)]
        means = [mean(gaps[end - last : end]) for end in range(last, len(gaps) + 1)]
        axes.plot(range(200, STEPS + 1, WINDOW), means, label=name)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel="optimizer step", ylabel="gap to float32 (nats per byte)")
    axes.set_title("The tiny model with rounded weights, means of 200 steps", fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9, ncols=4)
    figure.savefig(path)


def main() -> None:
    """Train the runs that the file lacks, and print the tables."""
    found = published() if RESULTS.exists() else {}
    for run in RUNS:
        if run.name not in found:
            found[run.name] = measure(run)
            RESULTS.write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(run.name, found[run.name][-1], flush=True)
    print(rate_table(found), optimizer_bands(found), format_bands(found), sep="\n\n")


if __name__ == "__main__":
    main()
