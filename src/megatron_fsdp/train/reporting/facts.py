"""The figures of a step as words, for a terminal and for plain lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_fsdp.train.reporting.console import format_bytes
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord

UNKNOWN = "-"


@dataclass(frozen=True)
class Facts:
    """What is known when the display is updated.

    Attributes:
        record: The last step, with the speeds of all steps since the last update.
        evaluation: The last held-out loss, if there is one.
        exposed_share: Exposed communication as it was measured last; NaN: never.
        left_s: Seconds that the rest of the training will take.
    """

    record: StepRecord
    evaluation: Evaluation | None
    exposed_share: float
    left_s: float


def averaged(records: Sequence[StepRecord]) -> StepRecord:
    """Return the last record with the speeds of all of them together; one or more."""
    total_s = math.fsum(record.step_s for record in records)

    def mean(name: str) -> float:
        return math.fsum(getattr(record, name) * record.step_s for record in records) / total_s

    return replace(
        records[-1],
        step_s=total_s / len(records),
        tokens_per_s=mean("tokens_per_s"),
        tflops=mean("tflops"),
        mfu=mean("mfu"),
    )


def cells(facts: Facts) -> list[tuple[str, str]]:
    """Return names and values for a terminal."""
    record, evaluation = facts.record, facts.evaluation
    return [
        ("loss", f"{record.loss:.3f}"),
        ("held-out loss", UNKNOWN if evaluation is None else f"{evaluation.loss:.3f}"),
        ("grad norm", f"{record.grad_norm:.2f}"),
        ("tokens/s", f"{record.tokens_per_s:,.0f}"),
        ("TFLOP/s/rank", short_number(record.tflops)),
        ("MFU", percent(record.mfu)),
        ("step", f"{record.step_s * 1000:,.0f} ms"),
        ("exposed comm", percent(facts.exposed_share)),
        ("memory peak", format_bytes(record.peak_bytes)),
        ("learning rate", f"{record.learning_rate:.2e}"),
        ("skipped steps", f"{record.skipped}"),
    ]


def plain_line(facts: Facts, total_steps: int) -> str:
    """Return one line of all figures."""
    record, evaluation = facts.record, facts.evaluation
    held_out = "" if evaluation is None else f"held-out {evaluation.loss:.3f}  "
    return (
        f"step {record.step:>5}/{total_steps}  loss {record.loss:.3f}  {held_out}grad norm {record.grad_norm:.2f}  "
        f"{record.tokens_per_s:,.0f} tokens/s  {short_number(record.tflops)} TFLOP/s  MFU {percent(record.mfu)}  "
        f"exposed {percent(facts.exposed_share)}  skipped {record.skipped}  peak {format_bytes(record.peak_bytes)}  "
        f"{duration(facts.left_s)} left"
    )


def short_number(value: float) -> str:
    """Return three digits of a number that is not negative, or a dash for NaN."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share as a percentage, or a dash for NaN."""
    return UNKNOWN if math.isnan(share) else f"{100 * share:.1f}%"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, such as `1:02:03` or `4:05`; a dash for NaN."""
    if not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
