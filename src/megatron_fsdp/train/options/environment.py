"""Variables of the environment that decide how well a run goes, as the user guide warns of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.job import Job, World

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def with_environment(job: Job, world: World, environment: Mapping[str, str]) -> Job:
    """The job with notices about the environment.

    Raises:
        ConfigurationError: As `check_environment`.
    """
    return replace(job, notices=(*job.notices, *check_environment(environment, job, world)))


def check_environment(environment: Mapping[str, str], job: Job, world: World) -> tuple[str, ...]:
    """Check the variables that the user guide warns of.

    Args:
        environment: Such as `os.environ`.
        job: The run.
        world: Ranks and hardware.

    Returns:
        What has no effect, or costs speed, in words.

    Raises:
        ConfigurationError: A variable has a value that a flag of the run cannot live with; names both.
    """
    return (*_connections(environment, job, world), *_allocator(environment, job, world))


def _connections(environment: Mapping[str, str], job: Job, world: World) -> Iterator[str]:
    value = environment.get(CONNECTIONS)
    shards = job.engine != "ddp"
    if value is not None and world.device_type != "cuda":
        yield f"{CONNECTIONS}={value} has no effect on {world.device_type}"
        return
    if value == "1" and shards:
        flag = "--use-megatron-fsdp" if job.engine == "megatron_fsdp" else "--use-torch-fsdp2"
        raise ConfigurationError(
            f"{CONNECTIONS}=1 puts all kernels into one queue, where gathers and reductions of {flag} wait behind "
            f"compute: `unset {CONNECTIONS}`, or give 8 or more"
        )
    if shards and world.needs_one_connection and (job.sizes.tensor > 1 or job.sizes.context > 1):
        yield (
            f"{CONNECTIONS} is {value or 'not set'}, as full sharding wants it; tensor- and context-parallel ranks "
            "would rather have 1 on this hardware (before Blackwell), and may be a little slower"
        )


def _allocator(environment: Mapping[str, str], job: Job, world: World) -> Iterator[str]:
    for name in ALLOCATOR:
        settings = [part.strip().lower() for part in environment.get(name, "").split(",")]
        if "expandable_segments:true" not in settings or not job.options.ddp.nccl_ub:
            continue
        if world.device_type == "cuda":
            raise ConfigurationError(
                f"{name}={environment[name]} contradicts --use-nccl-ub: memory that NCCL registers must not grow; "
                "leave expandable_segments:True or --use-nccl-ub out"
            )
        yield f"{name}={environment[name]} has no effect on {world.device_type}"
