"""Measures what 16-bit gradients do to a training run, and writes it into docs/precision.md.

Trains the trainer's tiny model on real text for 50 steps on 2 ranks, once per policy, with the same seed; the losses of
each run are compared step by step with those of the run whose gradients travel in float32.

Usage: python tools/precision_parity.py [--steps 50] [--docs docs]
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.config.precision import resolve_precision
from megatron_fsdp.train.data.batches import make_feed
from megatron_fsdp.train.data.preparation import TokenData, prepare_data
from megatron_fsdp.train.data.tokenizer import ByteVocabulary
from megatron_fsdp.train.engines.sharded import build
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.loop import Run, train_step
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.layers import Layer, assemble
from megatron_fsdp.train.options.presets import find_preset
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.recovery.faults import NanGuard

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NUM_RANKS, STEPS, MICROBATCHES = 2, 50, 2
BEGIN, END = "<!-- written by tools/precision_parity.py -->", "<!-- end -->"
STAGES = (
    "compute, gather",
    "gradient from autograd",
    "travels",
    "added over ranks",
    "added over microbatches",
    "handed to the optimizer",
    "main weights, optimizer state",
)
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}


@dataclass(frozen=True)
class Policy:
    """One run.

    Attributes:
        name: For the table; unique.
        dtype: What the model computes in, "fp32" or "bf16".
        policy: The other dtypes.
        reference: Name of the run that this one is compared with.
    """

    name: str
    dtype: str
    policy: MixedPrecisionPolicy
    reference: str


POLICIES = (
    Policy("fp32", "fp32", MixedPrecisionPolicy(FP32, FP32, FP32), "fp32"),
    Policy("fp32, again", "fp32", MixedPrecisionPolicy(FP32, FP32, FP32), "fp32"),
    Policy("fp32, bf16 exchange", "fp32", MixedPrecisionPolicy(FP32, FP32, BF16), "fp32"),
    Policy("fp32, fp16 exchange", "fp32", MixedPrecisionPolicy(FP32, FP32, FP16), "fp32"),
    Policy("bf16 compute", "bf16", MixedPrecisionPolicy(FP32, FP32, FP32), "bf16 compute"),
    Policy("bf16 compute, against fp32", "bf16", MixedPrecisionPolicy(FP32, FP32, FP32), "fp32"),
    Policy("bf16 compute, bf16 exchange", "bf16", MixedPrecisionPolicy(FP32, FP32, BF16), "bf16 compute"),
    Policy("bf16 compute, all gradients bf16", "bf16", MixedPrecisionPolicy(FP32, BF16, BF16), "bf16 compute"),
    Policy("bf16 everywhere", "bf16", MixedPrecisionPolicy(None, None, None), "bf16 compute"),
)


# ---- training ------------------------------------------------------------------------------------------------------


def measure(steps: int, folder: Path) -> dict[str, list[float]]:
    """Train with every policy; the ranks of the default process group call it together.

    Args:
        steps: Of each run.
        folder: For the tokens.

    Returns:
        The loss of each step over all ranks, in nats per token, by the name of the policy.
    """
    rank = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), launcher_pid=os.getppid())
    tokens = prepare_data(job_of(POLICIES[0], steps, rank), folder, rank)
    return {policy.name: losses_of(policy, steps, rank, tokens) for policy in POLICIES}


def losses_of(policy: Policy, steps: int, rank: Rank, tokens: TokenData) -> list[float]:
    """The losses of one run, the same on every rank."""
    job = job_of(policy, steps, rank)
    trained = build(job, ByteVocabulary().vocab_size, rank)
    feed = make_feed(tokens, job, trained.data_index)
    run, guard = Run(job, trained, tokens, feed, rank), NanGuard(0, print)
    done = [Progress(step, step * job.batch.total) for step in range(steps)]
    return [train_step(run, progress, guard, (False, False)).loss for progress in done]


def job_of(policy: Policy, steps: int, rank: Rank) -> Job:
    """The trainer's tiny model, sharded under another policy than the trainer would choose."""
    preset = Layer("preset tiny", find_preset("tiny"))
    micro: int = preset.values["micro_batch_size"]
    asked = {
        "train_iters": steps,
        "bf16": policy.dtype == "bf16",
        "auto_bf16": False,
        "global_batch_size": MICROBATCHES * micro * rank.count,
    }
    job = resolve(assemble((preset, Layer("command line", asked))), World(rank.count, "cpu"))
    dtypes = {
        "megatron_fsdp_main_params_dtype": policy.policy.main_params_dtype,
        "megatron_fsdp_main_grads_dtype": policy.policy.main_grads_dtype,
        "megatron_fsdp_grad_comm_dtype": policy.policy.grad_comm_dtype,
    }
    return replace(job, ddp=replace(job.ddp, **dtypes))


def _rank_main(index: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-point", rank=index, world_size=NUM_RANKS)
    losses = measure(steps, Path(folder))
    if index == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def measure_in_new_processes(steps: int) -> dict[str, list[float]]:
    """Start the ranks, and return what `measure` gives."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank_main, (steps, folder), nprocs=NUM_RANKS)
        return json.loads(Path(folder, "losses.json").read_text())


# ---- writing -------------------------------------------------------------------------------------------------------


def gaps(losses: Mapping[str, Sequence[float]], policy: Policy) -> list[float]:
    """Absolute distance of each step's loss to that of the reference, in nats per token."""
    pairs = zip(losses[policy.name], losses[policy.reference], strict=True)
    return [abs(loss - expected) for loss, expected in pairs]


def stage_table() -> str:
    """The dtype of every stage, resolved as the engine does."""
    lines = [f"| run | {' | '.join(STAGES)} |", "|---" * (len(STAGES) + 1) + "|"]
    for policy in POLICIES:
        if policy.name in ("fp32, again", "bf16 compute, against fp32"):
            continue
        precision = resolve_precision(policy.policy, FP32 if policy.dtype == "fp32" else BF16)
        added = torch.promote_types(precision.grad_comm, FP32)
        stages = (
            precision.compute,
            precision.compute,
            precision.grad_comm,
            added,
            precision.main_grads,
            precision.main_params,
            precision.main_params,
        )
        lines.append(f"| {policy.name} | {' | '.join(SHORT[dtype] for dtype in stages)} |")
    return "\n".join(lines)


def gap_table(losses: Mapping[str, Sequence[float]]) -> str:
    """Largest and mean distance of the losses of each run to those of its reference."""
    lines = ["| run | compared with | last loss | largest gap | mean gap |", "|---|---|---:|---:|---:|"]
    for policy in POLICIES:
        distances = gaps(losses, policy)
        if policy.name == policy.reference:
            continue
        lines.append(
            f"| {policy.name} | {policy.reference} | {losses[policy.name][-1]:.4f} "
            f"| {max(distances):.2g} | {sum(distances) / len(distances):.2g} |"
        )
    return "\n".join(lines)


def render(losses: Mapping[str, Sequence[float]]) -> str:
    """The measured part of docs/precision.md."""
    steps, first = len(losses["fp32"]), losses["fp32"]
    setting = (
        f"{steps} AdamW steps of {MICROBATCHES} microbatches on {NUM_RANKS} ranks, strategy 3, the trainer's tiny "
        f"model on source text of the Python standard library; the loss of the fp32 run falls from {first[0]:.3f} "
        f"to {first[-1]:.3f} nats per token. Gaps are absolute, in nats per token."
    )
    return "\n\n".join(
        [
            BEGIN,
            stage_table(),
            setting,
            gap_table(losses),
            "![Losses of all runs, and their distance to the run with float32 exchange](images/precision_parity.png)",
            END,
        ]
    )


def insert(document: str, part: str) -> str:
    """Put the measured part in its place in the document."""
    before, rest = document.split(BEGIN)
    return before + part + rest.split(END)[1]


def plot(path: Path, losses: Mapping[str, Sequence[float]]) -> None:
    """Write a PNG: losses on the left, distances to the reference on the right."""
    figure = Figure(figsize=(11.0, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for policy in POLICIES:
        if policy.name in ("fp32, again", "bf16 compute, against fp32"):
            continue
        steps = range(1, len(losses[policy.name]) + 1)
        (line,) = left.plot(steps, losses[policy.name], linewidth=1.2, label=policy.name)
        if policy.name != policy.reference:
            label = f"{policy.name} - {policy.reference}"
            right.plot(steps, gaps(losses, policy), color=line.get_color(), linewidth=1.2, label=label)
    left.set(xlabel="step", ylabel="loss (nats per token)")
    right.set(xlabel="step", ylabel="distance (nats per token)", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--docs", type=Path, default=Path(__file__).parent.parent / "docs")
    arguments = parser.parse_args()
    losses = measure_in_new_processes(arguments.steps)
    document = arguments.docs / "precision.md"
    document.write_text(insert(document.read_text(), render(losses)))
    plot(arguments.docs / "images" / "precision_parity.png", losses)
    print(gap_table(losses))


if __name__ == "__main__":
    main()
