"""Agreement of ranks in saves and loads: one rank's error is raised on all; and the report on loaded keys.

`together` and `decided_by_first` are those of `megatron_fsdp.comm.agreement`, with errors that are CheckpointErrors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp.comm import agreement
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.errors import CheckpointError, ConfigurationError, text_of

Result = TypeVar("Result")


def together(
    doing: str,
    act: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    facts: Mapping[str, str] | None = None,
) -> Result:
    """Run a function on every rank, and return only if it succeeded on all of them; one small collective."""

    def run() -> Result:
        try:
            return act()
        except CheckpointException as error:  # no Exception, so it would leave the other ranks waiting
            raise in_short(error, doing) from error

    return agreement.together(doing, run, group, facts, CheckpointError)


def decided_by_first(decide: Callable[[], Result], doing: str, group: dist.ProcessGroup | None = None) -> Result:
    """Call a function on rank 0 and return its result on all ranks; one broadcast."""
    return agreement.decided_by_first(decide, doing, group, CheckpointError)


def check_group(group: object) -> None:
    """Raise for anything but a process group or None."""
    if not isinstance(group, dist.ProcessGroup | None):
        raise ConfigurationError(f"group={group!r} is no process group; give one of this rank, or None for all ranks")


def in_short(error: CheckpointException, doing: str) -> CheckpointError:
    """Return torch's report on the ranks' errors without its tracebacks, which differ from machine to machine."""
    failures: Mapping[int, Any] = error.failures
    told = {rank: str(met) if type(met) is CheckpointError else text_of(met) for rank, (met, _) in failures.items()}
    failed = [f"rank {rank}: {text}" for rank, text in sorted(told.items())]
    made = CheckpointError(f"{doing} failed ({'; '.join(failed) or type(error).__name__})")
    made.__cause__ = error
    return made


# ---- loaded keys -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadReport:
    """The keys that were loaded, and those that were not. The same on every rank.

    Attributes:
        loaded: Keys that were read into the live objects.
        missing: Keys that the live objects have and the checkpoint lacks.
        unexpected: Keys that the checkpoint has and the live objects do not.
        reshaped: Keys whose shapes differ, with the shape in the checkpoint and the one wanted; they are not loaded.
        notes: Remarks, one line each.
        iteration: Number of the training step that the checkpoint was saved after; None where it does not say.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    iteration: int | None = None

    @property
    def is_complete(self) -> bool:
        """True if everything fitted."""
        return not (self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        lines = listed("missing", self.missing)
        lines += listed("unexpected", self.unexpected)
        lines += listed("of another shape", [f"{key} (has {a}, wanted {b})" for key, (a, b) in self.reshaped.items()])
        counts = (
            f"{len(self.loaded)} loaded, {len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.reshaped)} of another shape"
        )
        return "\n".join([counts, *lines, *self.notes])

    def require_complete(self, source: str) -> None:
        """Raise an error if anything did not fit; it names the checkpoint `source` and the misfits."""
        if not self.is_complete:
            fits = any(key != "iteration" and not key.startswith("optimizer.") for key in self.loaded)
            advice = ", or pass strict=False to load what fits" if fits else ""
            problem = f"{source} does not fit, and nothing was loaded: {self}"
            raise CheckpointError(f"{problem}\nload it into the model it was saved from{advice}")


@dataclass(kw_only=True)
class Findings:
    """The misfits so far (as in `LoadReport`)."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def reported(self, loaded: Iterable[str], iteration: int | None = None) -> LoadReport:
        """Return the report on loaded keys and misfits, in the order of keys."""
        loaded, missing, unexpected = (tuple(sorted(keys)) for keys in (loaded, self.missing, self.unexpected))
        return LoadReport(
            loaded, missing, unexpected, dict(sorted(self.reshaped.items())), tuple(self.notes), iteration
        )


def report_of_all(own: LoadReport, group: dist.ProcessGroup | None = None) -> LoadReport:
    """Merge the reports of all pipeline stages; collective."""
    everyone: list[LoadReport] = gather_objects(own, group)

    found: dict[str, Any] = {
        name: tuple(sorted({key for report in everyone for key in getattr(report, name)}))
        for name in ("loaded", "missing", "unexpected")
    }
    reshaped = dict(sorted(item for report in everyone for item in report.reshaped.items()))
    notes = tuple(dict.fromkeys(note for report in everyone for note in report.notes))
    return replace(own, **found, reshaped=reshaped, notes=notes)


def some_of(keys: Sequence[str], shown: int = 8) -> str:
    """Format keys for a message: the first few, and the number of others."""
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return ", ".join(keys[:shown]) + more


def listed(title: str, items: Sequence[object], shown: int = 8) -> list[str]:
    """Return lines of a report: a title and the first items below it; nothing without items."""
    more = [f"  ... and {len(items) - shown} more"] if len(items) > shown else []
    return [f"{title}:", *(f"  {item}" for item in items[:shown]), *more] if items else []
