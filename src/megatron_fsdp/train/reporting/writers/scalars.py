"""Names and values for trackers, those of Megatron-LM where it has them. Pure."""

from __future__ import annotations

import math

from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return what a tracker shows of a step, without what is not known or was not measured."""
    maybe = {
        "throughput": record.tflops,
        "mfu": record.mfu,
        "exposed-communication": record.exposed_share,
    }
    return {
        "lm loss": record.loss,
        "grad-norm": record.grad_norm,
        "learning-rate": record.learning_rate,
        "loss-scale": record.loss_scale,
        "iteration-time": record.step_s,
        "tokens-per-second": record.tokens_per_s,
        "consumed-samples": float(record.samples),
        "skipped-iterations": float(record.skipped),
        "mem-peak-bytes": float(record.peak_bytes),
        **{name: value for name, value in maybe.items() if not math.isnan(value)},
    }


def evaluation_scalars(evaluation: Evaluation) -> dict[str, float]:
    """Return what a tracker shows of a held-out loss."""
    return {"lm loss validation": evaluation.loss, "lm loss validation ppl": evaluation.perplexity}
