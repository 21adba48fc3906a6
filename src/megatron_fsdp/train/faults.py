"""Memory that runs out: in which step, on which rank, and what to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.train.failures import OutOfMemoryError, RunError
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank

_OF_CPU = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_OF_DEVICES = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OF_PEERS = ("MemoryError: ", "OutOfMemoryError: ")  # ranks exchange the type and the message of an error
_OF_NCCL = re.compile("nccl.*out of memory", re.IGNORECASE | re.DOTALL)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or its cause, says that an accelerator or the machine is out of memory."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(seen, RuntimeError | OSError) and _says_so(str(seen)):
            return True
        if isinstance(seen, CheckpointError) and (_says_so(str(seen)) or any(map(str(seen).__contains__, _OF_PEERS))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _says_so(text: str) -> bool:
    """Return whether the message of an untyped error of drivers or libraries is about memory."""
    return any(words in text for words in (*_OF_CPU, *_OF_DEVICES)) or _OF_NCCL.search(text) is not None


@contextmanager
def telling_of_memory(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Raise an `OutOfMemoryError` with a description where the block runs out of memory."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(describe(error)) from error


def memory_told(job: Job, rank: Rank, step: int, error: BaseException) -> str:
    """Describe what happened in which step (0: in none) on which rank, and what to try."""
    where = "" if isinstance(error, CheckpointError) else f" on rank {rank.index}"  # which names the ranks itself
    when = f"in step {step}" if step else "outside of a step"
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    lines = [
        f"out of memory{where} {when} on {rank.device}: {reason}",
        f"  peak so far: {peak_told(rank.device)}",
        f"  try: {'; '.join(ways_out(job, step))}",
        f"  {plan_command(job, rank.count)}   says what would fit",
    ]
    return "\n".join(lines)


def ways_out(job: Job, step: int) -> list[str]:
    """List what may need less memory, the cheapest first."""
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
    """Return the command line that plans this run."""
    preset = next((said.split()[1] for said in job.options.origins.values() if said.startswith("preset ")), None)
    model = job.options.model.hf_config or job.options.model.hf_model or preset or "MODEL"
    return (
        f"mfsdp plan {model} --ranks {ranks} --sequence-length {job.seq_length} --micro-batch-size {job.batch.micro} "
        f"--strategy auto --dtype {str(job.dtype).removeprefix('torch.')}"
    )


def peak_told(device: torch.device) -> str:
    """Describe the peak memory of this process."""
    if device.type != "cpu":
        held = torch.accelerator.max_memory_allocated(device)
        return f"{held / 2**30:.2f} GiB allocated on the device"
    import resource  # not on every system

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"{held / 2**30:.2f} GiB resident"
