"""The result of a parity check, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_fsdp.describe.text import table_lines

INITIAL, LOSS, GRADIENT, NORM = "initial weight", "loss", "gradient", "gradient norm"
COUNTER, WEIGHT, STATE, BUFFER = "step counter", "weight", "optimizer state", "buffer"
LOADED, RESUMED = "checkpoint", "step after loading"

COLUMN_OF = {
    INITIAL: "initial weights",
    LOSS: "loss",
    GRADIENT: "gradients",
    NORM: "norm",
    **dict.fromkeys((COUNTER, WEIGHT, STATE, BUFFER), "updates"),
    **dict.fromkeys((LOADED, RESUMED), "checkpoint"),
}
"""The columns of each run, by the places that belong to each."""
COLUMNS = tuple(dict.fromkeys(COLUMN_OF.values()))

LIMITS = "sharding changes nothing; a fault of the model itself, which one process has too, is not seen"
"""The limits that a passed report states."""


@dataclass(frozen=True)
class Difference:
    """The first differing tensor in one place of a run."""

    where: str  # the kind of value: loss, gradient, gradient norm, step counter, weight, optimizer state, ...
    step: int  # of the optimizer, from 1; 0 before the first
    name: str  # in the user's model; empty for the loss and the norm
    # How, for programs: missing, unexpected, shape, non-finite, stale (of the weights before the last update),
    # not reduced (some ranks' samples only), ranks disagree or differs; of the model itself: not a mean or not
    # repeatable.
    kind: str
    words: str  # how, for people
    ratio: float | None = None  # norm found over that of one process, of a weight that of the update; None: not known
    error: float = math.nan  # largest difference of an element
    allowed: float = math.nan  # for that element
    also: tuple[str, ...] = ()  # other tensors that differ in the same place

    def summary(self) -> str:
        """Describe the difference in a sentence."""
        when = f" of step {self.step}" if self.step else ""
        name = f" `{self.name}`" if self.name else ""
        size = "" if math.isnan(self.error) else f" [off by {self.error:.3g}, allowed {self.allowed:.3g}]"
        more = f"; {len(self.also)} more differ there: {few(self.also)}" if self.also else ""
        return f"{self.where}{when}{name} {self.words}{size}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON: numbers that are not finite become None."""
        fields = {**asdict(self), "also": list(self.also)}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


@dataclass(frozen=True)
class RunReport:
    """The result of one sharded run."""

    label: str  # such as "strategy 3 (optim_grads_params)"
    differences: tuple[Difference, ...]  # the earliest cause first; empty where everything agrees
    left_out: tuple[str, ...] = ()  # columns that were not looked at

    def cells(self) -> list[str]:
        """Return one word for each column: ok, "DIFFERS, step 2" (where it differs first) or "-"."""
        words = dict.fromkeys(COLUMNS, "ok") | dict.fromkeys(self.left_out, "-")
        for difference in reversed(self.differences):
            words[COLUMN_OF[difference.where]] = f"DIFFERS, step {difference.step}" if difference.step else "DIFFERS"
        return list(words.values())


@dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`."""

    num_ranks: int  # of the sharded runs
    steps: int  # of the optimizer
    part_allowed: float  # allowed difference, as a part of an element and of the largest one; times 4 with every update
    findings: tuple[Difference, ...] = ()  # faults of the model or its loss, before any sharding
    runs: tuple[RunReport, ...] = ()  # one per strategy
    notes: tuple[str, ...] = ()  # remarks that are no fault

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences in the order of causes, one run after another."""
        return (*self.findings, *(difference for run in self.runs for difference in run.differences))

    @property
    def passed(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    @property
    def judged(self) -> bool:
        """True if the result judges sharding; False if only the model or its loss is at fault."""
        return not self.findings or any(run.differences for run in self.runs)

    @property
    def verdict(self) -> str:
        """The verdict: "passed", "DIFFERS" or "NOT JUDGED"."""
        return "passed" if self.passed else "DIFFERS" if self.judged else "NOT JUDGED"

    def diagnosis(self) -> list[str]:
        """Return one sentence per finding, per first difference of a run (equal ones together), and per note."""
        lines = [f"before sharding: {finding.summary()}" for finding in self.findings]
        of_runs = dict[str, list[str]]()
        for run in self.runs:
            if run.differences:
                of_runs.setdefault(run.differences[0].summary(), []).append(run.label)
        lines += [f"{', '.join(labels)}: {summary}" for summary, labels in of_runs.items()]
        limits = [LIMITS] if self.passed else []
        return lines + [f"note: {note}" for note in (*self.notes, *limits)]

    def compared(self) -> str:
        """Describe the comparison: "2 ranks against one process, 3 steps, tolerance 1e-05"."""
        ranks, steps = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((self.num_ranks, "rank"), (self.steps, "step")))
        return f"{ranks} against one process, {steps}, tolerance {self.part_allowed:g}"

    def summary(self) -> str:
        """Return the whole report as text: a table of the runs, the diagnosis, and the verdict."""
        rows = [[run.label, *run.cells()] for run in self.runs]
        table = [*table_lines(["", *COLUMNS], rows), ""] if rows else []
        return "\n".join([*table, *self.diagnosis(), f"{self.verdict}: {self.compared()}"])

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "passed": self.passed,
            "judged": self.judged,
            "num_ranks": self.num_ranks,
            "steps": self.steps,
            "tolerance": self.part_allowed,
            "findings": [finding.to_dict() for finding in self.findings],
            "runs": [
                {
                    "label": run.label,
                    "passed": not run.differences,
                    "results": dict(zip(COLUMNS, run.cells(), strict=True)),
                    "differences": [difference.to_dict() for difference in run.differences],
                }
                for run in self.runs
            ],
            "notes": list(self.notes),
        }


def few(names: Sequence[str]) -> str:
    """List the first three names."""
    return ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
