"""Every way in which a run ends has its exit code and its words, also where memory runs out before the first step."""

import re
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train import checkpoints
from megatron_fsdp.train.failures import (
    NotSavedError,
    find_cause,
    is_out_of_memory,
    report_failure,
    write_failure,
)
from tests.support.forked_programs import Program, trainer
from tests.support.on_ranks import on_ranks, once
from tests.support.train_program import LIMIT_S, OPTIONS, environment, metrics, run, train, write_text
from tests.train.test_program import SECRETS, assert_hushed


@pytest.mark.full
def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run(data: tuple[str, str], tmp_path: Path) -> None:
    wild = ("--optimizer", "sgd", "--lr", "1e30", "--lr-warmup-iters", "0", "--max-nan-steps", "2")
    again = ("--save", str(tmp_path / "s"), "--log-interval", "1")
    shown, errors = run(*data, *wild, *again, "--out", str(tmp_path), env=environment(**SECRETS), code=4)
    assert_hushed(tmp_path, shown + errors)
    skipped = [record["skipped"] for record in metrics(tmp_path)]
    assert skipped[-2:] == [1, 2]
    shown = " ".join(shown.split())
    assert shown.count("of at most 2 in a row") == 2
    assert "3 steps in a row could not be taken, and --max-nan-steps is 2; lower --lr" in errors
    assert "Traceback" not in errors


def limited(argv: Sequence[str]) -> int:
    """The trainer in a process that may have 8 GiB of addresses: far more than it needs, far less than it asks for."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return trainer(argv)


@pytest.mark.full
def test_out_of_memory_names_rank_step_peak_and_ways_out(data: tuple[str, str], tmp_path: Path) -> None:
    huge = ("--micro-batch-size", "512", "--global-batch-size", "1024", "--seq-length", "128")
    wide = ("--make-vocab-size-divisible-by", str(1 << 16), "--out", str(tmp_path))
    process = Program(limited, [*OPTIONS, *data, *huge, *wide], environment())
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, errors
    assert "out of memory on rank " in errors
    assert " in step 1 on cpu: " in errors
    assert re.search(r"  peak so far: [\d.]+ [MG]iB resident\n", errors)
    assert "--micro-batch-size 256 --global-batch-size 1024 (the same steps); --recompute-granularity full" in errors
    assert "mfsdp plan tiny --ranks 2 --sequence-length 128 --micro-batch-size 512 --strategy auto" in errors
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


# ---- memory that runs out before the first step ----------------------------------------------------------------------


@on_ranks(2)
def test_a_checkpoint_is_not_taken_for_damaged_since_there_was_no_memory_to_look(tmp_path: Path) -> None:
    folder, text, said = tmp_path / "saved", tmp_path / "text.txt", list[str]()
    once(lambda: write_text(text))
    train("--data-path", str(text), "--save", str(folder), "--train-iters", "1", "--out", str(tmp_path / "out"))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoints, "require_sound", Mock(side_effect=MemoryError))
        with pytest.raises(CheckpointError) as raised:
            checkpoints.newest_sound(folder, said.append)
    assert is_out_of_memory(raised.value)
    assert str(raised.value) == f"verifying {folder}/iter_0000001 failed (rank 1: MemoryError)"
    assert said == []


# ---- what ended a rank on its way to the person who started the run --------------------------------------------------


def failed(local_rank: int, path: Path, exitcode: int = 1) -> ProcessFailure:
    return ProcessFailure(local_rank=local_rank, pid=1, exitcode=exitcode, error_file=str(path))


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001  # only to give it a traceback
        return caught


KILLED = "it was ended by SIGKILL, as after kill -9 or when the machine's memory runs out"
CLOSED, HUNG = RuntimeError("connection closed by peer"), RuntimeError("timed out; rank 1 runs code outside")
Left = tuple[Exception | None, int, float]
CAUSES: dict[str, tuple[list[Left], tuple[int, int, str]]] = {
    "the first error, and not its echo": ([(CLOSED, 1, 9e-7), (KeyError("w"), 1, 1e-7)], (1, 1, "KeyError: 'w'\n")),
    "an error alone": ([(CLOSED, 1, 0)], (0, 1, "RuntimeError: connection closed by peer\n")),
    "a killed rank, whose peers are echoes": ([(CLOSED, 1, 0), (None, -9, 0)], (1, 7, KILLED)),
    "no rank that the agent killed": ([(HUNG, 1, 0), (None, -9, 30)], (0, 1, "rank 1 runs code outside\n")),
    "what only one thing can cause": (
        [(CLOSED, 1, 0), (NotSavedError("no room"), 1, 0), (None, -6, 0)],
        (1, 6, "no room"),
    ),
    "a wrong setting, in one line": ([(ConfigurationError("no text"), 1, 0)], (0, 2, "no text")),
}
"""What each rank left: its error, if it wrote one, its exit code, and after how many seconds; then rank, code, text."""


@pytest.mark.parametrize(("left", "expected"), CAUSES.values(), ids=CAUSES)
def test_the_cause_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[Left], expected: tuple[int, int, str]
) -> None:
    begun_ns, failures = time.time_ns(), {}
    for rank, (error, exitcode, after_s) in enumerate(left):
        if error is not None:
            monkeypatch.setattr(time, "time_ns", lambda after_s=after_s: begun_ns + int(after_s * 1e9))
            write_failure(raised(error), tmp_path / f"{rank}.json")
        failures[rank] = failed(rank, tmp_path / f"{rank}.json", exitcode)
        if error is None:
            failures[rank].timestamp += int(after_s)  # ranks that catch SIGTERM have that long
    cause, (rank, code, text) = find_cause(failures), expected
    assert (cause.rank, cause.code) == (rank, code)
    assert cause.text == text if code != 1 else cause.text.startswith("Traceback") and cause.text.endswith(text)
    assert left[rank][0] is None or cause.time_ns == begun_ns + int(left[rank][2] * 1e9)


def test_exit_code_survives_where_the_error_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gone" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert report_failure(raised(NotSavedError("no room")), rank=1) == 6
    assert capsys.readouterr().err == "rank 1: no room\n"
    cause = find_cause({0: failed(0, path, exitcode=1), 1: failed(1, path, exitcode=6)})
    assert (cause.rank, cause.code, cause.text) == (1, 6, "it ended with exit code 6 and without a word")


def test_torchrun_is_told_a_sentence_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("MEGATRON_FSDP_MEETING", raising=False)
    for error, shown in ((ConfigurationError("no text"), "error: no text\n"), (NotSavedError("no"), "rank 0: no\n")):
        report_failure(raised(error), rank=0)
        assert capsys.readouterr().err == shown
        assert failed(0, tmp_path / "error.json").message["extraInfo"]["py_callstack"] == f"error: {error}"  # type: ignore[index]
    report_failure(raised(OSError("disk")), rank=0)
    assert capsys.readouterr().err == ""
    assert failed(0, tmp_path / "error.json").message["extraInfo"]["py_callstack"].startswith("Traceback")  # type: ignore[index]
    monkeypatch.setenv("MEGATRON_FSDP_MEETING", "file:///x")  # our own launcher says it
    report_failure(raised(ConfigurationError("no text")), rank=0)
    assert capsys.readouterr().err == ""
