"""Published runs beside the planner's predictions, under one set of assumptions: a table of docs/plan.md.

python -m tools.published_runs       # prints it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from benchmarks.page import table
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.plan.machine import GIB, Machine, find_machine
from megatron_fsdp.plan.models import build_meta_model
from megatron_fsdp.plan.parallel import DecoderShare
from megatron_fsdp.plan.planning import Plan, plan_workload, share_workload
from megatron_fsdp.plan.setup import OPTIMIZERS, ParallelRanks, Setup


@dataclass(frozen=True)
class PublishedRun:
    """A run with published measurements, and its plan."""

    name: str
    model: str | Mapping[str, Any]  # a preset's name, or a config
    setup: Setup  # ranks and options, as far as published
    machine: Machine
    batch: tuple[int, int]  # sequences of a microbatch, and tokens of each
    figure: tuple[float, str]  # as published, and its unit: one of `_UNITS`
    source: str
    memory_gib: float | None = None  # at the peak, as published; None: only that it fitted

    @cached_property
    def plan(self) -> Plan:
        """The plan, by formulas only; fused kernels stand for compiled ones."""
        share = DecoderShare(build_meta_model(self.model, torch.bfloat16), self.setup.ranks, *self.batch)
        return plan_workload(share_workload(self.name, share), self.setup, self.machine)

    @property
    def predicted(self) -> float:
        """The prediction, in the unit of the published figure."""
        return _UNITS[self.figure[1]](self.plan)

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.figure[0] - 1


COLUMNS = ("run", "predicted", "published", "error", "predicted peak", "published peak", "unit", "source")


def published_row(run: PublishedRun) -> tuple[str, ...]:
    """Return the cells of the table's row: `COLUMNS`."""
    figure, unit = run.figure
    digits = 2 if unit == "s per step" else 0
    limit = f"fits {run.machine.memory_bytes / GIB:.0f} GiB"
    return (
        run.name,
        f"{run.predicted:,.{digits}f}",
        f"{figure:,.{digits}f}",
        f"{100 * run.error:+.0f} %",
        f"{run.plan.memory.peak_bytes / GIB:.1f} GiB",
        limit if run.memory_gib is None else f"{run.memory_gib:.1f} GiB",
        unit,
        run.source,
    )


def _tflops(plan: Plan) -> float:
    return plan.utilisation * plan.machine.flops / 1e12


_UNITS: Mapping[str, Callable[[Plan], float]] = {
    "tokens/s": lambda plan: plan.tokens_per_s / plan.setup.ranks.world,
    "s per step": lambda plan: plan.step_s,
    "TFLOP/s": _tflops,
    "TFLOP/s with repeats": lambda plan: _tflops(plan) * 4 / 3,
}
"""All per rank. Megatron's figures of 2021 count the forward that full recomputation repeats."""


# ---- the runs -------------------------------------------------------------------------------------------------------


def _gpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Return a config with the shape of Megatron's GPT: a vocabulary of 51,200, 2,048 learned positions."""
    fields = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 51200, "n_positions": 2048}
    return {"model_type": "gpt2", **fields}


_BASE = Setup(
    ParallelRanks(1),
    policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    optimizer=OPTIMIZERS["adamw-fused"],
)
_MEGATRON = replace(_BASE, strategy=ShardingStrategy.no_shard, accumulation="last")
_A100, _H100 = find_machine("a100"), find_machine("h100")
_GPT_175B, _GPT_530B, _GPT_1T = _gpt(12288, 96, 96), _gpt(20480, 105, 128), _gpt(25600, 128, 160)


def _dubey() -> Iterator[PublishedRun]:
    # Gradients are reduced in fp32 there, once for a few microbatches of a virtual stage; in 16 bits for each here.
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
    base = replace(_BASE, strategy=ShardingStrategy.optim_grads, policy=policy)
    source = "Dubey et al. 2024, table 4; 8 virtual stages assumed"
    for name, ranks, microbatches, tokens, tflops in (
        ("8,192 H100, tp 8, pp 16", ParallelRanks(64, tp=8, pp=16), 32, 8192, 430),
        ("16,384 H100, tp 8, pp 16", ParallelRanks(128, tp=8, pp=16), 16, 8192, 400),
        ("16,384 H100, tp 8, cp 16, pp 16, 131,072 tokens", ParallelRanks(8, tp=8, cp=16, pp=16), 16, 131072, 380),
    ):
        setup = replace(base, ranks=ranks, microbatches=microbatches, virtual_stages=8)
        figure = (tflops, "TFLOP/s")
        yield PublishedRun(f"Llama-3 405B, {name}", "llama-3-405b", setup, _H100, (1, tokens), figure, source)


def _torchtitan() -> Iterator[PublishedRun]:
    # Its H100 have slower memory and less power; its pages put their peak between SXM and NVL, whose stands here.
    machine = _H100.but({"memory_bytes": 96 * GIB, "memory_bytes_per_s": 2.4e12, "flops": 835e12, "fp8_flops": 1671e12})
    async_tp = "torchtitan, June 2025, page on asynchronous tensor parallelism, full recomputation"
    compiled = "torchtitan, December 2024, compiled, selective recomputation"
    full, selective = replace(_BASE, recompute="full"), replace(_BASE, recompute="every_second_product")
    for name, setup, rows, speed, source, memory_gib in (
        ("70B, 256 H100, fsdp 32, tp 8", replace(full, ranks=ParallelRanks(32, tp=8)), 16, 597, async_tp, None),
        ("8B, 8 H100", replace(selective, ranks=ParallelRanks(8)), 2, 6667, compiled, 77.0),
        ("8B, 128 H100", replace(selective, ranks=ParallelRanks(128)), 2, 6514, compiled, 62.0),
        ("8B, 8 H100, fp8", replace(selective, ranks=ParallelRanks(8), fp8=True), 2, 8532, compiled, 76.8),
    ):
        model = f"llama-3-{name.split('B')[0]}b"
        figure = (speed, "tokens/s")
        yield PublishedRun(f"Llama-3 {name}", model, setup, machine, (rows, 8192), figure, source, memory_gib)


def _korthikanti() -> Iterator[PublishedRun]:
    source = "Korthikanti et al. 2022, table 5; fused attention stands for recomputing its core"
    full = replace(_MEGATRON, recompute="full", sequence_parallel=False)
    for name, model, base, (pp, microbatches, virtual), rows, seconds in (
        ("GPT 22B, 8 A100, tp 8", _gpt(6144, 48, 64), _MEGATRON, (1, 1, 1), 4, 1.10),
        ("GPT-3 175B, 64 A100, tp 8, pp 8", _GPT_175B, _MEGATRON, (8, 64, 3), 1, 13.75),
        ("GPT-3 175B, 64 A100, full recomputation", _GPT_175B, full, (8, 64, 3), 1, 18.13),
        ("GPT 530B, 280 A100, tp 8, pp 35", _GPT_530B, _MEGATRON, (35, 280, 3), 1, 37.83),
        ("GPT 1T, 512 A100, tp 8, pp 64", _GPT_1T, _MEGATRON, (64, 512, 1), 1, 71.49),
    ):
        setup = replace(base, ranks=ParallelRanks(1, tp=8, pp=pp), microbatches=microbatches, virtual_stages=virtual)
        yield PublishedRun(name, model, setup, _A100, (rows, 2048), (seconds, "s per step"), source)


def _narayanan() -> Iterator[PublishedRun]:
    base = replace(_MEGATRON, recompute="full", sequence_parallel=False)
    for name, model, replicas, pp, microbatches in (
        ("GPT 530B, 2,520 A100, tp 8, pp 35", _GPT_530B, 9, 35, 280),
        ("GPT 1T, 3,072 A100, tp 8, pp 64", _GPT_1T, 6, 64, 512),
    ):
        setup = replace(base, ranks=ParallelRanks(replicas, tp=8, pp=pp), microbatches=microbatches)
        figure = (163, "TFLOP/s with repeats")
        yield PublishedRun(name, model, setup, _A100, (1, 2048), figure, "Narayanan et al. 2021, table 1")


def _deepseek() -> PublishedRun:
    setup = replace(_BASE, ranks=ParallelRanks(128, pp=16, ep=64), microbatches=120, virtual_stages=2, fp8=True)
    setup = replace(setup, recompute="every_second_product", overlap_exchanges=True)
    name = "DeepSeek-V3, 2,048 H800, pp 16, ep 64, fp8"
    figure = (1e12 / (180e3 * 3600), "tokens/s")
    source = "technical report of 2024: 180,000 H800 hours per 10^12 tokens; DualPipe as 2 virtual stages"
    return PublishedRun(name, "deepseek-v3", setup, find_machine("h800"), (1, 4096), figure, source)


PUBLISHED = (*_dubey(), *_torchtitan(), *_korthikanti(), *_narayanan(), _deepseek())


if __name__ == "__main__":
    print(table(COLUMNS, [published_row(run) for run in PUBLISHED]))
