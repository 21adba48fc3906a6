"""The picture of docs/plan.md: memory of one rank over a planned step."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_fsdp.plan.machine import GIB
from megatron_fsdp.plan.planning import Plan
from megatron_fsdp.plan.report import moment_words

_KINDS = {  # of memory, and their colours
    "held between steps": "#4c566a",
    "main gradients": "#81a1c1",
    "gathered weights": "#5e81ac",
    "buckets and scratch": "#88c0d0",
    "reductions and casts": "#b48ead",
    "activations": "#d08770",
}


def draw_memory(plan: Plan, path: Path) -> None:
    """Draw memory over a step, stacked by kind, and a device's memory; the file's suffix is the format."""
    figure = Figure(figsize=(10, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    held = plan.memory.resting_bytes + plan.memory.input_bytes
    stacks = [
        (
            held,
            each.gradient_bytes,
            each.gathered_bytes,
            each.reduction_bytes,
            each.passing_bytes,
            each.activation_bytes,
        )
        for each in plan.step.moments
    ]
    times = [1e3 * moment.time_s for moment in plan.step.moments]
    in_gib = [[count / GIB for count in kind] for kind in zip(*stacks, strict=True)]
    axes.stackplot(times, *in_gib, labels=_KINDS, colors=_KINDS.values())
    peak, top = plan.memory.peak, plan.memory.peak_bytes / GIB
    at = (1e3 * peak.time_s, top)
    axes.plot(*at, "o", color="black", markersize=4)
    told = f"{top:.1f} GiB, {moment_words(peak.label)}"
    axes.annotate(told, at, textcoords="offset points", xytext=(6, 6))
    usable = plan.machine.usable_bytes / GIB
    if usable < 3 * top:  # else the line would press the rest flat
        axes.axhline(usable, color="#bf616a", linestyle="--", label=f"usable on {plan.machine.name}")
        top = max(top, usable)
    axes.set_xlim(0, max(times) or 1)
    axes.set_ylim(0, 1.12 * top)
    axes.set_xlabel("time in the step, ms (assumed machine)")
    axes.set_ylabel("GiB on one rank")
    setup = plan.setup
    title = f"{plan.workload.name} on {setup.ranks.world:,} ranks, {setup.strategy.name}, recompute {setup.recompute}"
    axes.set_title(title, fontsize=11)
    figure.legend(loc="outside lower center", fontsize=9, ncols=4)
    figure.savefig(path)
