"""What a case of an option is made of: words on the command line, and where to look in the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp.ddp.resolve import ResolvedDDP, resolve_ddp
from megatron_fsdp.train.options.job import Job, World

RANKS = 8
NUMEL = 1000
RUN = "--seq-length 64 --micro-batch-size 1 --train-iters 20 --lr 0.01"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
UNITS = f"{RUN} {SHAPE} --bf16 --use-megatron-fsdp"
BUCKETS = f"{RUN} {SHAPE} --bf16"
FLOAT32 = f"{RUN} {SHAPE} --use-megatron-fsdp"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
TRANSFORMERS = f"{UNITS} {LLAMA} --transformer-impl transformers"
FSDP2 = f"{RUN} {SHAPE} {LLAMA} --bf16 --use-torch-fsdp2 --transformer-impl transformers"
EXPERTS = f"{TRANSFORMERS} --num-experts 8"


@dataclass(frozen=True)
class Case:
    """One option.

    Attributes:
        words: What is added to the command line.
        seen: What is looked at in the job.
        expected: What it is then; it is something else without the words.
        start: The command line without them.
        world: Ranks and hardware.
    """

    words: str
    seen: Callable[[Job], Any]
    expected: Any
    start: str = UNITS
    world: World = field(default_factory=lambda: World(RANKS, "cuda"))


def resolved(job: Job) -> ResolvedDDP:
    """What the engine makes of the configuration."""
    return resolve_ddp(job.ddp, job.sizes.data * job.sizes.context, NUMEL)


def engine(name: str) -> Callable[[Job], Any]:
    """A field of the configuration that units and buffers get."""
    return lambda job: getattr(resolved(job).engine_config, name)


def rate(step: int) -> Callable[[Job], float]:
    """The learning rate of a step."""
    return lambda job: round(job.schedule.rate(step), 9)


def of(section: str, name: str) -> Callable[[Job], Any]:
    """An option as the job has it."""
    return lambda job: getattr(getattr(job.options, section), name)


def notices(job: Job) -> tuple[str, ...]:
    """What is told."""
    return job.notices
