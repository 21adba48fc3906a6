"""Small documents of runs, as the benchmark's programs write them."""

from typing import Any


def spread(value: float) -> dict[str, float]:
    """A median without spread."""
    return {"median": value, "lower": value, "upper": value}


def contender(name: str, *, over: dict[str, float], peak: int = 100, sent: int = 50, **changed: Any) -> dict[str, Any]:
    """One contender; `over`: its wall time over that of others, its CPU time is half as far from 1."""
    return {
        "name": name,
        "wall_s": spread(0.25),
        "cpu_s": spread(0.5),
        "wall_over": {rival: spread(value) for rival, value in over.items()},
        "cpu_over": {rival: spread((1 + value) / 2) for rival, value in over.items()},
        "live": {"persistent": 10, "peak": peak},
        "sent": None,
        "moved": {
            "sent_bytes": sent,
            "gloo_bytes": 2 * sent,
            "copied_numel": 100,
            "reduced_bytes": sent // 2,
            "copied_by": {"a_model": 40, "megatron_fsdp.engine.gradients": 60},
        },
        "disagrees": None,
    } | changed


def comparison(*contenders: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A run of 100 parameters on two ranks."""
    return {
        "facts": {
            "date": "today",
            "versions": "torch 9",
            "hardware": "one abacus",
            "command": "python benchmarks/compare.py --model large",
            "tokens per rank and step": "64",
        },
        "request": {"model": "large", "ranks": 2, "microbatches": 1, "comm_dtype": "float32", "steps": 8},
        "parameter_numel": 100,
        "absent": {},
        "contenders": list(contenders),
    } | changed


def phases(what: str, *rows: tuple[str, str, float], **changed: Any) -> dict[str, Any]:
    """A run of phases; each row is a phase, a contender and its ratio to the first."""
    request = {"model": "many-small", "ranks": 2, "rounds": 10, "what": what, "simulated_ranks": 0}
    return {
        "request": request | {"contenders": list(dict.fromkeys(name for _, name, _ in rows))},
        "rows": [
            {
                "phase": phase,
                "name": name,
                "wall_s": spread(0.002),
                "cpu_s": spread(0.001),
                "wall_over": spread(ratio),
                "cpu_over": spread(ratio),
                "peak": 0,
            }
            for phase, name, ratio in rows
        ],
    } | changed
