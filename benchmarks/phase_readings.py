"""What measurements of single phases give: plain data, and how seconds of turns become ratios (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.report import Spread


@dataclass(frozen=True)
class PhaseRequest:
    """What to measure.

    Attributes:
        model: Name of a workload.
        ranks: Processes; 1 for a host's time.
        rounds: Turns of everybody, at least 1.
        warmup: Turns before them.
        contenders: The first is who the others are set against.
        what: "step" (optimizer and clipping), "start" (wrapping and first step), or "host" (forward and backward).
        optimizer: AdamW's kernels.
        simulated_ranks: The size of the job that one process pretends to be the first rank of; 0: none.
        device_type: "cpu" or "cuda".
        dtype: Of weights, gradients and optimizer state, "float32" or "bfloat16".
    """

    model: str
    ranks: int
    rounds: int
    warmup: int
    contenders: tuple[str, ...]
    what: str
    optimizer: str = "fused"
    simulated_ranks: int = 0
    device_type: str = "cpu"
    dtype: str = "float32"


@dataclass
class PhaseNotes:
    """Seconds per turn of one contender on one rank, by phase.

    Attributes:
        wall_s: By the clock.
        cpu_s: Of all threads of the process.
        peak: Live bytes at the peak of a step; 0 where it was not asked.
    """

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    peak: int = 0

    def add(self, phase: str, wall_s: float, cpu_s: float) -> None:
        """Note one turn."""
        self.wall_s.setdefault(phase, []).append(wall_s)
        self.cpu_s.setdefault(phase, []).append(cpu_s)


@dataclass(frozen=True)
class PhaseRow:
    """One phase of one contender.

    Attributes:
        phase: Such as "optimizer.step".
        name: The contender.
        wall_s: Of the slowest rank.
        cpu_s: Mean of the ranks.
        wall_over: Over that of the contender that was named first, in the same turn.
        cpu_over: The same for CPU time.
        peak: Live bytes at the peak; 0 where it was not asked.
    """

    phase: str
    name: str
    wall_s: Spread
    cpu_s: Spread
    wall_over: Spread
    cpu_over: Spread
    peak: int


def phase_rows(request: PhaseRequest, notes: Mapping[str, Sequence[PhaseNotes]]) -> list[PhaseRow]:
    """One row per phase and contender.

    Args:
        request: For the order.
        notes: By contender, one entry per rank.
    """
    first = request.contenders[0]
    rows = []
    for phase in notes[first][0].wall_s:
        walls = {name: [max(turn) for turn in _turns(ranks, "wall_s", phase)] for name, ranks in notes.items()}
        cpus = {
            name: [sum(turn) / len(turn) for turn in _turns(ranks, "cpu_s", phase)] for name, ranks in notes.items()
        }
        rows += [
            PhaseRow(
                phase,
                name,
                Spread.of(walls[name]),
                Spread.of(cpus[name]),
                Spread.of(_over(walls[name], walls[first])),
                Spread.of(_over(cpus[name], cpus[first])),
                max(rank.peak for rank in notes[name]),
            )
            for name in request.contenders
        ]
    return rows


def host_microseconds(rows: Sequence[PhaseRow], floor: str, units: int) -> dict[str, float]:
    """CPU time per unit and pass that each contender adds to the bare model, in microseconds.

    Args:
        rows: With the phases "forward" and "backward".
        floor: The contender that is the bare model.
        units: Of the model, the root left out.
    """
    total = {name: sum(row.cpu_s.median for row in rows if row.name == name) for name in {row.name for row in rows}}
    return {name: (seconds - total[floor]) / (2 * units) * 1e6 for name, seconds in total.items() if name != floor}


def host_microseconds_by_pass(rows: Sequence[PhaseRow], floor: str, units: int) -> dict[str, dict[str, float]]:
    """The same for each pass alone: by "forward" and "backward", then by contender."""
    found = {}
    for phase in {row.phase for row in rows}:
        medians = {row.name: row.cpu_s.median for row in rows if row.phase == phase}
        found[phase] = {
            name: (seconds - medians[floor]) / units * 1e6 for name, seconds in medians.items() if name != floor
        }
    return found


def phase_document(request: PhaseRequest, rows: Sequence[PhaseRow]) -> dict[str, Any]:
    """For programs; times in seconds."""
    return {"request": asdict(request), "rows": [asdict(row) for row in rows]}


def _turns(ranks: Sequence[PhaseNotes], kind: str, phase: str) -> list[tuple[float, ...]]:
    return list(zip(*(getattr(rank, kind)[phase] for rank in ranks), strict=True))


def _over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]
