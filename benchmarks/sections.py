"""Parts of the page besides comparisons and phases: optimisations, traced steps, checkpoints, padding (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from benchmarks.gains import SMALL, Gain, gains
from benchmarks.markup import table
from megatron_fsdp.trace.summary import Times

_MEBIBYTE = 2**20
_LEGEND = (
    "Time of the host by what it does, without what is nested in it; exposed is communication that was in flight while "
    "the host did nothing else (docs/trace.md). Means over steps; tracing itself costs some percent."
)
_FEW_UNITS = 12
_COLUMNS = tuple(field.name for field in fields(Times))
_SAVERS = {"ours": "ours", "ours, verified": "ours, verified", "ours, in the background": "in the background"}
_PEER = "fsdp2, dcp"


def ablation_table(name: str, document: Mapping[str, Any]) -> str:
    """What each optimisation gave: before, without it, and after, with it."""
    found, missing = gains(document, [tuple(each) for each in document["optimisations"]])
    head = ("optimisation", "CPU ms", "CPU saved", "wall ms", "wall saved", "sent MiB", "peak MiB", "allocations", "")
    request = document["request"]
    parts = [
        f"### {name}",
        (
            f"{request['model']}, {request['ranks']} ranks, {request['steps']} rounds; before -> after, medians; "
            "what is saved is taken within a round, with quartiles. Before, everything is there but the optimisation."
        ),
        table(head, [gain_row(gain) for gain in found]),
        "\n".join(f"- {title} was not measured: {why}" for title, why in missing.items()),
        f"`{document['facts']['command']}`",
    ]
    return "\n\n".join(part for part in parts if part)


def gain_row(gain: Gain) -> list[str]:
    """One line of the table."""
    return [
        f"{gain.title} (`{gain.name}`)",
        _change(gain.cpu_s, 1000, 1),
        _saved(gain.cpu_over.median, gain.cpu_over.lower, gain.cpu_over.upper),
        _change(gain.wall_s, 1000, 1),
        _saved(gain.wall_over.median, gain.wall_over.lower, gain.wall_over.upper),
        _change(gain.sent_bytes, 1 / _MEBIBYTE, 2),
        _change(gain.peak_bytes, 1 / _MEBIBYTE, 1),
        _change(gain.allocations, 1, 0),
        f"under {SMALL:.0%}" if gain.is_small else "",
    ]


def _change(pair: tuple[float, float], factor: float, digits: int) -> str:
    before, after = (f"{value * factor:.{digits}f}" for value in pair)
    return before if before == after else f"{before} -> {after}"


def _saved(middle: float, low: float, high: float) -> str:
    return f"{1 - middle:.1%} [{1 - high:.1%}, {1 - low:.1%}]"


def breakdown_section(name: str, document: Mapping[str, Any]) -> str:
    """Where the time of a step goes, by rank and by unit."""
    request = document["request"]
    parts = [f"### {name}", f"{request['model']}, {request['ranks']} ranks, {request['rounds']} traced steps, ms."]
    ranks = [
        [who, str(rank["rank"]), _ms(rank["step_ns"]), *_times(rank), _hidden(rank["hidden"]), _mib(rank["sent_bytes"])]
        for who, found in document["breakdown"].items()
        for rank in found["ranks"]
    ]
    parts.append(table(("contender", "rank", "step", *_COLUMNS, "exposed", "hidden", "sent MiB"), ranks))
    units = [
        [who, label, *cells] for who, found in document["breakdown"].items() for label, cells in _units(found["units"])
    ]
    parts.append(table(("contender", "unit", *_COLUMNS, "exposed", "sent MiB"), units))
    return "\n\n".join(parts)


def _units(units: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """All of a few; of many the first (the root), the mean of the others, and the one with most time."""
    if len(units) <= _FEW_UNITS:
        return [(unit["unit"], [*_times(unit), _mib(unit["sent_bytes"])]) for unit in units]
    root, others = units[0], units[1:]
    keys = ("exposed_ns", "sent_bytes")
    mean = {key: sum(unit[key] for unit in others) / len(others) for key in keys}
    times = {key: sum(unit["times"][key] for unit in others) / len(others) for key in _COLUMNS}
    slowest = max(others, key=lambda unit: sum(unit["times"].values()))
    chosen = [(root["unit"], root), (f"mean of {len(others)}", {**mean, "times": times}), (slowest["unit"], slowest)]
    return [(label, [*_times(unit), _mib(unit["sent_bytes"])]) for label, unit in chosen]


def _times(found: Mapping[str, Any]) -> list[str]:
    return [*(_ms(found["times"][key]) for key in _COLUMNS), _ms(found["exposed_ns"])]


def checkpoint_section(name: str, document: Mapping[str, Any]) -> str:
    """Saving and loading beside FSDP2's, from a benchmark of its own."""
    readings = document["readings"]
    rows = []
    for act in ("save", "load"):
        for who, title in _SAVERS.items():
            if who in readings:
                walls, cpus = (checkpoint_ratio(readings, who, act, kind) for kind in ("wall_s", "cpu_s"))
                counted = [one[act]["counts"]["collectives"] for one in readings[who]]
                rows.append([act, title, f"{walls:.2f}", f"{cpus:.2f}", str(max(counted))])
    head = ("", "contender", "wall / fsdp2 and dcp", "CPU / fsdp2 and dcp", "collectives")
    return f"### {name}\n\n{document['facts']['date']}: `{document['facts']['command']}`\n\n{table(head, rows)}"


def checkpoint_ratio(
    readings: Mapping[str, Sequence[Mapping[str, Any]]], who: str, act: str, kind: str = "wall_s"
) -> float:
    """The median over rounds of a saver's time over that of FSDP2 with `dcp`.

    Args:
        readings: By saver, one entry per rank.
        who: The saver.
        act: "save" or "load".
        kind: "wall_s", of the slowest rank, or "cpu_s", the mean of the ranks.
    """
    both = []
    for name in (who, _PEER):
        rounds = zip(*(one[act][kind] for one in readings[name]), strict=True)
        both.append([max(each) if kind == "wall_s" else sum(each) / len(each) for each in rounds])
    return median(ours / peer for ours, peer in zip(*both, strict=True))


def facts_section(document: Mapping[str, Any]) -> str:
    """Imports and padding."""
    imports = [
        [name, f"{1000 * median(times):.0f}", f"{1000 * min(times):.0f}"]
        for name, times in document["import_cpu_s"].items()
    ]
    padding = [[name, f"{worst:.3%}", f"{lcm:,.1%}"] for name, worst, lcm in document.get("padding", ())]
    parts = [
        "### facts",
        (
            "Imports in a fresh process that has torch already, CPU ms; the engine's is what the first call of "
            "`fully_shard` adds to the package's."
        ),
        table(("import", "median", "least"), imports),
        (
            "Padding of each layer of docs/padding.md, the worst of 2 to 1,024 ranks, beside the rule of the least "
            "common multiple."
        ),
        table(("layer", "padding", "LCM rule"), padding),
    ]
    return "\n\n".join(parts)


def special_sections(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Headings and tables of everything that is here of these kinds."""
    parts: list[str] = []
    kinds = (
        ("## What each optimisation gave", "ablation", ablation_table),
        ("## Where the time of a step goes\n\n" + _LEGEND, "breakdown", breakdown_section),
        ("## Checkpoints", "checkpoints", checkpoint_section),
    )
    for heading, kind, section in kinds:
        found = [section(name, document) for name, document in results.items() if document.get("what") == kind]
        parts += [heading, *found] if found else []
    if "facts" in results:
        parts += ["## Imports and padding", facts_section(results["facts"])]
    return parts


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.2f}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MEBIBYTE:.2f}"


def _hidden(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"
