"""From readings to ratios, a table and a JSON document (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.contenders import FLOORS
from benchmarks.operators import Moved
from benchmarks.readings import LiveBytes, RankReading, Request, RunReading, SentPerStep
from benchmarks.theory import needed_bytes

TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-4}
"""Largest relative difference of losses by dtype, well below the 1e-3 by which ranks that do not communicate differ."""

_FLOOR = FLOORS[0]
_RIVALS = (_FLOOR, "fsdp2", "ddp")
"""Those that everybody is set against in the table; the document has all."""

_MEBIBYTE = 2**20
_LEGEND = (
    "Medians with quartiles in brackets. Wall is the slowest rank, CPU the mean of the ranks over all threads. Ratios "
    "are taken within a round. Held is live memory between steps, peak the most during one, activations included, on "
    "the rank with most. Collectives are per step, as the process groups count them, the smallest included; gathers, "
    "reductions and what they sent are per step and rank, where the contender counts them. Needed is what its "
    "algorithm has to send per step and rank, without padding. Allocations are those of a step. Seen is what one step "
    "issues, counted below the contender; by gloo, the same with a native reduce-scatter at what gloo makes of it, the "
    "bytes of an all-reduce. Copied are elements that are copied, cast or scaled into other memory in a step."
)


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        lower, _, upper = quantiles(values, n=4, method="inclusive")
        return cls(median(values), lower, upper)

    def text(self, factor: float, digits: int) -> str:
        """Such as `1.25 [1.21, 1.31]`, each multiplied by `factor`."""
        low, middle, high = (f"{value * factor:.{digits}f}" for value in (self.lower, self.median, self.upper))
        return f"{middle} [{low}, {high}]"


@dataclass(frozen=True)
class Line:
    """One contender's results.

    Attributes:
        name: The contender.
        wall_s: Seconds per step of the slowest rank.
        cpu_s: CPU seconds per step, mean over ranks.
        wall_over: By the name of another contender: this one's wall time over the other's in the same round.
        cpu_over: The same for CPU time.
        live: Of the rank that holds most at its peak.
        sent: Of the first rank; None where it is not counted.
        collectives: Per step, of the first rank.
        losses: Per step, mean over ranks, warm-up included.
        moved: Of the first rank; None where it is not counted.
    """

    name: str
    wall_s: Spread
    cpu_s: Spread
    wall_over: dict[str, Spread]
    cpu_over: dict[str, Spread]
    live: LiveBytes
    sent: SentPerStep | None
    collectives: float
    losses: tuple[float, ...]
    moved: Moved | None


def disagreements(reading: RunReading, tolerance: float) -> dict[str, str]:
    """By contender whose loss is not that of one process on the whole batch, a sentence; floors are left out."""
    found = {}
    for name, ranks in reading.contenders.items():
        if name in FLOORS:
            continue
        pairs = zip(_mean_losses(ranks), reading.reference_losses, strict=True)
        for step, (loss, expected) in enumerate(pairs):
            if not abs(loss - expected) <= tolerance * abs(expected):
                found[name] = (
                    f"loss {loss:.9g} at step {step}, one process on the whole batch has {expected:.9g}; a "
                    f"relative difference of {tolerance:g} is allowed"
                )
                break
    return found


def summarise(reading: RunReading, rivals: Sequence[str]) -> list[Line]:
    """One line per contender, with ratios against each rival that took part."""
    walls = {name: _over_ranks(max, [rank.wall_s for rank in ranks]) for name, ranks in reading.contenders.items()}
    cpus = {name: _over_ranks(mean, [rank.cpu_s for rank in ranks]) for name, ranks in reading.contenders.items()}
    return [
        Line(
            name,
            Spread.of(walls[name]),
            Spread.of(cpus[name]),
            {rival: Spread.of(_ratios(walls[name], walls[rival])) for rival in rivals if rival in walls},
            {rival: Spread.of(_ratios(cpus[name], cpus[rival])) for rival in rivals if rival in cpus},
            max((rank.live for rank in ranks), key=lambda live: live.peak),
            ranks[0].sent,
            ranks[0].collectives,
            _mean_losses(ranks),
            ranks[0].moved,
        )
        for name, ranks in reading.contenders.items()
    ]


def markdown(lines: Sequence[Line], request: Request, reading: RunReading, facts: dict[str, str]) -> str:
    """The report for people; who disagrees with one process is shown without speeds."""
    wrong = disagreements(reading, tolerance_of(request))
    rivals = [rival for rival in _RIVALS if rival in lines[0].wall_over and rival not in wrong]
    head = ["contender", "wall ms", "CPU ms", *(f"wall / {rival}" for rival in rivals), "CPU / floor"]
    head += ["held MiB", "peak MiB", "allocations", "collectives", "gathers", "reductions", "sent MiB", "needed MiB"]
    head += ["seen MiB", "by gloo MiB", "copied / P"]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        speeds = ["-"] * (len(rivals) + 3) if line.name in wrong else _speeds(line, rivals)
        rows.append([line.name, *speeds, *_costs(line, request, reading)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    listed = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    right = [line for line in lines if line.name not in FLOORS and line.name not in wrong]
    worst = max((_largest_difference(line, reading) for line in right), default=0.0)
    left_out = [f"- {name} is shown without speeds: {why}" for name, why in wrong.items()]
    left_out += [f"- {name} took no part: {why}" for name, why in reading.absent.items()]
    return (
        f"# {request.model}, {request.ranks} ranks, {request.device_type}, {request.dtype}\n\n"
        f"{reading.parameter_numel:,} parameters in {reading.parameter_tensors} tensors; {request.steps} steps after "
        f"{request.warmup} of warm-up, {request.microbatches} microbatch(es) each; gradients travel in "
        f"{request.comm_dtype}.\n\n{table}\n\n{_LEGEND}\n\n"
        f"Losses of {'all' if not wrong else 'all other'} contenders equal those of one process on the whole batch at "
        f"every step; the largest relative difference is {worst:.1e}.\n\n"
        f"{listed}\n" + "".join(f"{each}\n" for each in left_out)
    )


def document(lines: Sequence[Line], request: Request, reading: RunReading, facts: dict[str, str]) -> dict[str, Any]:
    """The same for programs; times in seconds, memory in bytes, no speeds of those that disagree."""
    wrong = disagreements(reading, tolerance_of(request))
    contenders = []
    for line in lines:
        told = asdict(line) | {"needed_bytes": needed_bytes(line.name, request, reading), "disagrees": None}
        if line.name in wrong:
            told |= {"wall_s": None, "cpu_s": None, "wall_over": {}, "cpu_over": {}, "disagrees": wrong[line.name]}
        told["wall_over"] = {rival: over for rival, over in told["wall_over"].items() if rival not in wrong}
        told["cpu_over"] = {rival: over for rival, over in told["cpu_over"].items() if rival not in wrong}
        contenders.append(told)
    return {
        "facts": facts,
        "request": asdict(request),
        "parameter_numel": reading.parameter_numel,
        "parameter_tensors": reading.parameter_tensors,
        "planned_peak": reading.planned_peak,
        "absent": reading.absent,
        "reference_losses": reading.reference_losses,
        "contenders": contenders,
    }


def tolerance_of(request: Request) -> float:
    """The largest relative difference of losses that is rounding: that of the narrowest dtype in use."""
    return max(TOLERANCES[request.dtype], TOLERANCES[request.comm_dtype])


def _speeds(line: Line, rivals: Sequence[str]) -> list[str]:
    return [
        line.wall_s.text(1000, 1),
        line.cpu_s.text(1000, 1),
        *(line.wall_over[rival].text(1, 2) for rival in rivals),
        line.cpu_over[_FLOOR].text(1, 2),
    ]


def _costs(line: Line, request: Request, reading: RunReading) -> list[str]:
    sent = ["-"] * 3
    if line.sent is not None:
        sent_mib = (line.sent.gather_bytes + line.sent.reduce_bytes) / _MEBIBYTE
        sent = [str(line.sent.gathers), str(line.sent.reductions), f"{sent_mib:.2f}"]
    needed = needed_bytes(line.name, request, reading)
    seen = ["-"] * 3
    if line.moved is not None:
        seen = [f"{line.moved.sent_bytes / _MEBIBYTE:.2f}", f"{line.moved.gloo_bytes / _MEBIBYTE:.2f}"]
        seen.append(f"{line.moved.copied_numel / reading.parameter_numel:.2f}")
    return [
        *(f"{size / _MEBIBYTE:.1f}" if size else "-" for size in (line.live.persistent, line.live.peak)),
        str(line.live.allocations) if line.live.allocations else "-",
        f"{line.collectives:g}",
        *sent,
        "-" if needed is None else f"{needed / _MEBIBYTE:.2f}",
        *seen,
    ]


def _mean_losses(ranks: Sequence[RankReading]) -> tuple[float, ...]:
    return tuple(mean(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True))


def _largest_difference(line: Line, reading: RunReading) -> float:
    pairs = zip(line.losses, reading.reference_losses, strict=True)
    return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)


def _over_ranks(how: Callable[[Sequence[float]], float], per_rank: Sequence[Sequence[float]]) -> list[float]:
    return [how(values) for values in zip(*per_rank, strict=True)]


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]
