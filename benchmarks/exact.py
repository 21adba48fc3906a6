"""Tables of what is counted exactly: room below a peak, copies, and reductions after the last microbatch (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markup import table
from benchmarks.operators import ENGINE, engine_copies
from benchmarks.suite import WORKLOADS

_MEBIBYTE = 2**20
_WANTED = 0.9
"""Of FSDP2's peak, the target."""

_WORTH_NAMING = 0.01

_Results = Mapping[str, Mapping[str, Any]]

_PEAKS = f"""\
Whoever shards holds its part of weights and optimizer states, and the activations when backward begins; both are
measured on the floor, which holds all of the former and no gradients then. Together they are a bound that no peak can
be below. What {_WANTED:g} of FSDP2's peak leaves above the bound is all that gathered weights, gradients on their way
and buffers may take. Below the bound, the target cannot be met by anybody. MiB on the rank with most."""

_COPIES = """\
Elements that operators copy, cast or scale into other memory in one step, per parameter. *Engine* are those that this
engine's own code asks for outside of collectives: the target is one copy per gradient. The rest is the model's, and of
peers everything."""

_DEFERRED = """\
Four microbatches, reduced once: `ours-3-deferred` and FSDP2 with `set_requires_gradient_sync(False)` but for the last.
Reduced are bytes of reductions that a rank sends in a step."""


def exact_sections(results: _Results) -> list[str]:
    """Headings, explanations and tables of all three; those without figures are left out."""
    made = (
        ("## Room below the peaks", _PEAKS, _peak_table(results)),
        ("## Copies", _COPIES, _copy_table(results)),
        ("## Reductions deferred to the last microbatch", _DEFERRED, _deferred_table(results)),
    )
    return [f"{heading}\n\n{about}\n\n{rows}" for heading, about, rows in made if rows]


def peak_bound(document: Mapping[str, Any]) -> tuple[float, int] | None:
    """This rank's part of weights and states, and activations at the start of backward, in bytes.

    Args:
        document: Of a comparison.

    Returns:
        None where the floor's activations were not measured.
    """
    live = _lines(document).get("floor", {}).get("live", {})
    activations = live.get("activations", 0)
    return (live["persistent"] / document["request"]["ranks"], activations) if activations else None


def _peak_table(results: _Results) -> str:
    head = ("run", "shards", "activations", "bound", "fsdp2", "bound / fsdp2", f"{_WANTED:g} leaves")
    rows = []
    for name, document in _of_workloads(results, ("-2", "-4")):
        lines, bound = _lines(document), peak_bound(document)
        if bound is None or not {"fsdp2", "ours-3"} <= lines.keys():
            continue
        peer, ours = (lines[who]["live"]["peak"] for who in ("fsdp2", "ours-3"))
        least = sum(bound)
        sizes = [_mib(value) for value in (*bound, least, peer)]
        rows.append([name, *sizes, f"{least / peer:.2f}", _mib(_WANTED * peer - least), _mib(ours)])
        rows[-1].append(f"{ours / peer:.2f}")
    return table((*head, "ours-3", "ours-3 / fsdp2"), rows) if rows else ""


def _copy_table(results: _Results) -> str:
    rows = []
    for name, document in _of_workloads(results, ("-2",)):
        whole = document["parameter_numel"]
        for who, line in _lines(document).items():
            moved = line["moved"]
            if moved is not None and "copied_by" in moved:
                engine = f"{engine_copies(moved['copied_by']) / whole:.2f}"
                is_ours = line["sent"] is not None
                ours = [engine, _places(moved["copied_by"], whole)] if is_ours else ["-", ""]
                rows.append([name, who, f"{moved['copied_numel'] / whole:.2f}", *ours])
    return table(("run", "contender", "all", "engine", "where"), rows) if rows else ""


def _places(copied_by: Mapping[str, int], whole: int) -> str:
    """Modules of the engine that copy a hundredth of the model and more, most first."""
    found = {name.removeprefix(ENGINE): numel / whole for name, numel in copied_by.items() if name.startswith(ENGINE)}
    most = sorted(found.items(), key=lambda item: -item[1])
    return ", ".join(f"`{name}` {part:.2f}" for name, part in most if part >= _WORTH_NAMING)


def _deferred_table(results: _Results) -> str:
    head = ("run", "reduced MiB", "fsdp2's", "ratio", "peak MiB", "fsdp2's", "ratio", "wall / fsdp2", "CPU / fsdp2")
    rows = []
    for name, document in _of_workloads(results, ("-2-accumulation",)):
        lines = _lines(document)
        if not {"ours-3-deferred", "fsdp2-deferred"} <= lines.keys():
            continue
        ours, peer = lines["ours-3-deferred"], lines["fsdp2-deferred"]
        row = [name]
        for value, other in (
            (reduced_bytes(ours), reduced_bytes(peer)),
            (ours["live"]["peak"], peer["live"]["peak"]),
        ):
            row += [_mib(value), _mib(other), f"{value / other:.2f}"]
        over = [ours[kind].get("fsdp2-deferred") for kind in ("wall_over", "cpu_over")]
        rows.append([*row, *("-" if each is None else f"{each['median']:.2f}" for each in over)])
    return table(head, rows) if rows else ""


def reduced_bytes(line: Mapping[str, Any]) -> int:
    """Bytes of reductions of a contender: by the engine's counters or as seen below it, whichever is more."""
    counted = 0 if line["sent"] is None else line["sent"]["reduce_bytes"]
    return int(max(counted, 0 if line["moved"] is None else line["moved"]["reduced_bytes"]))


def _of_workloads(results: _Results, ends: tuple[str, ...]) -> list[tuple[str, Mapping[str, Any]]]:
    names = [model + end for model in WORKLOADS for end in ends]
    return [(name, results[name]) for name in names if name in results]


def _lines(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {line["name"]: line for line in document["contenders"]}


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MEBIBYTE:.1f}"
