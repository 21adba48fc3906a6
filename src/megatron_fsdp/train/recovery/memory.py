"""What to say when a rank has no memory left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_fsdp.train.launch.failures import OutOfMemoryError
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.recovery.pulse import Pulse

_OF_CPU = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_OF_DEVICES = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OF_NCCL = re.compile("nccl.*out of memory", re.IGNORECASE | re.DOTALL)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this, or what it was raised from, says that memory ran out; of an accelerator or of the machine."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(seen, RuntimeError | OSError) and _says_so(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _says_so(text: str) -> bool:
    """Whether an error that has no type of its own is about memory: of drivers and libraries, by their words."""
    return any(words in text for words in (*_OF_CPU, *_OF_DEVICES)) or _OF_NCCL.search(text) is not None


@contextmanager
def telling_of_memory(job: Job, rank: Rank, pulse: Pulse) -> Iterator[None]:
    """Tell rank, step, peak and ways out where the block runs out of memory.

    Raises:
        OutOfMemoryError: In place of what the block raised.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(memory_told(error, job, rank, pulse.step)) from error


def memory_told(error: BaseException, job: Job, rank: Rank, step: int) -> str:
    """What happened where, and what to try.

    Args:
        error: What was raised.
        job: The run.
        rank: This process.
        step: The step under way; 0 before the first.
    """
    when = f"in step {step}" if step else "before the first step"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lines = [
        f"out of memory on rank {rank.index} {when} on {rank.device}: {reason}",
        f"  peak so far: {peak_told(rank.device)}",
        f"  try: {'; '.join(ways_out(job, step))}",
        f"  {plan_command(job, rank.count)}   says what would fit",
    ]
    return "\n".join(lines)


def ways_out(job: Job, step: int) -> list[str]:
    """What may need less memory, the cheapest first."""
    options, ways = job.options, []
    if job.batch.micro > 1:
        less = job.batch.micro // 2
        ways.append(f"--micro-batch-size {less} --global-batch-size {job.batch.total} (the same steps)")
    if options.training.recompute_granularity is None:
        ways.append("--recompute-granularity full")
    if job.engine == "megatron_fsdp" and job.ddp.data_parallel_sharding_strategy != "optim_grads_params":
        ways.append("--data-parallel-sharding-strategy optim_grads_params")
    if step == 0 and not options.parallel.init_model_with_meta_device:
        ways.append("--init-model-with-meta-device")
    return [*ways, "more ranks"]


def plan_command(job: Job, ranks: int) -> str:
    """The command line that plans this run."""
    preset = next((said.split()[1] for said in job.options.origins.values() if said.startswith("preset ")), None)
    model = job.options.model.hf_config or job.options.model.hf_model or preset or "MODEL"
    return (
        f"mfsdp plan {model} --ranks {ranks} --sequence-length {job.seq_length} --micro-batch-size {job.batch.micro} "
        f"--strategy auto --dtype {str(job.dtype).removeprefix('torch.')}"
    )


def peak_told(device: torch.device) -> str:
    """The most memory that this process has held."""
    if device.type != "cpu":
        held = torch.accelerator.max_memory_allocated(device)
        return f"{held / 2**30:.2f} GiB allocated on the device"
    import resource  # not on every system

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"{held / 2**30:.2f} GiB resident"
