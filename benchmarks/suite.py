"""Which runs make the benchmark, most important first, and what each costs about (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ALL_OURS = ("--strategies", "0", "1", "2", "3", "--ddp", "mddp", "mddp-optim")
ALL_PEERS = ("fsdp2", "fsdp1", "ddp", "ddp-zero", "deepspeed-1", "deepspeed-2", "deepspeed-3")
CLOSE_PEERS = ("fsdp2", "fsdp1", "ddp")
WORKLOADS = ("many-small", "large", "llama", "moe")
ABLATED = ("many-small", "large")
"""Workloads on which optimisations are switched off one by one."""
CHECKPOINTS = ("checkpoints-many-small", "checkpoints-large")
"""Runs that save and load."""

_SAVERS = ("ours", "ours, in the background", "fsdp2, dcp")
_TIMES = ("--no-memory",)
"""Where no target asks for bytes."""

_GPU_MODEL = "llama-8b-layers"


@dataclass(frozen=True)
class Run:
    """One process of the benchmark.

    Attributes:
        name: Of its file of results, unique.
        script: In this folder.
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
    """All runs on the CPU, those first that most targets hang on.

    Args:
        is_quick: Few rounds, two ranks and two models.
        rounds: Measured steps of each; None: as each has them.
    """
    models = ("many-small", "llama") if is_quick else WORKLOADS
    traced = models[:1] if is_quick else ABLATED
    found = [
        *(_everybody(model, rounds or (3 if is_quick else 5 if model == "large" else 7)) for model in models),
        *_phases(is_quick, rounds),
        *(_ablation(model, rounds or (3 if is_quick else 4 if model == "large" else 6)) for model in traced),
        *(_breakdown(model, rounds or (2 if is_quick else 5)) for model in traced),
    ]
    if is_quick:
        return tuple(found)
    return (
        *found,
        *(_checkpoints(name, rounds or (8 if name.endswith("large") else 3)) for name in CHECKPOINTS),
        *_varied(rounds),
    )


def gpu_runs(device: str = "cuda", model: str = _GPU_MODEL, rounds: int = 10) -> tuple[Run, ...]:
    """Layers as an 8B model has them on one device: the overhead of each, and the first rank of simulated large jobs.

    Args:
        device: "cuda"; on "cpu" the same is tried out.
        model: Name of a workload.
        rounds: Measured steps.
    """
    where = ("--device", device, "--dtype", "bfloat16")
    compared = _comparison(model, 1, rounds, ("--strategies", "3"), ("fsdp2", "fsdp1", "ddp"))
    host = ("host", "--model", model, "--rounds", str(rounds))
    return (
        Run("gpu", "compare.py", (*compared, *where), 600),
        *(
            Run(f"gpu-simulated-{many}", "phases.py", (*host, "--simulated-ranks", str(many), *where), 600)
            for many in (8, 64)
        ),
    )


def _everybody(model: str, rounds: int) -> Run:
    return _compared(f"{model}-2", _comparison(model, 2, rounds, ALL_OURS, ALL_PEERS))


def _varied(rounds: int | None) -> Iterator[Run]:
    """Fewer contenders where the number of ranks, microbatches, the wire's dtype or compilation is varied."""
    ours = ("--strategies", "3")
    for model in WORKLOADS:
        yield _compared(f"{model}-4", _comparison(model, 4, rounds or 4, ours, CLOSE_PEERS))
    both = (("--strategies", "0", "3"), ("fsdp2", "ddp"))
    for model in WORKLOADS:
        yield _compared(f"{model}-1", (*_comparison(model, 1, rounds or 4, *both), *_TIMES))
    for model in WORKLOADS:
        narrow = ("--comm-dtype", "bfloat16", *_TIMES)
        yield _compared(f"{model}-2-bf16", (*_comparison(model, 2, rounds or 3, *both), *narrow))
    for model in WORKLOADS:
        yield _accumulating(model, rounds or 3)
    for model in ABLATED:
        compiled = _comparison(model, 2, rounds or 2, ours, ("fsdp2",))
        yield _compared(f"{model}-2-compiled", (*compiled, "--compiled", *_TIMES))


def _accumulating(model: str, rounds: int) -> Run:
    deferred = ("--strategies", "3", "--variants", "ours-3-deferred")
    compared = _comparison(model, 2, rounds, deferred, ("fsdp2", "fsdp2-deferred"))
    return _compared(f"{model}-2-accumulation", (*compared, "--grad-accumulation", "4"))


def _phases(is_quick: bool, rounds: int | None) -> Iterator[Run]:
    count = str(rounds or (3 if is_quick else 10))
    for model in ("many-small", "tiny-tensors"):
        for kernels in ("fused", "foreach"):
            arguments = ("step", "--model", model, "--optimizer", kernels, "--rounds", count)
            yield Run(f"step-{model}-{kernels}", "phases.py", arguments, 600)
    starts = "2" if is_quick else "4"
    yield Run("start-many-small", "phases.py", ("start", "--model", "many-small", "--rounds", starts), 600)
    host = ("host", "--rounds", str(rounds or (5 if is_quick else 30)))
    yield Run("host", "phases.py", (*host, "--model", "narrow", "--simulated-ranks", "2"), 600)
    yield Run("host-one-parameter", "phases.py", (*host, "--model", "trivial", "--simulated-ranks", "2"), 600)
    for simulated in ("8",) if is_quick else ("8", "64"):
        arguments = ("host", "--model", "many-small", "--rounds", count, "--simulated-ranks", simulated)
        yield Run(f"simulated-{simulated}", "phases.py", arguments, 600)
    yield Run("facts", "phases.py", ("facts", "--rounds", "2" if is_quick else "5"), 600)


def _ablation(model: str, rounds: int) -> Run:
    return Run(f"ablation-{model}", "ablation.py", ("--model", model, "--rounds", str(rounds), "--warmup", "2"), 1200)


def _checkpoints(name: str, rounds: int) -> Run:
    model = name.removeprefix("checkpoints-")
    arguments = ("--model", model, "--rounds", str(rounds), "--no-memory", "--savers", *_SAVERS)
    return Run(name, "checkpoints.py", arguments, 600)


def _breakdown(model: str, rounds: int) -> Run:
    return Run(f"breakdown-{model}", "breakdown.py", ("--model", model, "--rounds", str(rounds)), 600)


def _comparison(model: str, ranks: int, rounds: int, ours: tuple[str, ...], peers: tuple[str, ...]) -> tuple[str, ...]:
    sizes = ("--ranks", str(ranks), "--steps", str(rounds), "--warmup", "2")
    return ("--model", model, *sizes, *ours, "--peers", *peers)


def _compared(name: str, arguments: tuple[str, ...]) -> Run:
    """Without DeepSpeed the second time: it changes more of its process than the others."""
    kept = tuple(argument for argument in arguments if not argument.startswith("deepspeed"))
    return Run(name, "compare.py", arguments, 1200, kept if kept != arguments else ())
