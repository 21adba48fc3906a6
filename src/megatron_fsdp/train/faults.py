"""Faults of a run beside its numbers: memory that runs out, and ranks that hang."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from megatron_fsdp.config.hang_log import FOLDER_VARIABLE
from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.errors import CheckpointError, MegatronFSDPError
from megatron_fsdp.hang.explain import explain
from megatron_fsdp.hang.reading import read_folder, state_of
from megatron_fsdp.train.failures import (
    EXIT_HUNG,
    HungError,
    OutOfMemoryError,
    RunError,
    report_failure,
)
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank

FOLDER = "hang"
REPORT_FILE = "report.txt"
_MOST_PAUSE_S = 1.0
_OF_CPU = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_OF_DEVICES = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_OF_PEERS = ("MemoryError: ", "OutOfMemoryError: ")  # ranks exchange the type and the message of an error
_OF_NCCL = re.compile("nccl.*out of memory", re.IGNORECASE | re.DOTALL)


# ---- memory that runs out --------------------------------------------------------------------------------------------


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


def memory_told_of_data(error: BaseException, rank: Rank) -> str:
    """Describe that memory ran out while tokens were made, which options of the run do not change."""
    return (
        f"out of memory on rank {rank.index} while it made the tokens of --data-path: {_reason(error)}\n"
        f"  peak so far: {peak_told(torch.device('cpu'))}\n"
        "  try: text in shorter lines; token files (.bin and .idx, or .npy), which are mapped; or make the "
        "tokens on a machine with more memory, in a --data-cache-path that this one sees"
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


# ---- hangs -----------------------------------------------------------------------------------------------------------


@dataclass
class Pulse:
    """The last heartbeat of a rank's training loop: in which step (from 1), and when by `time.monotonic`."""

    step: int = 0
    last_s: float = field(default_factory=time.monotonic)
    is_resting: bool = False  # it loads, saves or evaluates, whose collectives have their own time limit

    def beat(self, step: int | None = None) -> None:
        """Record that this rank makes progress, and in which step."""
        self.step = self.step if step is None else step
        self.last_s = time.monotonic()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend hang detection inside the block: loading, saving and evaluating may take long."""
        self.is_resting = True
        try:
            yield
        finally:
            self.beat()
            self.is_resting = False

    @property
    def quiet_s(self) -> float:
        """Seconds since the last heartbeat; 0 while it rests."""
        return 0.0 if self.is_resting else time.monotonic() - self.last_s


class HangWatch:
    """Watches one rank from a thread, which runs also while the rank waits in a collective.

    When neither the loop nor the model has got anywhere for a time, the logs of all ranks are explained, the report is
    written to `hang/report.txt` and shown, Python's stack of this rank is written beside it, and the process ends with
    `EXIT_HUNG`; the launcher ends the others, and restarts all if restarts are left.
    """

    def __init__(self, folder: Path, job: Job, rank: Rank, pulse: Pulse) -> None:
        """Prepare to watch; the context manager starts it."""
        self._first_timeout_s = max(job.hang_timeout_s, 60.0 * job.options.parallel.distributed_timeout_minutes)
        self._place = folder / FOLDER
        self._logs = self._place
        self._timeout_s, self._rank, self._pulse = job.hang_timeout_s, rank, pulse
        self._over = threading.Event()
        self._keeps_log = False
        self._model: DistributedDataParallel | None = None

    def keep_log(self, model: DistributedDataParallel | None) -> None:
        """Let a model of this package keep its log for hangs; collective."""
        if model is None:
            return
        told = os.environ.get(FOLDER_VARIABLE)
        if told is None:
            model.log_for_hangs(self._place)
            self._model = model
        else:  # it keeps one already
            self._logs = Path(told)
        self._keeps_log = True

    def __enter__(self) -> Self:
        self._pulse.beat()
        threading.Thread(target=self._watch, name="megatron_fsdp hang watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        if raised is None and self._model is not None:
            self._model.stop_logging_for_hangs()
            with suppress(OSError):  # nobody needs the log of a rank that ended well
                for path in self._place.glob(f"rank-{self._rank.index:05d}*"):
                    path.unlink()
                self._place.rmdir()  # where it is empty

    @property
    def quiet_s(self) -> float:
        """Seconds since the loop or the model on this rank last made progress."""
        quiet_s = self._pulse.quiet_s
        if quiet_s >= self._timeout_s and self._keeps_log:
            with suppress(MegatronFSDPError, OSError):
                logs = [log for log in read_folder(self._logs).ranks if log.writer.rank == self._rank.index]
                mine = [state_of(log).quiet_s for log in logs if log.writer.process.pid == os.getpid()]
                return min([quiet_s, *mine])
        return quiet_s

    def _watch(self) -> None:
        pause_s = min(_MOST_PAUSE_S, self._timeout_s / 4)
        while not self._over.wait(pause_s):
            quiet_s = self.quiet_s
            if quiet_s >= (self._timeout_s if self._pulse.step > 1 else self._first_timeout_s):
                self._give_up(quiet_s)
                return

    def _give_up(self, quiet_s: float) -> None:
        """Explain the hang, and end the process; of the ranks' explanations the launcher shows one."""
        told = f"nothing has happened for {quiet_s:.1f} s on rank {self._rank.index}, in step {self._pulse.step}"
        told = f"{told}\n{self._explained()}"
        report = self._place / REPORT_FILE
        with suppress(OSError):
            self._place.mkdir(parents=True, exist_ok=True)
            with (self._place / f"stack_rank{self._rank.index}.txt").open("w") as file:
                faulthandler.dump_traceback(file)
            report.write_text(told + "\n", encoding="utf-8")
        if not self._over.is_set():
            error = HungError(f"{told}\n(also in {report}, with the stacks of ranks beside it)")
            report_failure(error, self._rank.index)
            sys.stderr.flush()
            os._exit(EXIT_HUNG)

    def _explained(self) -> str:
        if not self._keeps_log:
            return "this engine keeps no log for hangs; the stacks tell where each rank stands"
        try:
            return str(explain(read_folder(self._logs), self._timeout_s / 2))
        except (MegatronFSDPError, OSError) as error:
            return f"the logs of ranks cannot be read: {error}"
