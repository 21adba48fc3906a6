"""Pictures of a benchmark: time over the floor, and live bytes at the peak, one group of bars per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gains import gains
from benchmarks.page import comparisons
from benchmarks.targets import Results
from megatron_fsdp.errors import ConfigurationError

_DPI = 130
_MAIN_RUNS = "-2"
"""How names of the runs end that everybody takes part in."""

_BAR = 0.8
_Read = Callable[[Mapping[str, Any]], float | None]


def heights(results: Results, read: _Read) -> dict[str, dict[str, float]]:
    """By contender and run, what a bar shows; those that have no value are left out (pure).

    Args:
        results: Documents of runs; those that are not comparisons are passed over.
        read: A contender's part of a document to a value or None.
    """
    found: dict[str, dict[str, float]] = {}
    for run, document in results.items():
        for line in document.get("contenders", ()):
            value = read(line)
            if value is not None:
                found.setdefault(line["name"], {})[run] = value
    return found


def over_floor(line: Mapping[str, Any]) -> float | None:
    """CPU time over that of ranks that do not communicate."""
    over = line["cpu_over"].get("floor")
    return None if over is None else float(over["median"])


def peak_mib(line: Mapping[str, Any]) -> float | None:
    """Live MiB at the peak; None where it was not measured."""
    return line["live"]["peak"] / 2**20 or None


def draw(results: Results, folder: Path, stem: str) -> list[str]:
    """Write the pictures; returns the names of the files.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    steps = comparisons(results)
    main = {name: document for name, document in steps.items() if name.endswith(_MAIN_RUNS)}
    others = {name: document for name, document in steps.items() if name not in main}
    time, memory, saved = "CPU time of a step over the floor's", "live MiB at the peak", "part of CPU time saved"
    pictures = {
        f"{stem}-time.png": (heights(main, over_floor), time),
        f"{stem}-memory.png": (heights(main, peak_mib), memory),
        f"{stem}-time-more.png": (heights(others, over_floor), time),
        f"{stem}-memory-more.png": (heights(others, peak_mib), memory),
        f"{stem}-optimisations.png": (savings(results), saved),
    }
    drawn = {name: what for name, what in pictures.items() if what[0]}
    for name, (found, label) in drawn.items():
        _bars(found, label, folder / name)
    return list(drawn)


def savings(results: Results) -> dict[str, dict[str, float]]:
    """By workload and optimisation, the part of CPU time that it saves (pure)."""
    found: dict[str, dict[str, float]] = {}
    for document in results.values():
        if document.get("what") == "ablation":
            measured, _ = gains(document, [tuple(each) for each in document["optimisations"]])
            model = document["request"]["model"]
            found.setdefault(model, {}).update({gain.name: 1 - gain.cpu_over.median for gain in measured})
    return found


def _bars(found: Mapping[str, Mapping[str, float]], label: str, path: Path) -> None:
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("pictures need matplotlib, which is not installed: pip install matplotlib") from None
    runs = list(dict.fromkeys(run for values in found.values() for run in values))
    figure = Figure(figsize=(max(6.0, 1.6 * len(runs)), 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = _BAR / max(1, len(found))
    colours = colormaps["tab20" if len(found) > 10 else "tab10"]
    for index, (name, values) in enumerate(found.items()):
        places = [runs.index(run) - _BAR / 2 + (index + 0.5) * width for run in values]
        axes.bar(places, list(values.values()), width, label=name, color=colours(index % colours.N))
    axes.set_xticks(range(len(runs)), runs, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=_DPI)
