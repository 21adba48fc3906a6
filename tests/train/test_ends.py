"""Every way in which a run ends has its exit code and its words, in whole runs."""

import re
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.train.failures import is_out_of_memory, memory_advice
from tests.support.forked_programs import Program, trainer
from tests.support.on_ranks import on_ranks
from tests.support.train_program import LIMIT_S, OPTIONS, environment, job_of, metrics, run, this_rank


@pytest.mark.full
def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run(data: tuple[str, str], tmp_path: Path) -> None:
    wild = ("--optimizer", "sgd", "--lr", "1e30", "--lr-warmup-iters", "0", "--max-nan-steps", "2")
    again = ("--save", str(tmp_path / "s"), "--log-interval", "1")
    shown, errors = run(*data, *wild, *again, "--out", str(tmp_path), code=4)
    skipped = [record["skipped"] for record in metrics(tmp_path)]
    assert skipped[-2:] == [1, 2]
    shown = " ".join(shown.split())
    assert shown.count("of at most 2 in a row") == 2
    assert "3 steps in a row could not be taken, and --max-nan-steps is 2; lower --lr" in errors
    assert "Traceback" not in errors


def limited(argv: Sequence[str]) -> int:
    """The trainer in a process that may have 16 GiB of addresses: far more than it needs, far less than it asks for."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    return trainer(argv)


@pytest.mark.full
def test_out_of_memory_names_rank_step_peak_and_ways_out(data: tuple[str, str], tmp_path: Path) -> None:
    huge = ("--micro-batch-size", "1024", "--global-batch-size", "2048", "--seq-length", "128")
    wide = ("--make-vocab-size-divisible-by", str(1 << 16), "--out", str(tmp_path))
    process = Program(limited, [*OPTIONS, *data, *huge, *wide], environment())
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, errors
    assert "out of memory on rank " in errors
    assert " in step 1 on cpu: " in errors
    assert re.search(r"  peak so far: [\d.]+ [MG]iB resident\n", errors)
    assert "--micro-batch-size 512 --global-batch-size 2048 (the same steps); --recompute-granularity full" in errors
    assert "mfsdp plan tiny --ranks 2 --sequence-length 128 --micro-batch-size 1024 --strategy auto" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "words",
    [
        "DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
    ],
)
def test_what_drivers_and_libraries_say_counts_as_out_of_memory(words: str) -> None:
    assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(ValueError(words))


def test_errors_of_memory_count_also_as_a_cause_and_others_do_not() -> None:
    wrapped = RuntimeError("in unit 3")
    assert not is_out_of_memory(wrapped)
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert is_out_of_memory(wrapped)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(RuntimeError("NCCL error: remote process exited or there was a network error"))


@on_ranks(2)
def test_memory_that_ran_out_before_the_first_step() -> None:
    told = memory_advice(job_of("--micro-batch-size", "1"), this_rank(), 0, MemoryError("no room"))
    assert told.startswith(f"out of memory on rank {dist.get_rank()} outside of a step on cpu: no room\n")
    assert "--init-model-with-meta-device; more ranks" in told
    assert "--micro-batch-size 0" not in told
