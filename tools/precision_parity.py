"""Measure the effect of 16-bit gradients on training; tables and picture of docs/precision.md.

Trains the model of examples/coming_from on the same text, 50 steps on 2 ranks, once per policy. The losses of each run
are compared step by step with those of a run whose gradients travel and accumulate in float32.

    python -m tools.precision_parity          # measure again, and write the losses into benchmarks/results
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.precision import resolve_precision
from tools.on_ranks import on_ranks

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "precision-parity.json"
RANKS, STEPS, MICROBATCHES = 2, 50, 2
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}
STAGES = ("compute, all-gather", "reduce-scatter", "sum over ranks", "main gradient", "main weights, optimizer state")

Losses = Mapping[str, Sequence[float]]
"""The loss of every step over all ranks, in nats per token, by the name of the run."""


@dataclass(frozen=True)
class Policy:
    """One run."""

    name: str  # for the table; unique
    dtype: torch.dtype  # what the model computes in
    policy: MixedPrecisionPolicy  # the other dtypes
    reference: str  # name of the run that this one is compared with; its own: it is a reference
    colour: str | None = None  # in the picture; None: not drawn


POLICIES = (
    Policy("fp32", FP32, MixedPrecisionPolicy(FP32, FP32, FP32), "fp32"),
    Policy("fp32, again", FP32, MixedPrecisionPolicy(FP32, FP32, FP32), "fp32"),
    Policy("fp32, sent in bf16", FP32, MixedPrecisionPolicy(FP32, FP32, BF16), "fp32", "#1f77b4"),
    Policy("fp32, sent in fp16", FP32, MixedPrecisionPolicy(FP32, FP32, FP16), "fp32", "#2ca02c"),
    Policy("bf16", BF16, MixedPrecisionPolicy(FP32, FP32, FP32), "bf16"),
    Policy("bf16, sent in bf16", BF16, MixedPrecisionPolicy(FP32, FP32, BF16), "bf16"),
    Policy("bf16, all gradients bf16", BF16, MixedPrecisionPolicy(FP32, BF16, BF16), "bf16", "#ff7f0e"),
    Policy("bf16 everywhere", BF16, MixedPrecisionPolicy(None, None, None), "bf16", "#d62728"),
)


def measure(steps: int = STEPS) -> dict[str, list[float]]:
    """Train with every policy. Collective over the default process group."""
    return {policy.name: _losses_of(policy, steps) for policy in POLICIES}


def _losses_of(policy: Policy, steps: int) -> list[float]:
    folder = str(ROOT / "examples" / "coming_from")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from workload import Block, LanguageModel, batch  # type: ignore[import-not-found]

    torch.manual_seed(0)
    module = LanguageModel().to(policy.dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    model, optimizer = fully_shard(
        module, optimizer, fsdp_unit_modules=[Block], mixed_precision_policy=policy.policy, device="cpu"
    )
    losses = []
    for step in range(steps):
        whole = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            loss = model(*batch(step * MICROBATCHES + microbatch, torch.device("cpu"))) / MICROBATCHES
            loss.backward()
            whole += loss.detach().float() / dist.get_world_size()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(whole)
        losses.append(whole.item())
    return losses


def published() -> dict[str, list[float]]:
    """Return the latest losses."""
    losses: dict[str, list[float]] = json.loads(RESULTS.read_text("utf-8"))
    return losses


def gaps(losses: Losses, policy: Policy) -> list[float]:
    """Return each step's distance from the reference's loss, in nats per token."""
    return [abs(a - b) for a, b in zip(losses[policy.name], losses[policy.reference], strict=True)]


def stage_table() -> str:
    """Return the dtype of every stage, resolved as the engine does."""
    lines = [f"| run | {' | '.join(STAGES)} |", "|---" * (len(STAGES) + 1) + "|"]
    for policy in POLICIES:
        if policy.name != "fp32, again":
            found = resolve_precision(policy.policy, policy.dtype)
            added = torch.promote_types(found.grad_comm, FP32)
            stages = (found.compute, found.grad_comm, added, found.main_grads, found.main_params)
            lines.append(f"| {policy.name} | {' | '.join(SHORT[dtype] for dtype in stages)} |")
    return "\n".join(lines)


def gap_table(losses: Losses) -> str:
    """Return a table of each run's largest and mean distance from its reference."""
    lines = [
        "| run | compared with | first loss | last loss | largest gap | mean gap |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for policy in POLICIES:
        own, distances = losses[policy.name], gaps(losses, policy)
        compared = ("-", "-", "-")
        if policy.name != policy.reference:
            compared = (policy.reference, f"{max(distances):.2g}", f"{sum(distances) / len(distances):.2g}")
        lines.append(
            f"| {policy.name} | {compared[0]} | {own[0]:.3f} | {own[-1]:.3f} | {compared[1]} | {compared[2]} |"
        )
    return "\n".join(lines)


def plot(path: Path, losses: Losses) -> None:
    """Draw the distance of every run from its reference, as a PNG."""
    figure = Figure(figsize=(8.0, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for policy in POLICIES:
        if policy.colour is not None:
            averaged = _smoothed(gaps(losses, policy))
            label = f"{policy.name}, against {policy.reference}"
            axes.plot(range(1, len(averaged) + 1), averaged, color=policy.colour, label=label)
    axes.set(xlabel="optimizer step", ylabel="gap of the loss (nats per token)", yscale="log", ylim=(5e-7, 1.0))
    axes.set_title("What rounding gradients and weights to 16 bits does to the loss", fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9, ncols=2)
    figure.savefig(path)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean; the distance of a single step is mostly noise."""
    windows = (values[max(0, end - 5) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(on_ranks(RANKS, measure)) + "\n", encoding="utf-8")
    print(gap_table(published()))
