"""The report of a load, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class LoadReport:
    """The keys that were loaded, and those that were not. The same on every rank.

    Attributes:
        loaded: Keys that were read into the live objects.
        missing: Keys that the live objects have and the checkpoint lacks.
        unexpected: Keys that the checkpoint has and the live objects do not.
        reshaped: Keys whose shapes differ, with the shape in the checkpoint and the one wanted; they are not loaded.
        notes: What was done besides, in words, one line each.
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
        """Whether everything fitted."""
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
        """Raise an error if anything did not fit.

        Args:
            source: Names the checkpoint.

        Raises:
            CheckpointError: Something is missing, unexpected or of another shape; says what.
        """
        if not self.is_complete:
            fits = any(key != "iteration" and not key.startswith("optimizer.") for key in self.loaded)
            advice = ", or pass strict=False to load what fits" if fits else ""
            told = f"{source} does not fit, and nothing was loaded: {self}"
            raise CheckpointError(f"{told}\nload it into the model it was saved from{advice}")


def report_of_all(own: LoadReport, group: dist.ProcessGroup | None = None) -> LoadReport:
    """Merge the reports of all pipeline stages; collective."""
    everyone: list[LoadReport] = gather_objects(own, group)
    return replace(
        own,
        loaded=_union([report.loaded for report in everyone]),
        missing=_union([report.missing for report in everyone]),
        unexpected=_union([report.unexpected for report in everyone]),
        reshaped=dict(sorted(item for report in everyone for item in report.reshaped.items())),
        notes=tuple(dict.fromkeys(note for report in everyone for note in report.notes)),
    )


def _union(keys: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({key for of_rank in keys for key in of_rank}))


def some_of(keys: Sequence[str], shown: int = 8) -> str:
    """Format keys for a message: the first few, and how many more."""
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return ", ".join(keys[:shown]) + more


def listed(title: str, items: Sequence[object], shown: int = 8) -> list[str]:
    """Return lines of a report: a title and the first items below it; nothing without items."""
    more = [f"  ... and {len(items) - shown} more"] if len(items) > shown else []
    return [f"{title}:", *(f"  {item}" for item in items[:shown]), *more] if items else []
