"""`--deterministic world`: losses, norms, evaluations and weights are the same bits on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.train.run_job import SUMMARY_FILE
from tests.conftest import RunRanks
from tests.support.train_program import by_step, differences, refusal, train, write_text

WORLD = ("--deterministic", "world", "--micro-batch-size", "1", "--global-batch-size", "6")
ODD = ("--hidden-size", "12", "--ffn-hidden-size", "9")  # so that shards end between vector registers
STEP_8 = "iter_0000008"
UNITS = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy")


def of_training(keys: list[str]) -> list[str]:
    """Without the states of random generators, which are seeded anew for each microbatch."""
    return [key for key in keys if not key.startswith("rng_state")]


def losses_of(out: Path) -> tuple[dict[int, tuple[Any, ...]], float]:
    return by_step(out, "loss", "grad_norm"), json.loads((out / SUMMARY_FILE).read_text())["held_out_loss"]


def runs_of(
    run_ranks: RunRanks, folder: Path, cases: dict[str, tuple[int, tuple[str, ...]]]
) -> list[tuple[tuple[dict[int, tuple[Any, ...]], float], Path]]:
    text = str(write_text(folder / "text"))
    found = []
    for name, (ranks, options) in cases.items():
        out, saves = folder / name, folder / f"{name}-saves"
        words = (*WORLD, *options, "--data-path", text, "--out", str(out), "--save", str(saves))
        run_ranks(ranks, train, *words)
        found.append((losses_of(out), saves))
    return found


CASES = {
    "one": (1, (*UNITS, "optim_grads_params")),
    "three": (3, (*UNITS, "optim_grads")),
    "buckets": (2, ("--use-distributed-optimizer",)),
    "fully hybrid": (
        4,
        (
            *(*UNITS, "optim_grads_params"),
            *("--num-distributed-optimizer-instances", "2", "--outer-dp-sharding-strategy", "optim"),
        ),
    ),
}


def test_losses_norms_and_checkpoints_do_not_depend_on_ranks_and_strategies(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (first, saved), *others = runs_of(run_ranks, tmp_path, CASES)
    assert len(first[0]) == 8
    for found, saves in others:
        assert found == first
        assert of_training(differences(saved / STEP_8, saves / STEP_8)) == []


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_a_run_goes_on_with_the_same_bits_on_other_ranks(run_ranks: RunRanks, tmp_path: Path, optimizer: str) -> None:
    """Also where the optimizer needs whole matrices, or whole blocks of its state."""
    options = (*CASES["one"][1], *ODD, "--optimizer", optimizer)
    (whole, saved), *_ = runs_of(run_ranks, tmp_path, {"one": (1, options)})
    saves, text = tmp_path / "saves", str(tmp_path / "text")
    for ranks, steps in ((2, "3"), (3, "5"), (1, "8")):
        words = ("--exit-interval", steps) if steps != "8" else ()
        folders = ("--data-path", text, "--out", str(tmp_path / "out"), "--save", str(saves), "--load", str(saves))
        run_ranks(ranks, train, *WORLD, *options, *folders, *words)
    assert losses_of(tmp_path / "out") == whole
    assert of_training(differences(saved / STEP_8, saves / STEP_8)) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--ddp-average-in-collective",), "since a back end that averages adds up in an order of its own"),
        (("--use-torch-fsdp2",), "contradicts --use-torch-fsdp2 (from the command line), since FSDP2 leaves"),
        (
            (*UNITS, "optim_grads_params", "--transformer-impl", "transformers", "--tensor-model-parallel-size", "2"),
            "--deterministic world holds for data parallelism alone",
        ),
    ],
)
def test_what_cannot_hold_is_refused(run_ranks: RunRanks, tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    words = (*WORLD, *options, "--data-path", str(write_text(tmp_path / "text")), "--out", str(tmp_path / "out"))
    first, second = run_ranks(2, refusal, *words)
    assert told in first
    assert first == second
