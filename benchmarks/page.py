"""Render docs/performance.md from results: ratios, exact counts, phases (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.operators import engine_copies

Results = Mapping[str, Mapping[str, Any]]
"""The documents of runs, by name, without failed runs."""
Case = Mapping[str, Any]
"""The counts of one engine and model on so many ranks."""

PUBLISHED = "benchmarks/results/bench-2xcpu.json"
TABLES = "benchmarks/results/bench-2xcpu.md"
SCALE = "benchmarks/results/scale.json"
_MEBIBYTE = 2**20
_PEER_SAVER = "fsdp2, dcp"
MODELS = {
    "many-small-2": "48 layers, width 128, 965 tensors, 9.8 M parameters",
    "large-2": "8 layers, width 512, vocabulary 8,192, 33.7 M",
    "llama-2": "Hugging Face Llama, 6 layers, vocabulary 8,192",
    "moe-2": "Hugging Face Mixtral, 6 layers, vocabulary 2,048",
}
"""The models of the runs that the README shows."""

_OPENING = """\
# Performance

Measured on two CPU cores, over gloo, on up to four ranks, beside its peers in the same runs, and on one GPU
([below](#on-a-gpu)). **Never measured: several GPUs**, so neither NCCL between ranks nor overlap on a network.

![Step time and peak memory beside FSDP2 and DDP](images/performance.png)
"""

_METHOD = f"""\
## How it was measured

- All contenders train the same model from the same weights on the same data with fused AdamW, in the same processes,
  over gloo with default settings. They take turns, one step each, in an order that rotates. The C library keeps the
  memory that they free, as allocators of GPUs do. Three older runs were made without that: the two beside DeepSpeed,
  and Muon on four ranks with 965 tensors.
- The floor is each rank training alone, without communication: 1.00 would be free. `wire-0` and `wire-3` are the
  collectives of strategies 0 and 3 without any training: what the back end itself takes.
- A ratio is the median over rounds of two contenders' times in the same round. Wall time is the slowest rank's.
- A speed counts only if the losses of every step equal those of one process on the whole batch to six digits.
- Held are the bytes of tensors between steps, on the rank with most; the peak adds what the allocator sees in a step.

[All tables](../{TABLES}), with quartiles, counts and the commits of each run, are in the repository;
`make bench ARGS="--publish"` makes them and this page anew, and a test compares both with the results.
"""

_GPU = """\
## On a GPU

One H100, torch 2.11, four layers of an 8B model in bfloat16 with float32 main weights and gradients, fused AdamW.
Rank 0 of 8 and of 64 send nothing: these times are those of kernels and copies. More of these runs:
[26 November](../benchmarks/results/gpu-h100-2026-11-26/README.md),
[28 November](../benchmarks/results/gpu-h100-2026-11-28/README.md).

| | plain torch | FSDP2 | strategy 0 | strategy 3 |
| --- | --- | --- | --- | --- |
| 1 rank, 4,096 tokens, ms | 51.3 | 58.2 | 53.9 | 53.7 |
| 1 rank, 8,192 tokens, ms | 95.6 | 102.5 | 98.3 | 98.4 |
| rank 0 of 8, 4,096 tokens, ms | - | 48.7 | 53.4 | 44.7 |
| rank 0 of 8, peak GiB | - | 5.29 | 16.39 | 6.20 |
| rank 0 of 64, peak GiB | - | 4.14 | 16.39 | 4.87 |
"""

_TABLES_OPENING = f"""\
# All tables of the benchmark on two CPU cores

Made from `{PUBLISHED}`; the page for readers is [Performance](../../docs/performance.md).

- Runs `muon-...` are of Muon for matrices and AdamW for the rest: by this engine (`ours-muon`), and by
  FSDP2 whose ranks gather and iterate every matrix (`fsdp2-muon`); `ours-3` and `fsdp2` step AdamW alone beside them.
- DeepSpeed (0.19.8, ZeRO-3 with parameters and optimizer on the host) keeps its defaults but for three that would make
  it train otherwise: it clips gradients to a norm of 1, steps by an Adam that rounds in its own way, and replaces
  torch's linear in the whole process. Without them its weights are those of one process, bit for bit, on two ranks.
  By default it keeps gathered weights of up to 1e9 elements, so all of these models: it gathers once and holds more.
  `deepspeed-host-releases` sets these limits to 0, as they work out for large models.
- Runs `...-host` keep state in host memory, which is the device's here: held and peak count it. Those of 2026-11-28
  were made beside other work; of their times, CPU time over another's is the steadiest.
- Quartiles are in brackets; CPU time counts all threads of a rank. Sent is per
  rank and step; "by gloo" counts a native reduce-scatter as the all-reduce that gloo makes of it. Copied are elements
  that are copied, cast or scaled into other memory, per parameter, and those of them that this engine's own code asks
  for. Counts are exact and repeat.
"""


_SCALE = """\
Counted by one process as the first of many ranks (`python -m benchmarks.scale`), AdamW, strategy 3 over all of them.
A box is a rectangular piece of a tensor that one rank saves. The first rank of a save receives a bit for each tensor
of each rank, then 2 bytes for each box that was written and 8 for each rank's part of a tensor. The next save of the
same tensors and objects is not planned again.
"""

_SCALE_BOXES = """\
Beside FSDP2 with torch's planner, {own[model]} on {own[ranks]} ranks: {own[entries]:,} entries of a save for
{peer[entries]:,}, and {own[save_s]:.1f} s of CPU at the first rank for about {peer[save_s]:.1f}. `.metadata` has about
{box_bytes:.0f} bytes for each box; every rank that loads reads all of them, piece by piece. Boxes that torch's planner
saved are read one by one: {read[entries]:,} in {read[load_s]:.1f} s. [All counts](../benchmarks/results/scale.md).
"""


def render(results: Results, scale: Sequence[Case]) -> str:
    """Write the page for readers: one small table per question."""
    if not results:
        return f"{_OPENING}\nNo run has been published yet.\n"
    steps = comparisons(results)
    parts = [_OPENING.rstrip(), "## How long a step takes", _STEPS, step_table(steps)]
    parts += ["## How much memory it takes", _MEMORY, memory_table(steps)]
    parts += ["## Where it is behind", behind(results)]
    parts += [
        "## Optimizers, weights for inference, checkpoints",
        parts_table(results),
        "## At what scale",
        *scale_parts(scale),
        _GPU.rstrip(),
        _METHOD.rstrip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_tables(results: Results) -> str:
    """Write the page of all tables."""
    parts = [_TABLES_OPENING.rstrip(), "## Results", facts(results), comparison_table(comparisons(results))]
    parts += [wire_shares(comparisons(results)), notes(results)]
    parts += ["## Phases", phase_table({name: found for name, found in results.items() if "rows" in found})]
    saved = {name: found for name, found in results.items() if found.get("what") == "checkpoints"}
    parts += ["## Checkpoints", checkpoint_table(saved)] if saved else []
    return "\n\n".join(part for part in parts if part) + "\n"


# ---- the page for readers --------------------------------------------------------------------------------------------

_STEPS = "Wall time over the floor (the same ranks without communication, 1.00; lower is better), two ranks, float32:"
_MEMORY = "Live MiB on the rank with most: between steps, and at the peak of a step."
SHOWN = {
    "ours-3": "this engine",
    "ours-fsdp2": "`megatron_fsdp.fsdp2`",
    "fsdp2": "FSDP2",
    "mddp": "our DDP",
    "ddp": "torch's DDP",
}
"""The contenders of the page for readers, by their titles."""
_LEVEL = 1.02
"""The ratio from which on a figure is listed as behind: medians repeat within about two per cent."""


def _lines_of(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {line["name"]: line for line in found["contenders"]}


def step_table(results: Results) -> str:
    """Make a row of times over the floor for each model."""
    rows = []
    for run, title in MODELS.items():
        lines = _lines_of(results[run])
        found = [lines.get(name, {"wall_over": {}})["wall_over"].get("floor") for name in SHOWN]
        rows.append([title, *("-" if each is None else f"{each['median']:.2f}" for each in found)])
    return table(("model", *SHOWN.values()), rows)


def memory_table(results: Results) -> str:
    """Make a row of held and peak bytes for each model."""
    rows = []
    for run, title in MODELS.items():
        lines = _lines_of(results[run])
        live = [lines[name]["live"] if name in lines else None for name in SHOWN]
        cells = ["-" if each is None else f"{_mib(each['persistent'], 0)}, {_mib(each['peak'], 0)}" for each in live]
        rows.append([title, *cells])
    return table(("model", *SHOWN.values()), rows)


def behind(results: Results) -> str:
    """List the times and peaks in which this engine is behind the peer that does the same."""
    pairs = (("ours-3", "fsdp2"), ("ours-fsdp2", "fsdp2"), ("ours-0", "ddp"), ("mddp", "ddp"))
    titles = {**SHOWN, "ours-0": "strategy 0"}
    told = []
    for name, peer in pairs:
        for what, ratio in (("step", _wall_ratio), ("peak memory", _peak_ratio)):
            found = {run: ratio(_lines_of(results[run]), name, peer) for run in MODELS}
            worse = [
                f"{value:.2f} ({MODELS[run].partition(', ')[0]})"
                for run, value in found.items()
                if value and value > _LEVEL
            ]
            if worse:
                told.append(f"- {what} of {titles[name]} over that of {titles[peer]}: {', '.join(worse)}")
    told += [
        f"- {title}, over FSDP2: {own / other:.2f}" for title, own, other in _parts(results) if own / other > _LEVEL
    ]
    saved = results.get("checkpoints")
    for act in ("save", "load") if saved is not None else ():
        assert saved is not None
        value = saver_ratio(saved, "ours", act)
        if value > _LEVEL:
            told.append(
                f"- checkpoints, {act} in the foreground over FSDP2 with `torch.distributed.checkpoint`: {value:.2f}"
            )
    return "\n".join(told) or "Nowhere, in these runs."


def _wall_ratio(lines: Mapping[str, Mapping[str, Any]], name: str, peer: str) -> float | None:
    found = lines[name]["wall_over"].get(peer) if name in lines else None
    return None if found is None else float(found["median"])


def _peak_ratio(lines: Mapping[str, Mapping[str, Any]], name: str, peer: str) -> float | None:
    return lines[name]["live"]["peak"] / lines[peer]["live"]["peak"] if name in lines and peer in lines else None


def parts_table(results: Results) -> str:
    """Make a row for each part of a training that is measured alone: wall time beside that of a peer."""
    rows = [[title, f"{own:,.1f}", f"{other:,.1f}", f"{own / other:.2f}"] for title, own, other in _parts(results)]
    for who, title in (("ours", "in the foreground"), ("ours, in the background", "until training goes on")):
        if "checkpoints" in results:
            rows.append(
                [f"save of 193 MiB, {title}", "-", "-", f"{saver_ratio(results['checkpoints'], who, 'save'):.2f}"]
            )
    if "checkpoints" in results:
        rows.append(["load of 193 MiB", "-", "-", f"{saver_ratio(results['checkpoints'], 'ours', 'load'):.2f}"])
    return table(("", "this engine, ms", "FSDP2, ms", "ratio"), rows)


def _parts(results: Results) -> Iterator[tuple[str, float, float]]:
    """Iterate over the parts measured alone: title, and milliseconds of this engine and of its peer."""
    for run, phase, name, peer, title in _PARTS:
        found = {(row["phase"], row["name"]): row for row in results[run]["rows"]} if run in results else {}
        if (phase, name) in found and (phase, peer) in found:
            own, other = (1e3 * found[phase, who]["wall_s"]["median"] for who in (name, peer))
            yield title, own, other


_PARTS = (
    ("step-many-small-fused", "optimizer.step", "ours-3", "fsdp2", "AdamW step, 965 tensors"),
    ("step-many-small-fused", "clip_grad_norm_", "ours-3", "fsdp2", "gradient norm and clipping, 965 tensors"),
    (
        "muon-large-4",
        "optimizer.step",
        "ours-muon",
        "fsdp2-muon",
        "Muon step, 4 ranks (FSDP2: all matrices on all)",
    ),
    ("start-many-small", "wrapping", "ours-3", "fsdp2", "sharding 48 layers, 965 tensors"),
    (
        "weights",
        "pass of whole weights",
        "ours-3, to one rank",
        "fsdp2, full_tensor()",
        "1 GB of weights to one rank",
    ),
    (
        "weights",
        "pass of whole weights",
        "ours-3, to all ranks",
        "fsdp2, full_tensor()",
        "1 GB of weights to all ranks",
    ),
)
"""Run, phase, contender, peer and title of each row of `parts_table`."""


def scale_parts(cases: Sequence[Case]) -> list[str]:
    """Write what the most ranks cost, and what a save costs beside torch's on the most of its ranks."""
    peers, most = [case for case in cases if case["engine"] == "fsdp2"], max(case["ranks"] for case in cases)
    large, peer = [case for case in cases if case["ranks"] == most], max(peers, key=lambda case: case["ranks"])
    own = next(case for case in cases if (case["model"], case["ranks"]) == (peer["model"], peer["ranks"]))
    read = next(case for case in peers if "load_s" in case)
    head = ("wrap, CPU s", "padding", "collectives of a step", "millions of boxes", "first rank of a save: CPU s, MiB")
    shown = "{model} | {wrap_s:.1f} | {padding:.2%} | {messages} | {millions:.1f} | {save_s:.1f}, {save_mib:.0f} | "
    shown += "{load_s:.1f}, {load_mib:.0f}"
    rows = [shown.format(**case, millions=case["entries"] / 1e6).split(" | ") for case in large]
    box_bytes = sum(case["metadata_bytes"] for case in large) / sum(case["entries"] for case in large)
    boxes = _SCALE_BOXES.format(own=own, peer=peer, box_bytes=box_bytes, read=read)
    return [_SCALE.rstrip(), table((f"{most:,} ranks", *head, "a load: CPU s, MiB"), rows), boxes.rstrip()]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def spread(value: Mapping[str, float] | None, factor: float, digits: int) -> str:
    """Format as `1.25 [1.21, 1.31]`; a dash for None."""
    if value is None:
        return "-"
    low, middle, high = (f"{value[key] * factor:.{digits}f}" for key in ("lower", "median", "upper"))
    return f"{middle} [{low}, {high}]"


def facts(results: Results) -> str:
    """Render date, commit, versions and hardware, from the first run that has them."""
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
    """Make a row for each contender of each comparison, in a table of times and one of costs."""
    lines = [(name, found, line) for name, found in results.items() for line in found["contenders"]]
    if not lines:
        return ""
    times = ("run", "contender", "wall ms", "wall / floor", "CPU / floor", "wall / fsdp2", "CPU / fsdp2", "wall / ddp")
    costs = ("held MiB", "peak MiB", "peak / fsdp2", "collectives", "sent MiB", "by gloo MiB", "copied / P", "engine's")
    timed = [[name, line["name"], spread(line["wall_s"], 1000, 1), *_ratios(line)] for name, _, line in lines]
    counted = [[name, line["name"], *_costs(found, line)] for name, found, line in lines]
    return f"{table(times, timed)}\n\n{table((*times[:2], *costs), counted)}"


def summary_table(results: Results) -> str:
    """Make the README's table: times of a step over the floor's, and peaks, for one run of each model."""
    names = ("ours-3", "fsdp2", "ddp")
    rows = []
    for run, title in MODELS.items():
        lines = {each["name"]: each for each in results[run]["contenders"]}
        ratios = [f"{lines[name]['wall_over']['floor']['median']:.2f}" for name in names]
        peaks = [_mib(lines[name]["live"]["peak"], 0) for name in names]
        rows.append([title, *ratios, ", ".join(peaks)])
    return table(("model", "this engine", "FSDP2", "DDP", "peak live MiB: this engine, FSDP2, DDP"), rows)


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


def wire_shares(results: Results) -> str:
    """Render the share of a step's time over the floor that its bare collectives take, in medians of a round."""
    lines = []
    for name, found in results.items():
        over = {line["name"]: line["wall_over"].get("floor", {}).get("median") for line in found["contenders"]}
        for strategy in ("0", "3"):
            wire, whole = over.get(f"wire-{strategy}"), over.get(f"ours-{strategy}")
            if wire is not None and whole is not None:
                lines.append(
                    f"- {name}, ours-{strategy}: {whole:.2f} of the floor, of which {wire:.2f} are the time of its "
                    f"collectives alone and {max(0.0, whole - 1 - wire):.2f} are left for everything else"
                )
    return "\n".join(lines)


def notes(results: Results) -> str:
    """List contenders that disagree with one process, and those missing from runs."""
    lines, absences = [], dict[tuple[str, str], list[str]]()
    for name, found in results.items():
        wrong = [line for line in found.get("contenders", ()) if line["disagrees"]]
        lines += [f"- {name}, {line['name']}: no speed, since {line['disagrees']}" for line in wrong]
        for absent, why in found.get("absent", {}).items():
            absences.setdefault((absent, why), []).append(name)
    lines += [f"- {absent} took no part in {', '.join(runs)}: {why}" for (absent, why), runs in absences.items()]
    return "\n".join(lines)


def _mib(num_bytes: float, digits: int = 1) -> str:
    return f"{num_bytes / _MEBIBYTE:.{digits}f}"


def saver_ratio(found: Mapping[str, Any], who: str, act: str, kind: str = "wall_s") -> float:
    """Return the median over rounds of a saver's time (of the slowest rank) over that of FSDP2 with `dcp`.

    `act` is save or load, `kind` wall_s or cpu_s.
    """
    ours, peers = (
        [max(turn) for turn in zip(*(one[act][kind] for one in found["readings"][name]), strict=True)]
        for name in (who, _PEER_SAVER)
    )
    return median(own / peer for own, peer in zip(ours, peers, strict=True))


# ---- phases, checkpoints ---------------------------------------------------------------------------------------------


def phase_table(results: Results) -> str:
    """Make a row for each phase and contender, and render the host time per unit."""
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


def checkpoint_table(results: Results) -> str:
    """Make the table of saving and loading beside FSDP2's with `dcp`."""
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
