"""What a run of one rank, and of all ranks together, measured: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from benchmarks.operators import Moved


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        model: Name of a workload.
        ranks: Number of processes.
        device_type: "cpu" or "cuda".
        steps: Measured steps, at least 1.
        warmup: Steps before them.
        contenders: Names, in table order; the floor is first.
        microbatches: Per step.
        dtype: "float32" or "bfloat16".
        bucket_mib: Gradients that close a bucket, in MiB, of all that cut them by size.
        comm_dtype: Of gradients on the wire; the same names.
        optimizer: AdamW's kernels, "fused" or "foreach".
        measures_memory: Whether live bytes are counted, and what one more step moves; else steps are timed, no more.
    """

    model: str
    ranks: int
    device_type: str
    steps: int
    warmup: int
    contenders: tuple[str, ...]
    microbatches: int
    dtype: str
    bucket_mib: float
    comm_dtype: str = "float32"
    optimizer: Literal["fused", "foreach"] = "fused"
    measures_memory: bool = True


@dataclass(frozen=True)
class SentPerStep:
    """Collectives of one optimizer step on one rank, and the bytes that the rank sent in them."""

    gathers: int
    reductions: int
    gather_bytes: int
    reduce_bytes: int


@dataclass(frozen=True)
class LiveBytes:
    """Allocated bytes of one rank, activations included; all 0 where they were not measured.

    Attributes:
        persistent: Between steps, gradients cleared.
        peak: The most during a step.
        allocations: How often memory was taken in that step, the third one.
        allocated: Bytes that were taken in it.
        activations: What was alive when its (first) backward began, beyond `persistent`; 0 where it is not known.
    """

    persistent: int
    peak: int
    allocations: int = 0
    allocated: int = 0
    activations: int = 0


@dataclass(frozen=True)
class RankReading:
    """What one rank measured of one contender.

    Attributes:
        wall_s: Seconds per measured step.
        cpu_s: CPU seconds of all threads of the process per measured step.
        losses: This rank's loss per step, warm-up included.
        live: Memory.
        sent: Communication; None where the contender does not count it.
        collectives: Per step, as the process groups count them.
        moved: Of one step, seen below the contender; None on devices where it is not counted.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    losses: tuple[float, ...]
    live: LiveBytes
    sent: SentPerStep | None
    collectives: float
    moved: Moved | None = None


@dataclass(frozen=True)
class RunReading:
    """What all ranks measured.

    Attributes:
        parameter_numel: Elements of the whole model.
        parameter_tensors: Tensors of the whole model.
        reference_losses: Per step, of one process on the whole batch.
        contenders: By name, one entry per rank.
        absent: Who was asked for and could not take part, each with the reason.
        planned_peak: What the planner says that ours-3 takes at its peak; None: it was not asked.
    """

    parameter_numel: int
    parameter_tensors: int
    reference_losses: tuple[float, ...]
    contenders: dict[str, tuple[RankReading, ...]]
    absent: dict[str, str] = field(default_factory=dict)
    planned_peak: int | None = None
