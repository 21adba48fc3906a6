"""Faults of a step: a loss or a gradient that is not finite, and out-of-memory errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.train.launch.failures import NonFiniteStepError, OutOfMemoryError, RunError
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.recovery.hangs import Pulse

if TYPE_CHECKING:
    from megatron_fsdp.train.engines.trained import Trained

_OF_CPU = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_OF_DEVICES = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OF_PEERS = ("MemoryError: ", "OutOfMemoryError: ")  # ranks exchange the type and the message of an error
_OF_NCCL = re.compile("nccl.*out of memory", re.IGNORECASE | re.DOTALL)
_SHOWN = 5


class NanGuard:
    """Counts consecutive steps that are not finite. Every rank judges the same numbers."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        """Allow `limit` of them in a row; `say` prints each."""
        self._limit = limit
        self._say = say
        self._in_a_row = 0

    def judge(self, step: int, loss: float, grad_norm: float, trained: Trained) -> None:
        """Judge a step; one that overflowed through the loss scale alone is no failure. Collective.

        Args:
            step: Its number, from 1.
            loss: The same on all ranks.
            grad_norm: The same on all ranks.
            trained: Still has the step's gradients.

        Raises:
            NonFiniteStepError: It was one too many; on every rank.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return
        if trained.scale is not None and trained.scale.has_overflowed(loss, grad_norm):
            scale = f"{trained.scale.value:,.0f}"
            self._say(f"step {step}: gradients overflow float16 at loss scale {scale}: skipped, halved")
            return
        self._in_a_row += 1
        what = f"step {step} has loss {loss} and gradient norm {grad_norm}{where_told(trained.model)}"
        if self._in_a_row > self._limit:
            raise NonFiniteStepError(
                f"{what}: {self._in_a_row} steps in a row could not be taken, and --max-nan-steps is {self._limit}; "
                "lower --lr, look at the data of these steps, or go on from an earlier checkpoint"
            )
        self._say(f"{what}: skipped, {self._in_a_row} of at most {self._limit} in a row")


def where_told(model: nn.Module) -> str:
    """Name the parameters with gradients that are not finite, and their ranks; the same on every rank, collective."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(gather_objects(list(names_of_bad_gradients(model)))):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    if not ranks:
        return ""
    named = [f"{name} (rank {', '.join(map(str, having))})" for name, having in list(ranks.items())[:_SHOWN]]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"; not finite are the gradients of {', '.join(named)}{more}"


def names_of_bad_gradients(model: nn.Module) -> Iterator[str]:
    """Yield the parameters whose gradient, as far as this rank holds it, is not finite."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if isinstance(local, Tensor) and local.numel() and not bool(local.isfinite().all()):
            yield name


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
def _telling(describe: Callable[[Exception], str]) -> Iterator[None]:
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(describe(error)) from error


def telling_of_memory(job: Job, rank: Rank, pulse: Pulse) -> AbstractContextManager[None]:
    """Report rank, step, peak and remedies, by an `OutOfMemoryError`, if the block runs out of memory."""
    return _telling(lambda error: memory_told(error, job, rank, pulse.step))


def telling_of_memory_for_data(rank: Rank) -> AbstractContextManager[None]:
    """Do the same where the block makes tokens, whose memory options of the run do not change."""
    return _telling(
        lambda error: (
            f"out of memory on rank {rank.index} while it made the tokens of --data-path: {_reason(error)}\n"
            f"  peak so far: {peak_told(torch.device('cpu'))}\n"
            "  try: text in shorter lines; token files (.bin and .idx, or .npy), which are mapped; or make the "
            "tokens on a machine with more memory, in a --data-cache-path that this one sees"
        )
    )


def memory_told(error: BaseException, job: Job, rank: Rank, step: int) -> str:
    """Describe what happened in which step (0: before the first) on which rank, and what to try."""
    where = "" if isinstance(error, CheckpointError) else f" on rank {rank.index}"  # which names the ranks itself
    when = f"in step {step}" if step else "before the first step"
    lines = [
        f"out of memory{where} {when} on {rank.device}: {_reason(error)}",
        f"  peak so far: {peak_told(rank.device)}",
        f"  try: {'; '.join(ways_out(job, step))}",
        f"  {plan_command(job, rank.count)}   says what would fit",
    ]
    return "\n".join(lines)


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or its type where it has no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


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
