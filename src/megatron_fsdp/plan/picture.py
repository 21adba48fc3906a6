"""A picture of a rank's memory over a step."""

from __future__ import annotations

from pathlib import Path

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.plan.planning import Plan
from megatron_fsdp.plan.report import GIB

_KINDS = (
    ("held between steps", "#4c566a"),
    ("main gradients", "#81a1c1"),
    ("gathered weights", "#5e81ac"),
    ("buckets and scratch", "#88c0d0"),
    ("reductions and casts", "#b48ead"),
    ("activations", "#d08770"),
)


def draw_memory(plan: Plan, path: Path) -> None:
    """Draw memory over a step, stacked by kind, with what a device has.

    Args:
        plan: What to draw.
        path: The file; its suffix says the format, such as .png or .svg.

    Raises:
        ConfigurationError: matplotlib is missing (MissingPackageError), or knows no such format.
    """
    require("matplotlib", "a picture", instead="leave the picture out")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    moments = plan.step.moments
    times = [1e3 * moment.time_s for moment in moments]
    held = plan.memory.held.at_all_times + plan.memory.input_bytes
    rows = [
        [held] * len(moments),
        [moment.gradient_bytes for moment in moments],
        [moment.gathered_bytes for moment in moments],
        [moment.bucket_bytes for moment in moments],
        [moment.passing_bytes for moment in moments],
        [moment.activation_bytes for moment in moments],
    ]
    figure = Figure(figsize=(10, 4.5), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    in_gib = [[count / GIB for count in row] for row in rows]
    axes.stackplot(times, *in_gib, labels=[name for name, _ in _KINDS], colors=[colour for _, colour in _KINDS])
    peak = plan.memory.peak
    axes.plot([1e3 * peak.time_s], [plan.memory.peak_bytes / GIB], "o", color="black", markersize=4)
    axes.annotate(
        f"{plan.memory.peak_bytes / GIB:.1f} GiB at {peak.label.removesuffix('+')}",
        (1e3 * peak.time_s, plan.memory.peak_bytes / GIB),
        textcoords="offset points",
        xytext=(6, 6),
    )
    usable = plan.machine.usable_bytes / GIB
    top = plan.memory.peak_bytes / GIB
    if usable < 3 * top:  # else the line would press the rest flat
        axes.axhline(usable, color="#bf616a", linestyle="--", label=f"usable on {plan.machine.name}")
        top = max(top, usable)
    axes.set_xlim(0, max(times) or 1)
    axes.set_ylim(
        0, 1.12 * max(plan.memory.peak_bytes / GIB, usable if usable < 3 * plan.memory.peak_bytes / GIB else 0)
    )
    axes.set_xlabel("time in the step, ms (assumed machine)")
    axes.set_ylabel("GiB on one rank")
    setup = plan.setup
    axes.set_title(
        f"{plan.workload.name} on {setup.ranks.world:,} ranks, {setup.strategy.name}, recompute {setup.recompute}",
        fontsize=11,
    )
    axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    if path.suffix.lstrip(".") not in canvas.get_supported_filetypes():
        raise ConfigurationError(f"{path.name} has no suffix of a picture; give .png, .svg or .pdf")
    figure.savefig(path)
