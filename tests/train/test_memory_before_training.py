"""Memory that runs out before the first step: in the data, in measuring the machine, in looking at checkpoints."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.train import checkpoints, run_job
from megatron_fsdp.train.data import preparation
from megatron_fsdp.train.failures import is_out_of_memory
from tests.conftest import RunRanks
from tests.support.forked_programs import Program, trainer
from tests.support.train_program import LIMIT_S, OPTIONS, environment, this_rank, train, write_text

_OF_TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
PLACES: dict[str, tuple[Any, str, Exception]] = {
    "tokens": (preparation, "encode_texts", MemoryError()),
    "opening": (preparation, "read_data", OSError(12, os.strerror(12))),
    "flops": (run_job, "model_flops", RuntimeError(_OF_TORCH)),
}
TOLD = {
    "tokens": "out of memory on rank 0 while it made the tokens of --data-path: MemoryError()\n",
    "opening": "out of memory outside of a step on cpu: opening the tokens of --data-path failed (rank 1: OSError: "
    "[Errno 12] Cannot allocate memory)\n",
    "flops": f"out of memory on rank 1 outside of a step on cpu: {_OF_TORCH}\n",
}


def trainer_without_memory(argv: Sequence[str]) -> int:
    """The trainer, where memory runs out at the place that the first word names, on the rank that tells of it."""
    where, *options = argv
    module, name, error = PLACES[where]
    work = getattr(module, name)

    def run_out(*args: Any) -> Any:
        if f"rank {os.environ['RANK']}" in TOLD[where]:
            raise error
        return work(*args)

    setattr(module, name, run_out)
    return trainer(options)


@pytest.mark.full(short=["tokens"])
@pytest.mark.parametrize("where", PLACES)
def test_it_ends_the_run_with_the_code_of_memory(where: str, tmp_path: Path) -> None:
    data = ("--data-path", str(write_text(tmp_path / "text.txt")), "--out", str(tmp_path / "out"))
    program = Program(trainer_without_memory, [where, *OPTIONS, *data], environment())
    _, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 3, errors
    assert errors.partition(": ")[2].startswith(TOLD[where])  # what all ranks raise any of them may tell first
    assert "\n  try: " in errors
    assert "Traceback" not in errors


def looked_at_without_memory(folder: Path) -> tuple[bool, str, list[str]]:
    """What looking for the newest sound checkpoint raises where one rank has no memory left, and what it says."""
    said: list[str] = []
    module, rank = checkpoints, this_rank()
    require_sound = module.require_sound

    def run_out(*args: Any) -> None:
        if rank.index == 1:
            raise MemoryError
        require_sound(*args)

    module.require_sound = run_out  # type: ignore[assignment]
    try:
        checkpoints.newest_sound(folder, said.append)
    except CheckpointError as error:
        return is_out_of_memory(error), str(error), said
    finally:
        module.require_sound = require_sound
    return False, "", said


def test_a_checkpoint_is_not_taken_for_damaged_since_there_was_no_memory_to_look(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    folder, text = tmp_path / "saved", str(write_text(tmp_path / "text.txt"))
    saving = ("--save", str(folder), "--train-iters", "1", "--out", str(tmp_path / "out"))
    run_ranks(2, train, "--data-path", text, *saving)
    words = f"verifying {folder}/iter_0000001 failed (rank 1: MemoryError)"
    assert run_ranks(2, looked_at_without_memory, folder) == [(True, words, [])] * 2
