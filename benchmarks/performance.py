"""Makes docs/performance.md out of the published results: `python benchmarks/performance.py > docs/performance.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

from benchmarks.exact import exact_sections
from benchmarks.gains import SMALL, gains
from benchmarks.markup import spread, table
from benchmarks.page import facts, targets_table
from benchmarks.sections import ablation_table
from benchmarks.suite import WORKLOADS
from benchmarks.targets import MET, MISSED, OPEN, Results, Verdict, judge

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = "bench-2xcpu"
"""Name of the published results, without folder and suffix."""

_RANKS = (2, 4)
_METHOD = """\
# Performance

Made by `python benchmarks/performance.py > docs/performance.md` out of `benchmarks/results/{published}.json`; nothing
here is typed by hand, and a test holds it to that file. The whole run, with every table and picture, is
[on its page](../benchmarks/results/{published}.md); `make bench` repeats it.

## How the numbers are made

- Every contender trains the same model from the same weights on the same data with the same optimizer (fused AdamW), in
  the same processes. They take turns, one step each, in an order that rotates and reverses, so that what disturbs the
  machine disturbs all of them.
- A ratio is the median over rounds of one contender's time over the other's in the same round, with quartiles in
  brackets. Wall time is that of the slowest rank. CPU time is that of all threads of a rank, and survives noise.
- The floor trains on each rank alone, without communication: what computing takes.
- A speed counts only if the losses of every step equal those of one process on the whole batch to six digits.
- Peaks are live bytes on the rank with most, activations, gradients and optimizer included, counted allocation by
  allocation. Bytes are what a rank sends in a step. Both are exact and repeat.
- Everybody communicates over gloo.
- Peers have their defaults; `benchmarks/README.md` says what each got.
"""


def render(results: Results) -> str:
    """The whole document.

    Args:
        results: Documents of runs by name; empty: nothing has been published.
    """
    parts = [_METHOD.format(published=PUBLISHED).rstrip()]
    if not results:
        return "\n\n".join([*parts, "## Results", "No run has been published yet."]) + "\n"
    verdicts = judge(results)
    parts += ["## Results", facts(results), _main_table(results), _without_speed(results)]
    parts += [*_by_verdict(verdicts), *exact_sections(results)]
    ablations = {name: document for name, document in results.items() if document.get("what") == "ablation"}
    if ablations:
        parts.append("## What each optimisation gave")
        parts += [ablation_table(name, document) for name, document in ablations.items()]
        parts.append(_small_ones(ablations))
    return "\n\n".join(part for part in parts if part) + "\n"


def _main_table(results: Results) -> str:
    head = ("workload", "contender", "wall / floor", "CPU / floor", "wall / fsdp2", "CPU / fsdp2", "wall / ddp")
    shown = [(model, ranks) for model in WORKLOADS for ranks in _RANKS if f"{model}-{ranks}" in results]
    rows = [
        [f"{model}, {ranks} ranks", line["name"], *_ratios(line), *_costs(results[f"{model}-{ranks}"], line)]
        for model, ranks in shown
        for line in results[f"{model}-{ranks}"]["contenders"]
        if line["name"] != "floor"
    ]
    return table((*head, "peak MiB", "peak / fsdp2"), rows) if rows else ""


def _ratios(line: Mapping[str, Any]) -> list[str]:
    asked = (("wall_over", "floor"), ("cpu_over", "floor"), ("wall_over", "fsdp2"), ("cpu_over", "fsdp2"))
    return [spread(line[kind].get(rival), 1, 2) for kind, rival in (*asked, ("wall_over", "ddp"))]


def _costs(document: Mapping[str, Any], line: Mapping[str, Any]) -> list[str]:
    peers = [each["live"]["peak"] for each in document["contenders"] if each["name"] == "fsdp2"]
    peak = line["live"]["peak"]
    return [f"{peak / 2**20:.1f}", f"{peak / peers[0]:.2f}" if peers else "-"]


def _without_speed(results: Results) -> str:
    """Who disagrees with one process, and where."""
    wrong = [
        f"- {name}, {line['name']}: no speed, since {line['disagrees']}"
        for name, document in results.items()
        for line in document.get("contenders", ())
        if line["disagrees"]
    ]
    return "\n".join(wrong)


def _by_verdict(verdicts: Sequence[Verdict]) -> list[str]:
    parts = []
    for word, heading in ((MISSED, "## Targets that are missed"), (MET, "## Targets that are met")):
        found = [verdict for verdict in verdicts if verdict.word == word]
        parts += [f"{heading}\n\n{len(found)} of {len(verdicts)}.", targets_table(found) if found else ""]
    left = [verdict.target.title for verdict in verdicts if verdict.word == OPEN]
    return [*parts, "Not measured: " + "; ".join(left) + "." if left else ""]


def _small_ones(ablations: Results) -> str:
    """Those that give less than the limit on every workload they were measured on."""
    by_title: dict[str, list[bool]] = {}
    for document in ablations.values():
        for gain in gains(document, [tuple(each) for each in document["optimisations"]])[0]:
            by_title.setdefault(gain.title, []).append(gain.is_small)
    small = [title for title, found in by_title.items() if all(found)]
    return f"Less than {SMALL:.0%} in everything, on every workload: {'; '.join(small) if small else 'none'}."


def published(folder: Path = ROOT / "benchmarks" / "results") -> dict[str, Any]:
    """The published results; empty where there are none."""
    file = folder / f"{PUBLISHED}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else {}
    return found


def main() -> int:
    """Print the document."""
    print(render(published()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
