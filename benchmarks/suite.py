"""Which runs make the benchmark, in which order, and what each costs about (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ALL_OURS = ("--strategies", "0", "1", "2", "3")
ALL_PEERS = ("fsdp2", "fsdp1", "ddp", "ddp-zero", "deepspeed-1", "deepspeed-2", "deepspeed-3")
CLOSE_PEERS = ("fsdp2", "fsdp1", "ddp")
WORKLOADS = ("many-small", "large", "llama", "moe")


@dataclass(frozen=True)
class Run:
    """One process of the benchmark.

    Attributes:
        name: Of its file of results, unique.
        script: "compare.py" or "phases.py".
        arguments: Without those that say where the results go.
        limit_s: When it is given up.
        spare: Arguments to try again with where it fails; empty: it is not tried again.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    limit_s: float
    spare: tuple[str, ...] = ()


def runs(is_quick: bool, rounds: int | None = None) -> tuple[Run, ...]:
    """All runs on the CPU.

    Args:
        is_quick: Few rounds, two ranks and two models.
        rounds: Measured steps of each; None: as each has them.
    """
    return (*_comparisons(is_quick, rounds), *_phases(is_quick, rounds))


def gpu_runs() -> tuple[Run, ...]:
    """Layers as an 8B model has them on one device, for the overhead of each."""
    arguments = _comparison("llama-8b-layers", 1, 10, ("--strategies", "3"), ("fsdp2", "fsdp1", "ddp"))
    return (Run("gpu", "compare.py", (*arguments, "--device", "cuda", "--dtype", "bfloat16"), 600),)


def _comparisons(is_quick: bool, rounds: int | None) -> Iterator[Run]:
    """Everybody at two ranks; fewer where the number of ranks, microbatches or the wire's dtype is varied."""
    for model in WORKLOADS[:1] + WORKLOADS[2:3] if is_quick else WORKLOADS:
        count = rounds or (3 if is_quick else 8)
        yield _compared(f"{model}-2", _comparison(model, 2, count, ALL_OURS, ALL_PEERS))
        if is_quick:
            continue
        few = rounds or 5
        ours = ("--strategies", "0", "1", "3")
        yield _compared(f"{model}-4", _comparison(model, 4, few, ALL_OURS, CLOSE_PEERS))
        yield _compared(f"{model}-1", _comparison(model, 1, few, ours, ("fsdp2", "ddp")))
        accumulating = _comparison(model, 2, max(2, few - 2), ours, ("fsdp2", "ddp"))
        yield _compared(f"{model}-2-accumulation", (*accumulating, "--grad-accumulation", "4"))
        narrow = _comparison(model, 2, few, ours, CLOSE_PEERS)
        yield _compared(f"{model}-2-bf16", (*narrow, "--comm-dtype", "bfloat16"))


def _phases(is_quick: bool, rounds: int | None) -> Iterator[Run]:
    count = str(rounds or (3 if is_quick else 10))
    for model in ("many-small", "tiny-tensors"):
        for kernels in ("fused", "foreach"):
            arguments = ("step", "--model", model, "--optimizer", kernels, "--rounds", count)
            yield Run(f"step-{model}-{kernels}", "phases.py", arguments, 300)
    starts = "2" if is_quick else "4"
    yield Run("start-many-small", "phases.py", ("start", "--model", "many-small", "--rounds", starts), 300)
    yield Run("host", "phases.py", ("host", "--model", "trivial", "--ranks", "1", "--rounds", count), 300)
    for simulated in ("8",) if is_quick else ("8", "64"):
        arguments = ("host", "--model", "many-small", "--rounds", count, "--simulated-ranks", simulated)
        yield Run(f"simulated-{simulated}", "phases.py", arguments, 600)
    yield Run("facts", "phases.py", ("facts", "--rounds", "2" if is_quick else "5"), 300)


def _comparison(model: str, ranks: int, rounds: int, ours: tuple[str, ...], peers: tuple[str, ...]) -> tuple[str, ...]:
    sizes = ("--ranks", str(ranks), "--steps", str(rounds), "--warmup", "2")
    return ("--model", model, *sizes, *ours, "--peers", *peers)


def _compared(name: str, arguments: tuple[str, ...]) -> Run:
    """Without DeepSpeed the second time: it changes more of its process than the others."""
    kept = tuple(argument for argument in arguments if not argument.startswith("deepspeed"))
    return Run(name, "compare.py", arguments, 900, kept if kept != arguments else ())
