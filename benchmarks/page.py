"""docs/performance.md out of the results of runs: ratios, exact counts, targets, phases, optimisations (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.operators import engine_copies
from benchmarks.report import Spread
from benchmarks.variants import MAIN

Results = Mapping[str, Mapping[str, Any]]
"""By the name of a run, its document; runs that failed are not there."""

PUBLISHED = "benchmarks/results/bench-2xcpu.json"
MET, MISSED, OPEN = "met", "missed", "not measured"
_MEBIBYTE = 2**20
_PEER_SAVER = "fsdp2, dcp"
_SMALL = 0.02

_METHOD = f"""\
# Performance

Made by `python benchmarks/bench.py --publish` out of `{PUBLISHED}`; nothing here is typed by
hand, and a test holds it to that file. `make bench` repeats the run.

## How the numbers are made

- Every contender trains the same model from the same weights on the same data with the same optimizer (fused AdamW), in
  the same processes. They take turns, one step each, in an order that rotates and reverses, so that what disturbs the
  machine disturbs all of them.
- A ratio is the median over rounds of one contender's time over the other's in the same round, with quartiles in
  brackets. Wall time is that of the slowest rank. CPU time is that of all threads of a rank, and survives noise.
- The floor trains on each rank alone, without communication: what computing takes.
- A speed counts only if the losses of every step equal those of one process on the whole batch to six digits.
- Held and peak are live bytes on the rank with most, between steps and during one, activations, gradients and optimizer
  included, counted allocation by allocation. Collectives are per step, as the process groups count them. Sent is what a
  step issues per rank, counted below every contender; by gloo, the same with a native reduce-scatter at the bytes of an
  all-reduce, which gloo makes of it. Copied are elements that are copied, cast or scaled into other memory in a step,
  per parameter, and those of them that this engine's own code asks for. All of these are exact and repeat.
- Everybody communicates over gloo. Peers have their defaults; `benchmarks/README.md` says what each got.
"""


def render(results: Results) -> str:
    """Write the whole document.

    Args:
        results: Documents of runs by name; empty: nothing has been published.
    """
    if not results:
        return f"{_METHOD}\n## Results\n\nNo run has been published yet.\n"
    parts = [_METHOD.rstrip(), "## Results", facts(results), comparison_table(comparisons(results)), notes(results)]
    parts += ["## Targets", targets_table(judge(results))]
    parts += ["## Phases", phase_table({name: found for name, found in results.items() if "rows" in found})]
    ablations = [found for found in results.values() if found.get("what") == "ablation"]
    parts += ["## What each optimisation gave", *map(ablation_table, ablations)] if ablations else []
    saved = {name: found for name, found in results.items() if found.get("what") == "checkpoints"}
    parts += ["## Checkpoints", checkpoint_table(saved)] if saved else []
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def spread(value: Mapping[str, float] | None, factor: float, digits: int) -> str:
    """Tell such as `1.25 [1.21, 1.31]`; a dash for None."""
    if value is None:
        return "-"
    low, middle, high = (f"{value[key] * factor:.{digits}f}" for key in ("lower", "median", "upper"))
    return f"{middle} [{low}, {high}]"


def facts(results: Results) -> str:
    """Tell when and from what everything was made; versions and hardware are those of the first run that notes them."""
    made = [found["made"] for found in results.values() if "made" in found]
    dates, commits = sorted(each["date"] for each in made), dict.fromkeys(each["commit"] for each in made)
    lines = [f"- date: {dates[0]} to {dates[-1]}, commit {', '.join(commits)}"] if made else []
    noted: Mapping[str, str] = next(
        (found["facts"] for found in results.values() if "versions" in found.get("facts", ())), {}
    )
    return "\n".join([*lines, *(f"- {key}: {noted[key]}" for key in ("versions", "hardware") if key in noted)])


# ---- steps -----------------------------------------------------------------------------------------------------------


def comparisons(results: Results) -> Results:
    """Return the documents that compare steps of this engine with those of its peers."""
    return {name: found for name, found in results.items() if "contenders" in found and "what" not in found}


def comparison_table(results: Results) -> str:
    """Make a row for each contender of each comparison."""
    head = ("run", "contender", "wall ms", "wall / floor", "CPU / floor", "wall / fsdp2", "CPU / fsdp2", "wall / ddp")
    costs = ("held MiB", "peak MiB", "peak / fsdp2", "collectives", "sent MiB", "by gloo MiB", "copied / P", "engine's")
    rows = [
        [name, line["name"], spread(line["wall_s"], 1000, 1), *_ratios(line), *_costs(found, line)]
        for name, found in results.items()
        for line in found["contenders"]
    ]
    return table((*head, *costs), rows) if rows else ""


def _ratios(line: Mapping[str, Any]) -> list[str]:
    asked = (("wall_over", "floor"), ("cpu_over", "floor"), ("wall_over", "fsdp2"), ("cpu_over", "fsdp2"))
    return [spread(line[kind].get(rival), 1, 2) for kind, rival in (*asked, ("wall_over", "ddp"))]


def _costs(found: Mapping[str, Any], line: Mapping[str, Any]) -> list[str]:
    live, moved, whole = line["live"], line["moved"], found["parameter_numel"]
    peers = [each["live"]["peak"] for each in found["contenders"] if each["name"] == "fsdp2"]
    cells = [_mib(live["persistent"]) if live["peak"] else "-", _mib(live["peak"]) if live["peak"] else "-"]
    cells.append(f"{live['peak'] / peers[0]:.2f}" if peers and live["peak"] else "-")
    cells.append(f"{line.get('collectives', 0):g}")
    if moved is None:
        return [*cells, *["-"] * 4]
    engine = f"{engine_copies(moved.get('copied_by', {})) / whole:.2f}"
    sent = [_mib(moved["sent_bytes"], 2), _mib(moved["gloo_bytes"], 2)]
    return [*cells, *sent, f"{moved['copied_numel'] / whole:.2f}", engine if line["sent"] is not None else "-"]


def notes(results: Results) -> str:
    """Tell who disagrees with one process and has no speed, and who took no part."""
    lines = []
    for name, found in results.items():
        wrong = [line for line in found.get("contenders", ()) if line["disagrees"]]
        lines += [f"- {name}, {line['name']}: no speed, since {line['disagrees']}" for line in wrong]
        lines += [f"- {name}: {absent} took no part: {why}" for absent, why in found.get("absent", {}).items()]
    return "\n".join(lines)


def _mib(num_bytes: float, digits: int = 1) -> str:
    return f"{num_bytes / _MEBIBYTE:.{digits}f}"


# ---- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """One promise.

    Attributes:
        title: What is measured, over what.
        limit: The largest value that meets it.
        read: Results to the value; raises KeyError or TypeError where something was not measured.
    """

    title: str
    limit: float
    read: Callable[[Results], float]


def judge(results: Results) -> list[tuple[Target, float | None]]:
    """Hold every target against the results; None where it was not measured."""
    return [(target, _read(target, results)) for target in TARGETS]


def verdict(target: Target, value: float | None) -> str:
    """Return `MET`, `MISSED` or `OPEN`."""
    return OPEN if value is None else MET if value <= target.limit else MISSED


def targets_table(judged: Sequence[tuple[Target, float | None]]) -> str:
    """Set every target beside what was reached."""
    rows = [
        [target.title, f"at most {target.limit:g}", "-" if value is None else f"{value:.3g}", verdict(target, value)]
        for target, value in judged
    ]
    words = [row[-1] for row in rows]
    counts = ", ".join(f"{words.count(word)} {word}" for word in (MET, MISSED, OPEN))
    return f"{len(rows)} targets: {counts}.\n\n{table(('what', 'target', 'reached', 'verdict'), rows)}"


def _read(target: Target, results: Results) -> float | None:
    try:
        return float(target.read(results))
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _contender(results: Results, run: str, name: str) -> Mapping[str, Any]:
    return {each["name"]: each for each in results[run]["contenders"]}[name]


def time_ratio(run: str, rival: str, kind: str = "wall_over", name: str = MAIN) -> Callable[[Results], float]:
    """Read the median ratio of times of a contender to a rival."""
    return lambda results: _contender(results, run, name)[kind][rival]["median"]


def peak_ratio(run: str, rival: str, name: str = MAIN) -> Callable[[Results], float]:
    """Read the live bytes at the peak over those of a rival."""
    return lambda results: (
        _contender(results, run, name)["live"]["peak"] / _contender(results, run, rival)["live"]["peak"]
    )


def sent_over_parts(run: str, parts: int, name: str = MAIN) -> Callable[[Results], float]:
    """Read what is sent over some times what all but its own part of the float32 weights are to a rank."""

    def read(results: Results) -> float:
        line, ranks = _contender(results, run, name), results[run]["request"]["ranks"]
        sent = max(line["moved"]["gloo_bytes"], line["sent"]["gather_bytes"] + line["sent"]["reduce_bytes"])
        return sent / (parts * 4 * results[run]["parameter_numel"] * (ranks - 1) / ranks)

    return read


def engine_copied(run: str) -> Callable[[Results], float]:
    """Read the elements that the engine copies outside of collectives, per parameter."""
    return lambda results: (
        engine_copies(_contender(results, run, MAIN)["moved"]["copied_by"]) / results[run]["parameter_numel"]
    )


def phase_ratio(run: str, phase: str) -> Callable[[Results], float]:
    """Read the median ratio of wall time of a phase to FSDP2's."""
    return lambda results: {(row["phase"], row["name"]): row for row in results[run]["rows"]}[phase, MAIN]["wall_over"][
        "median"
    ]


def host_us(run: str, phase: str) -> Callable[[Results], float]:
    """Read the host time per unit of one pass, in microseconds."""
    return lambda results: results[run]["host_us_by_pass"][phase][MAIN]


def saver_ratio(found: Mapping[str, Any], who: str, act: str, kind: str = "wall_s") -> float:
    """Return the median over rounds of a saver's time (of the slowest rank) over that of FSDP2 with `dcp`.

    Args:
        found: Document of a run that saves and loads.
        who: The saver.
        act: "save" or "load".
        kind: "wall_s" or "cpu_s".
    """
    ours, peers = (
        [max(turn) for turn in zip(*(one[act][kind] for one in found["readings"][name]), strict=True)]
        for name in (who, _PEER_SAVER)
    )
    return median(own / peer for own, peer in zip(ours, peers, strict=True))


def _targets() -> list[Target]:
    wall = {"many-small": 0.4, "large": 0.65, "llama": 0.7, "moe": 1.0}
    found = []
    for model, limit in wall.items():
        run = f"{model}-2"
        found += [
            Target(f"{run}: wall time of a step over fsdp2's", limit, time_ratio(run, "fsdp2")),
            Target(f"{run}: CPU time of a step over fsdp2's", limit, time_ratio(run, "fsdp2", "cpu_over")),
            Target(f"{run}: peak of live bytes over fsdp2's", 0.9, peak_ratio(run, "fsdp2")),
            Target(f"{run}: wall time of mddp over ddp's", 1.02, time_ratio(run, "ddp", name="mddp")),
        ]
    step, start = "step-many-small-fused", "start-many-small"
    return [
        *found,
        Target("large-2: bytes sent over 3 P (N - 1) / N", 1.0, sent_over_parts("large-2", 3)),
        Target("large-2: bytes sent over 2 P (N - 1) / N, ours-1", 1.01, sent_over_parts("large-2", 2, "ours-1")),
        Target("large-2: elements the engine copies, per parameter", 1.001, engine_copied("large-2")),
        Target("many-small: optimizer.step over fsdp2's", 0.4, phase_ratio(step, "optimizer.step")),
        Target("many-small: clip_grad_norm_ over fsdp2's", 0.2, phase_ratio(step, "clip_grad_norm_")),
        Target("many-small: time to wrap over fsdp2's", 1.0, phase_ratio(start, "wrapping")),
        Target("many-small: first step over fsdp2's", 1.0, phase_ratio(start, "first step")),
        Target("host time per unit of 20 parameters, forward, us", 100.0, host_us("host", "forward")),
        Target("host time per unit of 20 parameters, backward, us", 100.0, host_us("host", "backward")),
        Target("large: time to save over fsdp2's", 1.0, lambda r: saver_ratio(r["checkpoints"], "ours", "save")),
        Target("large: time to load over fsdp2's", 1.0, lambda r: saver_ratio(r["checkpoints"], "ours", "load")),
    ]


TARGETS: tuple[Target, ...] = tuple(_targets())
"""Every promise that this benchmark checks."""


# ---- phases, optimisations, checkpoints ------------------------------------------------------------------------------


def phase_table(results: Results) -> str:
    """Make a row for each phase and contender, and tell the host time per unit."""
    head = ("run", "phase", "contender", "wall ms", "CPU ms", "wall / first", "CPU / first", "peak MiB")
    rows, told = [], []
    for name, found in results.items():
        for row in found["rows"]:
            times = [spread(row[kind], 1000, 2) for kind in ("wall_s", "cpu_s")]
            over = [spread(row[kind], 1, 3) for kind in ("wall_over", "cpu_over")]
            rows.append([name, row["phase"], row["name"], *times, *over, _mib(row["peak"]) if row["peak"] else "-"])
        for phase, values in sorted(found.get("host_us_by_pass", {}).items()):
            each = ", ".join(f"{who} {value:.0f} us" for who, value in sorted(values.items()))
            told.append(f"- {name}, {phase}: host time per unit beyond the bare model: {each}")
    return "\n\n".join([table(head, rows), "\n".join(told)]).strip() if rows else ""


def ablation_table(found: Mapping[str, Any]) -> str:
    """Tell what each optimisation gave: before, without it, and after, with it; both in the same run."""
    lines = {line["name"]: line for line in found["contenders"]}
    rows, missing = [], []
    for name, title, base in found["optimisations"]:
        without, whole = lines.get(name), lines.get(base)
        if without is None or whole is None or without["disagrees"] or whole["disagrees"]:
            why = found["absent"].get(name) or (without or whole or {}).get("disagrees") or "it took no part"
            missing.append(f"- {title} was not measured: {why}")
        else:
            rows.append([f"{title} (`{name}`)", *_gain(without, whole)])
    request = found["request"]
    about = (
        f"{request['model']}, {request['ranks']} ranks, {request['steps']} rounds; before -> after, medians; what is "
        f"saved is taken within a round. Everything is there but the optimisation before."
    )
    head = ("optimisation", "CPU ms", "CPU saved", "wall ms", "wall saved", "sent MiB", "peak MiB", "")
    return "\n\n".join(part for part in (about, table(head, rows), "\n".join(missing)) if part)


def _gain(without: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Return the cells of one optimisation; the last one marks what gives less than 2 % in everything."""
    cells, saved = [], []
    for kind in ("cpu", "wall"):
        over = Spread(**whole[f"{kind}_over"][without["name"]])
        times = [f"{1000 * line[f'{kind}_s']['median']:.1f}" for line in (without, whole)]
        cells += [_change(*times), f"{1 - over.median:.1%} [{1 - over.upper:.1%}, {1 - over.lower:.1%}]"]
        saved.append(1 - over.median)
    for counts in ([_sent(line) for line in (without, whole)], [line["live"]["peak"] for line in (without, whole)]):
        cells.append(_change(*(_mib(count, 2) for count in counts)))
        saved.append(1 - counts[1] / counts[0] if counts[0] else 0.0)
    return [*cells, f"under {_SMALL:.0%}" if max(saved) < _SMALL else ""]


def _sent(line: Mapping[str, Any]) -> int:
    """Return what goes over the wire, by the engine's counters or as seen below it, whichever is more."""
    sent, moved = line["sent"], line["moved"]
    counted = 0 if sent is None else int(sent["gather_bytes"] + sent["reduce_bytes"])
    return max(counted, 0 if moved is None else int(moved["gloo_bytes"]))


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def checkpoint_table(results: Results) -> str:
    """Set saving and loading beside FSDP2's with `dcp`."""
    head = ("run", "", "contender", "wall / fsdp2 and dcp", "CPU / fsdp2 and dcp", "collectives", "written MiB")
    rows = []
    for name, found in results.items():
        for act in ("save", "load"):
            for who, ranks in found["readings"].items():
                ratios = [f"{saver_ratio(found, who, act, kind):.2f}" for kind in ("wall_s", "cpu_s")]
                counts = [one[act]["counts"] for one in ranks]
                written = _mib(max(each.get("written_bytes", 0) for each in counts), 2)
                rows.append([name, act, who, *ratios, str(max(each["collectives"] for each in counts)), written])
    return table(head, rows)
