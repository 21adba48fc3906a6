"""What a run measured, and from readings to ratios and a JSON document (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.contenders import DDP, DDP_ZERO, FLOOR, OUR_DDP, OUR_DDP_OPTIM, OURS
from benchmarks.operators import Moved

TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-4}
"""Largest relative difference of losses by dtype, well below the 1e-3 by which ranks that do not communicate differ."""
_ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        model: Name of a workload.
        ranks: Number of processes.
        device_type: "cpu" or "cuda".
        steps: Measured steps, at least 1.
        warmup: Steps before them.
        contenders: Names, in table order; the floor is first.
        microbatches: Per step.
        dtype: "float32" or "bfloat16".
        bucket_mib: Gradients that close a bucket, in MiB, of all that cut them by size.
        comm_dtype: Of gradients on the wire; the same names.
        measures_memory: Whether live bytes are counted, and what one more step moves; else steps are timed, no more.
    """

    model: str
    ranks: int
    device_type: str
    steps: int
    warmup: int
    contenders: tuple[str, ...]
    microbatches: int
    dtype: str
    bucket_mib: float
    comm_dtype: str = "float32"
    measures_memory: bool = True


@dataclass(frozen=True)
class SentPerStep:
    """Collectives of one optimizer step on one rank, and the bytes that the rank sent in them."""

    gathers: int
    reductions: int
    gather_bytes: int
    reduce_bytes: int


@dataclass(frozen=True)
class LiveBytes:
    """Allocated bytes of one rank, activations included; all 0 where they were not measured.

    Attributes:
        persistent: Between steps, gradients cleared.
        peak: The most during a step.
        allocations: How often memory was taken in that step, the third one.
        allocated: Bytes that were taken in it.
        activations: What was alive when its (first) backward began, beyond `persistent`; 0 where it is not known.
    """

    persistent: int
    peak: int
    allocations: int = 0
    allocated: int = 0
    activations: int = 0


@dataclass(frozen=True)
class RankReading:
    """What one rank measured of one contender.

    Attributes:
        wall_s: Seconds per measured step.
        cpu_s: CPU seconds of all threads of the process per measured step.
        losses: This rank's loss per step, warm-up included.
        live: Memory.
        sent: Communication; None where the contender does not count it.
        collectives: Per step, as the process groups count them.
        moved: Of one step, seen below the contender; None on devices where it is not counted.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    losses: tuple[float, ...]
    live: LiveBytes
    sent: SentPerStep | None
    collectives: float
    moved: Moved | None = None


@dataclass(frozen=True)
class RunReading:
    """What all ranks measured.

    Attributes:
        parameter_numel: Elements of the whole model.
        parameter_tensors: Tensors of the whole model.
        reference_losses: Per step, of one process on the whole batch.
        contenders: By name, one entry per rank.
        absent: Who was asked for and could not take part, each with the reason.
    """

    parameter_numel: int
    parameter_tensors: int
    reference_losses: tuple[float, ...]
    contenders: dict[str, tuple[RankReading, ...]]
    absent: dict[str, str] = field(default_factory=dict)


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
        if name == FLOOR:
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
    """Make one line per contender, with ratios against each rival that took part."""
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


def document(lines: Sequence[Line], request: Request, reading: RunReading, facts: dict[str, str]) -> dict[str, Any]:
    """Return the lines for programs; times in seconds, memory in bytes, no speeds of those that disagree."""
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
        "absent": reading.absent,
        "reference_losses": reading.reference_losses,
        "contenders": contenders,
    }


def tolerance_of(request: Request) -> float:
    """Return the largest relative difference of losses that is rounding: that of the narrowest dtype in use."""
    return max(TOLERANCES[request.dtype], TOLERANCES[request.comm_dtype])


def _mean_losses(ranks: Sequence[RankReading]) -> tuple[float, ...]:
    return tuple(mean(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True))


def _over_ranks(how: Callable[[Sequence[float]], float], per_rank: Sequence[Sequence[float]]) -> list[float]:
    return [how(values) for values in zip(*per_rank, strict=True)]


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def needed_bytes(name: str, request: Request, reading: RunReading) -> int | None:
    """Count the bytes that one rank sends in a step over a ring; flags and padding are left out.

    A reduce-scatter, a gather, and broadcasts of every rank's part to all others send `(N - 1) / N` of the whole each,
    an all-reduce twice that.

    Args:
        name: A contender.
        request: For ranks, dtype and microbatches.
        reading: For the size of the model.

    Returns:
        None where it depends on what stays gathered.
    """
    parts = {FLOOR: (0, 0)}  # of gradients, and of weights
    parts |= dict.fromkeys((OURS[0], OUR_DDP, DDP), (2, 0))  # an all-reduce
    parts |= dict.fromkeys((OURS[1], OUR_DDP_OPTIM), (1, 1))  # a reduce-scatter and a gather
    parts[DDP_ZERO] = (2, 1)  # an all-reduce, and broadcasts
    parts[OURS[2]] = (request.microbatches, 1)  # a reduce-scatter after each microbatch, and a gather
    if name not in parts:
        return None
    of_gradients, of_weights = (
        count * _all_but_own(reading.parameter_numel * _ITEMSIZE[dtype], request.ranks)
        for count, dtype in zip(parts[name], (request.comm_dtype, request.dtype), strict=True)
    )
    return of_gradients + of_weights


def _all_but_own(whole_bytes: int, ranks: int) -> int:
    return whole_bytes - whole_bytes // ranks
