"""Measurements of steps, and their lines of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar


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
        tokens_per_s: Tokens of all ranks per second, in this step.
        step_s: Seconds of this step.
        peak_bytes: Largest peak of memory of any rank so far.
        elapsed_s: Seconds of training, earlier runs included.
        tflops: 10^12 floating point operations per second and rank, in this step; NaN: not known.
        mfu: Model FLOPs utilization: the share of what the hardware could do; NaN: not known.
        exposed_share: The share of this step's time in which ranks waited for communication; NaN: not measured in this
            step.
        loss_scale: What the loss was multiplied by for backward.
        params_norm: Norm of all weights after this step; NaN: not asked for.
        num_zeros_in_grad: Elements of the gradients that are zero; NaN: not asked for.
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
    tflops: float = math.nan
    mfu: float = math.nan
    exposed_share: float = math.nan
    loss_scale: float = 1.0
    params_norm: float = math.nan
    num_zeros_in_grad: float = math.nan

    @property
    def is_skipped(self) -> bool:
        """Whether the optimizer skipped this step."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


@dataclass(frozen=True)
class Evaluation:
    """One measurement on held-out text.

    Attributes:
        step: Steps trained so far.
        loss: Mean in nats per token.
    """

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        """Perplexity; infinite if it does not fit into a float."""
        return math.exp(self.loss) if self.loss < 700 else self.loss * math.inf


@dataclass(frozen=True)
class Speed:
    """The work of a step and the hardware's peak, to compute speeds from the time of a step.

    Attributes:
        tokens: Of all ranks in one optimizer step, without those that only fill up.
        flops: Operations that these tokens take, forward and backward, over all ranks; NaN: not known.
        ranks: All ranks, whatever they cut.
        peak_tflops: What one rank could do, in 10^12 operations per second; NaN: not known.
    """

    tokens: int
    flops: float = math.nan
    ranks: int = 1
    peak_tflops: float = math.nan

    def tokens_per_s(self, step_s: float) -> float:
        """Return tokens of all ranks per second, for a step of `step_s` seconds."""
        return self.tokens / step_s

    def tflops(self, step_s: float) -> float:
        """Return 10^12 operations per second and rank; NaN: not known."""
        return self.flops / step_s / self.ranks / 1e12

    def mfu(self, step_s: float) -> float:
        """Return model FLOPs utilization (Chowdhery et al. 2022, PaLM), the share of the peak; NaN: not known."""
        return self.tflops(step_s) / self.peak_tflops


Measured = TypeVar("Measured", StepRecord, Evaluation)


def to_json(value: object, indent: int | None = None) -> str:
    """Return strict JSON: numbers that are not finite become null, and unknown objects become text."""
    return json.dumps(_plain(value), indent=indent, default=str, allow_nan=False)


def to_line(measured: StepRecord | Evaluation) -> str:
    """Return one line of JSON, with its end."""
    return to_json(asdict(measured)) + "\n"


def from_line(line: str, cls: type[Measured]) -> Measured | None:
    """Parse a line of `to_line`, with NaN for null; None if the line is torn or something else."""
    try:
        found = json.loads(line)
        names = [field.name for field in fields(cls) if field.name in found]
        values: dict[str, Any] = {name: math.nan if found[name] is None else found[name] for name in names}
        return cls(**values) if isinstance(values.get("step"), int) else None
    except (ValueError, TypeError):
        return None


def read_lines(path: Path, cls: type[Measured]) -> list[Measured]:
    """Read the whole lines of a file; empty if there is no file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = [from_line(line, cls) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [measured for measured in found if measured is not None]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
