"""What a run measures, as lines of JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: Number of the step, from 1.
        samples: Samples consumed so far.
        loss: Over all ranks and microbatches, in nats per token.
        grad_norm: Norm of the whole gradient before clipping.
        learning_rate: What the optimizer used.
        skipped: Steps skipped so far, since their loss or gradient was not finite.
        data_checksum: Of the samples of this step, the same for any number of ranks.
        tokens_per_s: Tokens of all ranks per second, averaged since the last update of the display.
        step_s: Seconds of a step, likewise.
        peak_bytes: Largest peak of memory of any rank so far.
        elapsed_s: Seconds of training, earlier runs included.
    """

    step: int
    samples: int
    loss: float
    grad_norm: float
    learning_rate: float
    skipped: int
    data_checksum: int
    tokens_per_s: float
    step_s: float
    peak_bytes: int
    elapsed_s: float


@dataclass(frozen=True)
class Evaluation:
    """One measurement on held-out text.

    Attributes:
        step: Steps trained so far.
        loss: Mean in nats per token.
    """

    step: int
    loss: float


def append_records(path: Path, records: Iterable[StepRecord]) -> None:
    """Add one line per record and close the file, so that a run that is cut short keeps what it had."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(record)) + "\n" for record in records)


def read_records(path: Path) -> list[StepRecord]:
    """Read what `append_records` wrote."""
    return [StepRecord(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
