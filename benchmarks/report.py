"""The measurements of a run, and their ratios and JSON document (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.contenders import UNTRAINED
from benchmarks.operators import Moved
from megatron_fsdp.comm.collectives import Traffic

TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-4}
"""Largest relative difference of losses by dtype, well below the 1e-3 by which ranks that do not communicate differ."""


@dataclass(frozen=True)
class Request:
    """The arguments of a measurement."""

    model: str
    ranks: int
    device_type: str  # "cpu" or "cuda"
    steps: int  # measured steps, at least 1
    warmup: int  # steps before them
    contenders: tuple[str, ...]  # names, in table order; the floor is first
    microbatches: int
    dtype: str  # "float32" or "bfloat16"
    bucket_mib: float  # gradients that close a bucket, in MiB, of all that cut them by size
    comm_dtype: str = "float32"  # of gradients on the wire; the same names
    # whether live bytes are counted, and what one more step moves; else steps are timed, no more
    measures_memory: bool = True


@dataclass(frozen=True)
class LiveBytes:
    """Allocated bytes of one rank, activations included; all 0 if not measured."""

    persistent: int  # between steps, gradients cleared
    peak: int  # the most during a step


@dataclass(frozen=True)
class RankReading:
    """One rank's measurements of one contender."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]  # CPU seconds of all threads of the process per measured step
    losses: tuple[float, ...]  # this rank's loss per step, warm-up included
    live: LiveBytes
    sent: Traffic | None  # per step; None where the contender does not count it
    collectives: float  # per step, as the process groups count them
    moved: Moved | None = None  # of one step, seen below the contender; None on devices where it is not counted


@dataclass(frozen=True)
class RunReading:
    """All ranks' measurements."""

    parameter_numel: int
    reference_losses: tuple[float, ...]  # per step, of one process on the whole batch
    contenders: dict[str, tuple[RankReading, ...]]  # by name, one entry per rank
    # who was asked for and could not take part, each with the reason
    absent: dict[str, str] = field(default_factory=dict)


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Return the median of at least one value, and the quartiles around it."""
    if len(values) == 1:
        return dict.fromkeys(("median", "lower", "upper"), values[0])
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "lower": lower, "upper": upper}


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of pairs."""
    return [value / other for value, other in zip(values, others, strict=True)]


def disagreements(reading: RunReading, tolerance: float) -> dict[str, str]:
    """Return by contender its loss's difference from one process on the whole batch, without `UNTRAINED` ones."""
    found = {}
    for name, ranks in reading.contenders.items():
        if name in UNTRAINED:
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


def document(reading: RunReading, request: Request, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return measurements as plain values: seconds, bytes; no speeds of contenders that disagree."""
    wrong = disagreements(reading, tolerance_of(request))
    walls = {name: _over_ranks(max, [rank.wall_s for rank in ranks]) for name, ranks in reading.contenders.items()}
    cpus = {name: _over_ranks(mean, [rank.cpu_s for rank in ranks]) for name, ranks in reading.contenders.items()}
    rivals = [name for name in request.contenders if name in walls and name not in wrong]
    contenders = []
    for name, ranks in reading.contenders.items():
        told = {
            "name": name,
            "wall_s": spread_of(walls[name]),
            "cpu_s": spread_of(cpus[name]),
            "wall_over": {rival: spread_of(ratios(walls[name], walls[rival])) for rival in rivals},
            "cpu_over": {rival: spread_of(ratios(cpus[name], cpus[rival])) for rival in rivals},
            "live": asdict(max((rank.live for rank in ranks), key=lambda live: live.peak)),
            "sent": None if ranks[0].sent is None else asdict(ranks[0].sent),
            "collectives": ranks[0].collectives,
            "losses": _mean_losses(ranks),
            "moved": None if ranks[0].moved is None else asdict(ranks[0].moved),
            "disagrees": wrong.get(name),
        }
        contenders.append(told | dict(_NO_SPEED) if name in wrong else told)
    return {
        "facts": facts,
        "request": asdict(request),
        "parameter_numel": reading.parameter_numel,
        "absent": reading.absent,
        "reference_losses": reading.reference_losses,
        "contenders": contenders,
    }


_NO_SPEED: Mapping[str, Any] = {"wall_s": None, "cpu_s": None, "wall_over": {}, "cpu_over": {}}


def tolerance_of(request: Request) -> float:
    """Return the tolerance of relative differences of losses, by the narrowest dtype in use."""
    return max(TOLERANCES[request.dtype], TOLERANCES[request.comm_dtype])


def _mean_losses(ranks: Sequence[RankReading]) -> tuple[float, ...]:
    return tuple(mean(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True))


def _over_ranks(how: Callable[[Sequence[float]], float], per_rank: Sequence[Sequence[float]]) -> list[float]:
    return [how(values) for values in zip(*per_rank, strict=True)]
