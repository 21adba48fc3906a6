"""Draws timelines as a picture: ranks below each other, in each the compute side and the lanes, coloured by phase."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_fsdp.optional_packages import require
from megatron_fsdp.trace.files import stack_rows
from megatron_fsdp.trace.summary import COLUMNS, common_steps, hidden_part, on_one_clock, summarise
from megatron_fsdp.trace.timeline import LANES, Interval, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[str, str] = {
    "forward": "#9ecae1",
    "backward": "#4a90c4",
    "copy": "#b39ddb",
    "gather": "#66bb6a",
    "reduce": "#f6a623",
    "wait": "#d62728",
    "update": "#8d6e63",
    "other": "#bdbdbd",
}
"""Kind of work -> its colour. Gathers and reductions have the same on the compute side, where they are launched, as on
their lanes."""

_WIDTH_IN, _DPI = 15.0, 110
_CHARACTER_PX = 5.0
_MS = 1e6
_MAX_ROWS = 4  # of a lane; what is in flight besides shares the last one


@dataclass(frozen=True)
class _Bar:
    """A stretch of one colour in one row."""

    row: float
    height: float
    kind: str
    interval: Interval
    label: str = ""


def timeline_png(
    path: str | os.PathLike[str], timelines: Sequence[Timeline], steps: Sequence[int] | None = None
) -> None:
    """Draw one or two steps as a PNG.

    Args:
        path: The PNG.
        timelines: Of one or more ranks.
        steps: Which ones, of those that all ranks recorded; None: the last one.

    Raises:
        MissingPackageError: matplotlib is missing.
        TraceError: A step was not recorded.
    """
    require("matplotlib", "a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = common_steps(timelines)[-1:] if steps is None else [common_steps(timelines, step)[0] for step in steps]
    shown = on_one_clock(timelines)
    panels = [_bars(timeline, chosen) for timeline in shown]
    rows = [1 + max((bar.row for bar in bars), default=0) for bars, _ in panels]
    figure = Figure(
        figsize=(_WIDTH_IN, 1.2 + sum(0.55 + 0.34 * count for count in rows)), dpi=_DPI, layout="constrained"
    )
    FigureCanvasAgg(figure)
    every: Any = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=[1 + row for row in rows])
    start_ns = min(_windows(timeline, chosen)[0][0] for timeline in shown)
    end_ns = max(_windows(timeline, chosen)[-1][1] for timeline in shown)
    for axes, timeline, (bars, ticks) in zip(every[:, 0], shown, panels, strict=True):
        _draw(axes, bars, ticks, (start_ns, end_ns))
        axes.set_title(_title(timeline, chosen), loc="left", fontsize=10)
    every[-1, 0].set_xlabel("milliseconds")
    _legend(figure)
    figure.savefig(path)


def _windows(timeline: Timeline, steps: Sequence[int]) -> list[Interval]:
    return [(window.start_ns, window.end_ns) for window in timeline.steps if window.index in steps]


def _title(timeline: Timeline, steps: Sequence[int]) -> str:
    part = hidden_part(step for step in summarise(timeline).steps if step.step in steps)
    said = "nothing sent" if part is None else f"{part:.0%} of communication hidden"
    return f"rank {timeline.rank}, step {' and '.join(map(str, steps))}: {said}"


def _bars(timeline: Timeline, steps: Sequence[int]) -> tuple[list[_Bar], dict[float, str]]:
    """Return the bars to draw, those at the back first, and the names of rows."""
    bars, ticks, row = [], {0.5: "compute"}, 2
    around = _that_hold_compute(timeline.spans)
    for place, span in enumerate(timeline.spans):  # nested spans come later, and are drawn on top
        if span.step in steps:
            computes = COLUMNS[span.phase] == "compute"
            label = timeline.units[span.unit] if computes and place not in around else ""
            kind = span.phase if computes else COLUMNS[span.phase]
            bars.append(_Bar(0, 2, kind, (span.start_ns, span.end_ns), label))
    for lane in LANES:
        flying = [
            (one, one.in_flight)
            for one in timeline.collectives
            if one.lane == lane and one.step in steps and one.in_flight is not None
        ]
        below = [min(line, _MAX_ROWS - 1) for line in stack_rows([interval for _, interval in flying])]
        for (one, interval), line in zip(flying, below, strict=True):
            bars.append(_Bar(row + line, 1, one.purpose, interval, timeline.units[one.unit]))
        if below:
            ticks[row + max(below) / 2] = f"{lane} lane"
            row += 1 + max(below)
    return bars, ticks


def _that_hold_compute(spans: Sequence[Span]) -> set[int]:
    """Return the places of phases that contain another forward or backward: their names would overlap."""
    found: set[int] = set()
    around = [-1] * (2 + max((span.depth for span in spans), default=0))
    for place, span in enumerate(spans):
        if COLUMNS[span.phase] == "compute":
            found.update(
                holder for holder in around[: span.depth] if holder >= 0 and spans[holder].end_ns >= span.end_ns
            )
        around[span.depth] = place
    return found


def _draw(axes: Axes, bars: Sequence[_Bar], ticks: dict[float, str], window: Interval) -> None:
    start_ns, end_ns = window
    rows: dict[tuple[float, float], list[_Bar]] = defaultdict(list)
    for bar in bars:
        rows[bar.row, bar.height].append(bar)
        _write(axes, bar, window)
    for (row, height), here in rows.items():
        stretches = [((bar.interval[0] - start_ns) / _MS, (bar.interval[1] - bar.interval[0]) / _MS) for bar in here]
        colours = [COLOURS[bar.kind] for bar in here]
        axes.broken_barh(stretches, (row - 0.45, height - 0.1), facecolors=colours, edgecolors="white", linewidth=0.25)
    axes.set_xlim(0, (end_ns - start_ns) / _MS)
    axes.set_ylim(1 + max((bar.row + bar.height - 1 for bar in bars), default=0) - 0.4, -0.6)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _write(axes: Axes, bar: _Bar, window: Interval) -> None:
    """Write the unit's name on its bar, or the last part of the name, where there is room."""
    room_px = (bar.interval[1] - bar.interval[0]) / (window[1] - window[0]) * _WIDTH_IN * _DPI * 0.9
    label = bar.label
    if len(label) * _CHARACTER_PX > room_px:
        label = label.rpartition(".")[2]
    if label and len(label) * _CHARACTER_PX <= room_px:
        middle = (sum(bar.interval) / 2 - window[0]) / _MS
        axes.text(middle, bar.row + bar.height / 2 - 0.5, label, ha="center", va="center", fontsize=6, clip_on=True)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="outside upper right",
        ncols=len(COLOURS),
        fontsize=8,
        frameon=False,
    )
