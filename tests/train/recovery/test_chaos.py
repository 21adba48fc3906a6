"""Ranks are killed at random moments, also while they save: nothing is lost, nothing comes twice, no weight differs."""

import sys
from pathlib import Path

import pytest

from tests.conftest import RunRanks
from tests.support.chaos import Chaos
from tests.support.train_program import LIMIT_S, by_step, differences, run, start, train, write_text

STEPS = 200
NUMBERS = ("loss", "grad_norm", "learning_rate", "samples", "data_checksum")
LAST = f"iter_{STEPS:07}"
KILLS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt")
    return "--data-path", str(text), "--train-iters", str(STEPS), "--save-interval", "10", "--keep-last", "3"


@pytest.fixture(scope="module")
def quiet(data: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    place = tmp_path_factory.mktemp("quiet")
    run(*data, "--save", str(place / "saved"), "--out", str(place / "out"))
    return place


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks")
@pytest.mark.parametrize(("seed", "background"), [(1, ()), (2, ("--async-save",))])
def test_a_run_whose_ranks_are_killed_equals_one_that_is_left_alone(
    data: tuple[str, ...], quiet: Path, tmp_path: Path, seed: int, background: tuple[str, ...]
) -> None:
    out, saved = tmp_path / "out", tmp_path / "saved"
    options = (*data, *background, "--save", str(saved), "--out", str(out), "--max-restarts", str(KILLS))
    program = start(*options)
    chaos = Chaos(seed, kills=KILLS, during_saves=1)
    chaos.torment(program, out, saved)
    _, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors
    assert errors.count("starting all ranks again") == len(chaos.killed) == KILLS
    assert any(chaos.killed)
    assert by_step(out, *NUMBERS) == by_step(quiet / "out", *NUMBERS)
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1))
    assert differences(saved / LAST, quiet / "saved" / LAST) == []
    assert sorted(path.name for path in saved.iterdir()) == sorted(path.name for path in (quiet / "saved").iterdir())


FEW_STEPS = 12
LAST_OF_FEW = f"iter_{FEW_STEPS:07}"
FEW = ("--nproc", "2", "--train-iters", str(FEW_STEPS), "--save-interval", "4", "--keep-last", "3", "--async-save")
STAGES = ("--transformer-impl", "transformers", "--use-torch-fsdp2", "--pipeline-model-parallel-size", "2")


@pytest.mark.full(short=["ranks"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks")
@pytest.mark.parametrize("more", [(), (*STAGES, "--num-layers", "2")], ids=["ranks", "stages"])
def test_one_kill_while_a_checkpoint_is_saved_changes_nothing(
    run_ranks: RunRanks, more: tuple[str, ...], tmp_path: Path
) -> None:
    options = (*FEW, *more, "--data-path", str(write_text(tmp_path / "text.txt")))
    run_ranks(2, train, *options, "--save", str(tmp_path / "quiet"), "--out", str(tmp_path / "quiet_out"))
    out, saved = tmp_path / "out", tmp_path / "saved"
    program = start(*options, "--save", str(saved), "--out", str(out), "--max-restarts", "1")
    chaos = Chaos(3, kills=1, during_saves=1)
    chaos.torment(program, out, saved)
    _, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors
    assert errors.count("starting all ranks again") == len(chaos.killed) == 1
    assert by_step(out, *NUMBERS) == by_step(tmp_path / "quiet_out", *NUMBERS)
    assert list(by_step(out, "loss")) == list(range(1, FEW_STEPS + 1))
    assert differences(saved / LAST_OF_FEW, tmp_path / "quiet" / LAST_OF_FEW) == []
