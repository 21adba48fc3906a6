"""A stage of a pipeline is killed, and the run goes on by itself from its newest checkpoint: nothing differs."""

import sys
from pathlib import Path

import pytest

from tests.support.chaos import Chaos
from tests.support.train_program import LIMIT_S, by_step, differences, run, start, write_text

STEPS = 24
LAST = f"iter_{STEPS:07}"
NUMBERS = ("loss", "grad_norm", "learning_rate", "samples", "data_checksum")
STAGES = (
    *("--nproc", "2", "--transformer-impl", "transformers", "--use-torch-fsdp2", "--pipeline-model-parallel-size", "2"),
    *("--num-layers", "2", "--train-iters", str(STEPS), "--save-interval", "4", "--keep-last", "3", "--async-save"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks")
def test_a_pipeline_whose_stage_is_killed_equals_one_that_is_left_alone(tmp_path: Path) -> None:
    options = (*STAGES, "--data-path", str(write_text(tmp_path / "text.txt")))
    run(*options, "--save", str(tmp_path / "quiet"), "--out", str(tmp_path / "quiet_out"))
    out, saved = tmp_path / "out", tmp_path / "saved"
    program = start(*options, "--save", str(saved), "--out", str(out), "--max-restarts", "1")
    chaos = Chaos(3, kills=1, during_saves=1)
    chaos.torment(program, out, saved)
    _, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors
    assert errors.count("starting all ranks again") == len(chaos.killed) == 1
    assert by_step(out, *NUMBERS) == by_step(tmp_path / "quiet_out", *NUMBERS)
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1))
    assert differences(saved / LAST, tmp_path / "quiet" / LAST) == []
