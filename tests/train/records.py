"""Steps as a run would measure them, for tests of what shows and writes them."""

from typing import Any

from megatron_fsdp.train.measure import StepRecord


def record(step: int, **changes: Any) -> StepRecord:
    """A step of half a second on 32 tokens; `changes` are fields of the record."""
    values: dict[str, Any] = {
        "step": step,
        "samples": 8 * step,
        "loss": 5.0 / step,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "skipped": 0,
        "data_checksum": 100 + step,
        "tokens_per_s": 64.0,
        "step_s": 0.5,
        "peak_bytes": 2**20,
        "elapsed_s": 0.5 * step,
        "tflops": 1.25,
        "mfu": 0.4,
        "exposed_share": 0.125,
    }
    return StepRecord(**{**values, **changes})
