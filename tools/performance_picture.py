"""The picture of docs/performance.md: step times and peaks beside FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_BARS = {  # contenders, their titles and colours
    "ours-3": ("this engine", "#5e81ac"),
    "ours-fsdp2": ("megatron_fsdp.fsdp2", "#88c0d0"),
    "fsdp2": ("FSDP2", "#d08770"),
    "ddp": ("DDP", "#b0b6c2"),
}
_RUNS = {
    "many-small-2": "48 small\nlayers",
    "large-2": "8 layers of\nwidth 512",
    "llama-2": "Llama",
    "moe-2": "Mixtral",
}
_MEBIBYTE = 2**20


def draw_performance(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw step times over the floor, and peaks of live memory, a group of bars per model."""
    figure = Figure(figsize=(10, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    times, peaks = figure.subplots(1, 2)
    width = 0.88 / len(_BARS)
    for place, (name, (title, colour)) in enumerate(_BARS.items()):
        lines = [next((line for line in results[run]["contenders"] if line["name"] == name), None) for run in _RUNS]
        seen = [(at + width * (place - 1.5), line) for at, line in enumerate(lines) if line is not None]
        if not seen:
            continue  # a contender of which nothing is published yet
        where = [at for at, _ in seen]
        kinds = {"width": 0.92 * width, "color": colour}
        over = [line["wall_over"]["floor"]["median"] for _, line in seen]
        times.bar_label(times.bar(where, over, label=title, **kinds), fmt="%.2f", fontsize=6.5)
        live = [line["live"]["peak"] / _MEBIBYTE for _, line in seen]
        peaks.bar_label(peaks.bar(where, live, **kinds), fmt="%.0f", fontsize=6.5)
    times.axhline(1, color="#4c566a", linewidth=0.8, linestyle="--")
    times.set_ylabel("step time over that without communication")
    peaks.set_ylabel("peak of live memory on a rank, MiB")
    for axes in (times, peaks):
        axes.set_xticks(range(len(_RUNS)), _RUNS.values(), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=9, ncols=len(_BARS))
    figure.savefig(path)
