"""What the benchmark is held to, and what a set of results says about it (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.exact import reduced_bytes
from benchmarks.operators import engine_copies
from benchmarks.reasons import REASONS, reason_for
from benchmarks.sections import checkpoint_ratio
from benchmarks.suite import CHECKPOINTS, WORKLOADS

Results = Mapping[str, Mapping[str, Any]]
"""By the name of a run, its document; runs that failed are not there."""

MET, MISSED, OPEN = "met", "missed", "not measured"
MAIN = "ours-3"


@dataclass(frozen=True)
class Target:
    """One promise.

    Attributes:
        title: What is measured, over what.
        limit: The largest value that meets it.
        unit: Of the value, "" for ratios.
        read: Results to the value; raises KeyError or TypeError where something was not measured.
        reason: Why it is missed where it is; shown only then. None: what `benchmarks/reasons.py` has for the title.
    """

    title: str
    limit: float
    read: Callable[[Results], float]
    unit: str = ""
    reason: str | None = None

    @property
    def told_reason(self) -> str:
        """The reason, or "" where there is none."""
        return reason_for(self.title) if self.reason is None else self.reason


@dataclass(frozen=True)
class Verdict:
    """A target beside what was reached; `value` is None where it was not measured."""

    target: Target
    value: float | None

    @property
    def word(self) -> str:
        """One of `MET`, `MISSED`, `OPEN`."""
        if self.value is None:
            return OPEN
        return MET if self.value <= self.target.limit else MISSED


def judge(results: Results, targets: Sequence[Target] | None = None) -> list[Verdict]:
    """Hold every target against the results."""
    return [Verdict(target, _read(target, results)) for target in (TARGETS if targets is None else targets)]


def told_amiss(verdicts: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    """Where `reasons.py` does not fit: missed titles without a reason, and patterns of titles that are met."""
    missed, met = ([each.target for each in verdicts if each.word == word] for word in (MISSED, MET))
    stale = [
        pattern
        for pattern, _ in REASONS
        if any(fnmatchcase(each.title, pattern) for each in met)
        and not any(fnmatchcase(each.title, pattern) for each in missed)
    ]
    return [target.title for target in missed if not target.told_reason], stale


def contender(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One contender of a comparison; KeyError where it took no part."""
    found: dict[str, Mapping[str, Any]] = {each["name"]: each for each in document["contenders"]}
    return found[name]


def ratio(run: str, rival: str, kind: str = "wall_over", name: str = MAIN) -> Callable[[Results], float]:
    """Read the median ratio of times of a contender to a rival."""
    return lambda results: contender(results[run], name)[kind][rival]["median"]


def largest_ratio(runs: Sequence[str], names: Sequence[str], rival: str, kind: str) -> Callable[[Results], float]:
    """Read the largest median ratio of some contenders to a rival over several runs."""
    return lambda results: max(ratio(run, rival, kind, name)(results) for run in runs for name in names)


def peak_ratio(run: str, rival: str, name: str = MAIN) -> Callable[[Results], float]:
    """Read the live bytes at the peak over those of a rival."""

    def read(results: Results) -> float:
        document = results[run]
        return contender(document, name)["live"]["peak"] / contender(document, rival)["live"]["peak"]

    return read


def peak_over_plan(run: str) -> Callable[[Results], float]:
    """Read how far the peak is from what the planner says, as a fraction of that."""

    def read(results: Results) -> float:
        planned = results[run]["planned_peak"]
        return abs(contender(results[run], MAIN)["live"]["peak"] / planned - 1)

    return read


def wire_bytes(line: Mapping[str, Any]) -> int:
    """What a rank sends in a step: by the engine's own counters, or seen below it at what gloo makes of it.

    The larger of both: peers have no counters.
    """
    sent, moved = line["sent"], line["moved"]
    counted = 0 if sent is None else sent["gather_bytes"] + sent["reduce_bytes"]
    return int(max(counted, 0 if moved is None else moved["gloo_bytes"]))


def sent_over_needed(run: str, name: str) -> Callable[[Results], float]:
    """Read what is sent over what the algorithm has to send."""

    def read(results: Results) -> float:
        found = contender(results[run], name)
        return wire_bytes(found) / found["needed_bytes"]

    return read


def sent_over_parts(run: str, name: str, parts: int) -> Callable[[Results], float]:
    """Read what is sent over some times what all but its own part of the float32 weights are to a rank."""

    def read(results: Results) -> float:
        document = results[run]
        ranks = document["request"]["ranks"]
        needed = parts * 4 * document["parameter_numel"] * (ranks - 1) / ranks
        return wire_bytes(contender(document, name)) / needed

    return read


def seen_over_needed(run: str, name: str, parts: int) -> Callable[[Results], float]:
    """The same by what is seen below the engine alone; 0 bytes are no measurement."""

    def read(results: Results) -> float:
        seen = contender(results[run], name)["moved"]["gloo_bytes"]
        if not seen:
            raise KeyError(name)
        return sent_over_parts(run, name, parts)(results)

    return read


def phase_ratio(run: str, phase: str, kind: str = "wall_over", name: str = MAIN) -> Callable[[Results], float]:
    """Read the median ratio of a phase to that of the first contender."""

    def read(results: Results) -> float:
        medians = {(row["phase"], row["name"]): row[kind]["median"] for row in results[run]["rows"]}
        return medians[phase, name]

    return read


def extra_allocated(run: str) -> Callable[[Results], float]:
    """Read the bytes that a step takes beyond the bare model's, over the bytes of the model's gradients."""

    def read(results: Results) -> float:
        ours, bare = (contender(results[run], name)["live"]["allocated"] for name in (MAIN, "floor"))
        return max(0, ours - bare) / (4 * results[run]["parameter_numel"])

    return read


def engine_copied(run: str, name: str = MAIN) -> Callable[[Results], float]:
    """Read the elements that the engine copies outside of collectives, per parameter."""

    def read(results: Results) -> float:
        document = results[run]
        return engine_copies(contender(document, name)["moved"]["copied_by"]) / document["parameter_numel"]

    return read


def reduce_bytes_ratio(run: str, rival: str, name: str = MAIN) -> Callable[[Results], float]:
    """Read the bytes of reductions over those that a rival issues."""

    def read(results: Results) -> float:
        ours, peer = (contender(results[run], who) for who in (name, rival))
        return reduced_bytes(ours) / reduced_bytes(peer)

    return read


def host_us(run: str, phase: str, name: str = MAIN) -> Callable[[Results], float]:
    """Read the host time per unit of one pass, in microseconds."""
    return lambda results: results[run]["host_us_by_pass"][phase][name]


def checkpointing(run: str, act: str) -> Callable[[Results], float]:
    """Read the time of a save or a load over that of FSDP2 with `dcp`."""
    return lambda results: checkpoint_ratio(results[run]["readings"], "ours", act)


def import_beyond_torch(results: Results) -> float:
    """CPU seconds to import the package where torch is there, the median."""
    times = sorted(results["facts"]["import_cpu_s"]["megatron_fsdp"])
    return float(times[len(times) // 2])


def _read(target: Target, results: Results) -> float | None:
    try:
        return float(target.read(results))
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _times() -> list[Target]:
    against = {"many-small": 0.4, "large": 0.65, "llama": 0.7, "moe": 1.0}
    floors = {"many-small": 1.5, "large": 1.25}
    found = [
        Target(f"{model}, {ranks} ranks: {kind} of a step over fsdp2's", limit, ratio(f"{model}-{ranks}", "fsdp2", key))
        for model, limit in against.items()
        for ranks in (2, 4)
        for kind, key in (("wall time", "wall_over"), ("CPU time", "cpu_over"))
    ]
    found += [
        Target(f"{model}, 2 ranks: wall time of a step over the floor's", limit, ratio(f"{model}-2", "floor"))
        for model, limit in floors.items()
    ]
    found += [
        Target(f"{model}, {about}: {kind} of a step over fsdp2's", 1.0, ratio(f"{model}-{run}", rival, key, name))
        for model in against
        for run, about, name, rival in _ELSEWHERE
        for kind, key in (("wall time", "wall_over"), ("CPU time", "cpu_over"))
    ]
    for model in against:
        run = f"{model}-2"
        whole = largest_ratio([run], ["ours-0", "ours-1", "ours-2"], "ddp", "wall_over")
        found += [
            Target(f"{model}, 2 ranks: the slowest of strategies 0 to 2 over ddp, wall time", 1.02, whole),
            Target(f"{model}, 2 ranks: mddp over ddp, wall time", 1.02, ratio(run, "ddp", name="mddp")),
            Target(
                f"{model}, 2 ranks: mddp-optim over ddp-zero, wall time",
                1.02,
                ratio(run, "ddp-zero", name="mddp-optim"),
            ),
        ]
    return found


_ONE_COPY = 1.001
"""Of gradients; the number of steps that each parameter has made is copied, too."""

_ELSEWHERE = (
    ("1", "1 rank", MAIN, "fsdp2"),
    ("2-accumulation", "4 microbatches", MAIN, "fsdp2"),
    ("2-accumulation", "4 microbatches, reduced once", "ours-3-deferred", "fsdp2-deferred"),
    ("2-bf16", "gradients in bf16", MAIN, "fsdp2"),
)
"""Runs besides the main ones: name, words, who, and whom it must not be slower than."""


def _memory_and_wire() -> list[Target]:
    found = []
    for model in WORKLOADS:
        for ranks in (2, 4):
            run = f"{model}-{ranks}"
            found.append(
                Target(f"{model}, {ranks} ranks: peak of live bytes over fsdp2's", 0.9, peak_ratio(run, "fsdp2"))
            )
            if model != "moe":
                found.append(
                    Target(f"{model}, {ranks} ranks: peak off the planner's, fraction", 0.03, peak_over_plan(run))
                )
    for strategy in range(3):
        name = f"ours-{strategy}"
        read = sent_over_needed("large-2", name)
        found.append(Target(f"large, 2 ranks: bytes on the wire over the ring minimum, {name}", 1.01, read))
    gathered_twice = sent_over_parts("large-2", MAIN, 3)
    found.append(Target("large, 2 ranks: bytes on the wire over 3 P (N - 1) / N, ours-3", 1.0, gathered_twice))
    seen = seen_over_needed("large-2", MAIN, 3)
    found.append(Target("large, 2 ranks: the same as seen by gloo, ours-3", 1.0, seen))
    pair = ("fsdp2-deferred", "ours-3-deferred")
    for model in WORKLOADS:
        run, about = f"{model}-2-accumulation", f"{model}, 4 microbatches reduced once"
        found += [
            Target(f"{about}: bytes of reductions over fsdp2's", 1.0, reduce_bytes_ratio(run, *pair)),
            Target(f"{about}: peak of live bytes over fsdp2's", 1.0, peak_ratio(run, *pair)),
        ]
    copies = "elements that the engine copies outside of collectives, per parameter"
    return [
        *found,
        Target(
            "many-small, 2 ranks: allocated beyond the bare model in step 3, over its gradients",
            0.0,
            extra_allocated("many-small-2"),
        ),
        Target(f"large, 2 ranks: {copies}", _ONE_COPY, engine_copied("large-2")),
    ]


def _phases() -> list[Target]:
    step = "optimizer.step"
    clipping = phase_ratio("step-many-small-fused", "clip_grad_norm_")
    return [
        Target("many-small: optimizer.step over fsdp2's, fused AdamW", 0.4, phase_ratio("step-many-small-fused", step)),
        Target("many-small: optimizer.step over fsdp2's, foreach", 0.3, phase_ratio("step-many-small-foreach", step)),
        Target(
            "tiny tensors: optimizer.step over fsdp2's, fused AdamW", 0.1, phase_ratio("step-tiny-tensors-fused", step)
        ),
        Target(
            "tiny tensors: optimizer.step over fsdp2's, foreach", 0.1, phase_ratio("step-tiny-tensors-foreach", step)
        ),
        Target("many-small: clip_grad_norm_ over fsdp2's", 0.2, clipping),
        Target("many-small: time to wrap over fsdp2's", 1.0, phase_ratio("start-many-small", "wrapping")),
        Target("many-small: first step over fsdp2's", 1.0, phase_ratio("start-many-small", "first step")),
        Target("host time per unit of 20 parameters, forward", 100.0, host_us("host", "forward"), "us"),
        Target("host time per unit of 20 parameters, backward", 100.0, host_us("host", "backward"), "us"),
        Target("host time per unit of 1 parameter, forward", 100.0, host_us("host-one-parameter", "forward"), "us"),
        Target("host time per unit of 1 parameter, backward", 100.0, host_us("host-one-parameter", "backward"), "us"),
        Target("CPU time of an import beyond torch's", 0.3, import_beyond_torch, "s"),
        *(
            Target(
                f"{run.removeprefix('checkpoints-')}: time to {act} over fsdp2's",
                1.0,
                checkpointing(run, act),
            )
            for run in CHECKPOINTS
            for act in ("save", "load")
        ),
        Target("padding, the worst of docs/padding.md", 0.01, lambda r: r["facts"]["largest_padding"]),
    ]


TARGETS: tuple[Target, ...] = (*_times(), *_memory_and_wire(), *_phases())
"""Every promise that this benchmark can check."""
