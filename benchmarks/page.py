"""One page for a whole benchmark: targets beside what was reached, then a table for each run (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.exact import exact_sections
from benchmarks.kept import sittings
from benchmarks.markup import spread, table
from benchmarks.sections import special_sections
from benchmarks.targets import MET, MISSED, OPEN, Results, Verdict

_MEBIBYTE = 2**20
_ADAM_BYTES = 16
"""Of a float32 parameter with its gradient and both moments."""

_HEAD = ("contender", "wall ms", "CPU ms", "wall / floor", "CPU / floor", "wall / fsdp2", "CPU / fsdp2", "wall / ddp")
_COSTS = ("held MiB", "peak MiB", "peak / 16 P/N", "sent MiB", "seen MiB", "by gloo MiB", "allocations", "copied / P")


def page(
    title: str, results: Results, failures: Mapping[str, str], verdicts: Sequence[Verdict], pictures: Sequence[str]
) -> str:
    """Write the page.

    Args:
        title: Its heading.
        results: Documents of the runs, by name.
        failures: Runs that gave none, and parts that were left out, each with the reason.
        verdicts: Of all targets.
        pictures: Names of files in the same folder.

    Returns:
        Markdown.
    """
    counts = {word: sum(verdict.word == word for verdict in verdicts) for word in (MET, MISSED, OPEN)}
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    parts = [
        f"# {title}",
        f"{len(verdicts)} targets: {told}. Losses of all that have a speed equal those of one process.",
    ]
    parts.append(facts(results))
    parts.append("## Targets\n\n" + targets_table(verdicts))
    parts += [f"![{picture}]({picture})" for picture in pictures]
    parts.append("## Steps\n\n" + _LEGEND)
    parts += [_comparison(name, document) for name, document in comparisons(results).items()]
    parts += exact_sections(results)
    parts.append("## Phases")
    parts += [_phase_table(name, document) for name, document in results.items() if "rows" in document]
    parts += special_sections(results)
    if failures:
        parts.append("## Left out\n\n" + "\n".join(f"- {name}: {why}" for name, why in failures.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


_LEGEND = (
    "Medians with quartiles in brackets; wall is the slowest rank, CPU the mean of the ranks over all threads, ratios "
    "are taken within a round. The floor does not communicate. Sent is what this engine's own counters say that a rank "
    "sends in a step; seen is what the step issues below every contender, by gloo what gloo's reduce-scatter makes of "
    "that. Held and peak are live bytes. Copied is what is copied, cast or scaled into other memory in a step, per "
    "parameter of the model."
)


def comparisons(results: Results) -> Results:
    """Those of the documents that compare steps of this engine with those of its peers."""
    return {name: document for name, document in results.items() if "contenders" in document and "what" not in document}


def facts(results: Results) -> str:
    """When and from what everything was made; versions and hardware are those of the first run that notes them."""
    found = next((document["facts"] for document in results.values() if "versions" in document.get("facts", ())), {})
    lines = [f"- {key}: {found[key]}" for key in ("versions", "hardware") if key in found]
    return "\n".join([*sittings(results), *lines])


def targets_table(verdicts: Sequence[Verdict]) -> str:
    """Every target beside what was reached, with the reason where it is missed."""
    rows = []
    for verdict in verdicts:
        target = verdict.target
        unit = f" {target.unit}" if target.unit else ""
        reached = "-" if verdict.value is None else f"{_distinct(verdict.value, target.limit)}{unit}"
        why = f"; {target.told_reason}" if target.told_reason and verdict.word == MISSED else ""
        rows.append([target.title, f"at most {target.limit:g}{unit}", reached, verdict.word + why])
    return table(("what", "target", "reached", "verdict"), rows)


def _distinct(value: float, limit: float) -> str:
    """Three digits, or as many more as it takes to be seen above a limit that it exceeds by little."""
    texts = [f"{value:.{digits}g}" for digits in (3, 4, 5)]
    return next((text for text in texts if (float(text) > limit) == (value > limit)), texts[0])


def _comparison(name: str, document: Mapping[str, Any]) -> str:
    request, facts = document["request"], document["facts"]
    whole = document["parameter_numel"]
    rows = [_contender_row(line, whole, request["ranks"]) for line in document["contenders"]]
    notes = [
        f"- {line['name']} has no speed: {line['disagrees']}" for line in document["contenders"] if line["disagrees"]
    ]
    notes += [f"- {absent} took no part: {why}" for absent, why in document["absent"].items()]
    planned = document["planned_peak"]
    if planned is not None:
        notes.append(f"- the planner says that ours-3 takes {planned / _MEBIBYTE:.1f} MiB at its peak")
    about = (
        f"{request['model']}, {request['ranks']} ranks, {request['microbatches']} microbatch(es), gradients travel in "
        f"{request['comm_dtype']}; {whole:,} parameters in {document['parameter_tensors']} tensors, "
        f"{facts['tokens per rank and step']} tokens per rank and step, {request['steps']} rounds."
    )
    parts = [f"### {name}", about, table((*_HEAD, *_COSTS), rows), "\n".join(notes), f"`{facts['command']}`"]
    return "\n\n".join(part for part in parts if part)


def _contender_row(line: Mapping[str, Any], whole: int, ranks: int) -> list[str]:
    over = [spread(line[kind].get(rival), 1, 2) for rival in ("floor", "fsdp2") for kind in ("wall_over", "cpu_over")]
    moved, sent, peak = line["moved"], line["sent"], line["live"]["peak"]
    held = ["-"] * 3
    if peak:
        held = [f"{size / _MEBIBYTE:.1f}" for size in (line["live"]["persistent"], peak)]
        held.append(f"{peak / (_ADAM_BYTES * whole / ranks):.2f}")
    seen = ["-", "-"] if moved is None else [f"{moved[key] / _MEBIBYTE:.2f}" for key in ("sent_bytes", "gloo_bytes")]
    return [
        line["name"],
        spread(line["wall_s"], 1000, 1),
        spread(line["cpu_s"], 1000, 1),
        *over,
        spread(line["wall_over"].get("ddp"), 1, 2),
        *held,
        "-" if sent is None else f"{(sent['gather_bytes'] + sent['reduce_bytes']) / _MEBIBYTE:.2f}",
        *seen,
        str(line["live"]["allocations"] or "-"),
        "-" if moved is None else f"{moved['copied_numel'] / whole:.2f}",
    ]


def _phase_table(name: str, document: Mapping[str, Any]) -> str:
    request = document["request"]
    many = request["simulated_ranks"]
    where = f"rank 0 of {many} simulated ranks" if many else f"{request['ranks']} ranks"
    where += f", {request.get('device_type', 'cpu')}, {request.get('dtype', 'float32')}"
    rows = [
        [
            row["phase"],
            row["name"],
            spread(row["wall_s"], 1000, 2),
            spread(row["cpu_s"], 1000, 2),
            spread(row["wall_over"], 1, 3),
            spread(row["cpu_over"], 1, 3),
            f"{row['peak'] / _MEBIBYTE:.1f}" if row["peak"] else "-",
        ]
        for row in document["rows"]
    ]
    first = request["contenders"][0]
    head = ("phase", "contender", "wall ms", "CPU ms", f"wall / {first}", f"CPU / {first}", "peak MiB")
    host = document.get("host_us_per_unit_and_pass", {})
    told = "; ".join(f"{who} {value:.0f} us" for who, value in sorted(host.items()))
    for phase, values in sorted(document.get("host_us_by_pass", {}).items()):
        told += f"; {phase} alone: " + ", ".join(f"{who} {value:.0f} us" for who, value in sorted(values.items()))
    parts = [f"### {name}", f"{request['model']}, {where}, {request['rounds']} rounds.", table(head, rows)]
    parts += [f"Host time per unit and pass beyond the bare model: {told}."] if told else []
    parts += [f"`{document['made']['command']}`"] if "made" in document else []
    return "\n\n".join(parts)
