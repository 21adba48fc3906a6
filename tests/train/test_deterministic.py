"""`--deterministic world`: losses, norms, evaluations and weights are the same bits on any number of ranks."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.cli.main import main
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.measure import StepRecord
from megatron_fsdp.train.models.trained import Trained
from megatron_fsdp.train.recorder import METRICS_FILE
from megatron_fsdp.train.replay import first_difference, replay
from megatron_fsdp.train.run_job import SUMMARY_FILE
from tests.conftest import RunRanks
from tests.support import on_ranks
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


# ---- `mfsdp replay`: recorded steps of several ranks are the same bits on one, and what is not is named --------------

RECORDS = (
    "--clip-grad",
    "0.5",
    "--save-interval",
    "3",
    "--log-digests-interval",
    "2",
    "--log-params-norm",
    "--log-num-zeros-in-grad",
)


def arguments(folder: Path, *options: str) -> tuple[str, ...]:
    places = ("--data-path", str(folder / "text"), "--out", str(folder / "out"), "--save", str(folder / "saves"))
    write_text(folder / "text")
    return (*WORLD, *places, *RECORDS, *options)


def train_with_fault(method: str, at_step: int, *options: str) -> None:
    """Train, and let rank 1 flip a bit of the first block after `Trained.accumulate` or `Trained.update` of a step."""
    whole, steps = getattr(Trained, method), iter(range(1, 100))

    def faulty(trained: Trained, *args: Any) -> Any:
        result = whole(trained, *args)
        if next(steps) == at_step and dist.get_rank() == 1:
            named = trained.model.named_parameters()
            tensor = next(p for name, p in named if ".0." in name and p.to_local().numel())
            tensor = tensor.detach() if method == "update" else tensor.grad
            tensor.to_local().view(-1).view(torch.int32)[0] ^= 1
        return result

    with mock.patch.object(Trained, method, faulty):
        train(*options)


REPLAYED = {
    "zero3": (3, (*UNITS, "optim_grads_params")),
    "buckets": (2, ("--use-distributed-optimizer",)),
    "bfloat16": (2, (*UNITS, "optim_grads", "--bf16", "--recompute-granularity", "full")),
}


@pytest.mark.full(short=["zero3"])
@pytest.mark.parametrize("case", REPLAYED)
def test_steps_of_several_ranks_are_the_same_bits_on_one(run_ranks: RunRanks, tmp_path: Path, case: str) -> None:
    ranks, options = REPLAYED[case]
    run_ranks(ranks, train, *arguments(tmp_path, *options))
    found = run_ranks(1, replay, tmp_path / "out", 6)[0]
    assert asdict(found) == {"first": 4, "last": 6, "digests": 2, "difference": None}


@pytest.mark.full(short=["accumulate-gradients"])
@pytest.mark.parametrize(("method", "what"), [("accumulate", "gradients"), ("update", "weights")])
def test_a_bit_that_a_rank_got_wrong_is_named(run_ranks: RunRanks, tmp_path: Path, method: str, what: str) -> None:
    words = arguments(tmp_path, *UNITS, "optim_grads_params", "--log-digests-interval", "1")
    run_ranks(2, train_with_fault, method, 5, *words)
    found = run_ranks(1, replay, tmp_path / "out", 6)[0]
    assert found.last == 5
    assert found.difference is not None
    assert found.difference.startswith(f"step 5: {what} of unit blocks.0: recorded digest ")
    assert "also" not in found.difference


@pytest.mark.full
def test_the_command_tells_what_it_found_and_what_cannot_be_replayed(
    run_ranks: RunRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train, *arguments(tmp_path, *UNITS, "optim_grads_params"))
    out = tmp_path / "out"
    assert main(["replay", str(out), "--step", "5"]) == 0
    shown = capfd.readouterr().out
    assert "executed steps 4 to 5 again on one rank; digests were recorded of 1\nthe same bits\n" in shown
    assert main(["replay", str(out), "--step", "2", "--from-start", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"first": 1, "last": 2, "digests": 1, "difference": None}
    metrics = out / METRICS_FILE
    lines = metrics.read_text().splitlines(keepends=True)
    record = json.loads(lines[4])
    changed = json.dumps({**record, "loss": record["loss"] * (1 + 2**-52)}) + "\n"
    metrics.write_text("".join([*lines[:4], changed, *lines[5:]]))
    assert main(["replay", str(out), "--step", "6"]) == 1
    assert "\nstep 5: loss: recorded " in capfd.readouterr().out
    metrics.write_text("".join(lines))

    refused = partial(on_ranks.refusal, replay, out, error=ConfigurationError)
    assert "metrics.jsonl has no step 9: it has steps 1 to 8" in refused(9)
    assert "saves has no checkpoint before step 3 (its checkpoints are of steps 3, 6, 8)" in refused(3)
    assert "has no checkpoint before step 5 (it holds none)" in refused(5, checkpoints=tmp_path)
    assert "--checkpoints has no effect with --from-start" in refused(5, checkpoints=tmp_path, from_start=True)
    metrics.write_text("".join([*lines[:4], *lines[5:]]))
    assert "has no step 5: its line, between those of steps 1 and 8, is missing or damaged" in refused(5)
    metrics.write_text("".join([*lines[:4], json.dumps({**json.loads(lines[4]), "loss": "much"}) + "\n", *lines[5:]]))
    assert "the record of step 5 is damaged: loss is 'much', no number" in refused(5)
    metrics.write_text("".join(lines))
    write_text(tmp_path / "text").write_text("another text\n" * 500)
    other = "its run had other data or options: --data-path was text with checksum"
    assert f"cannot be replayed from {tmp_path / 'saves' / 'iter_0000003'}: {other}" in refused(5)
    assert f"cannot be replayed from its start: {other}" in refused(2, from_start=True)
    (tmp_path / "text").unlink()
    assert "does not exist" in refused(5)
    assert replay(out, 5, data_path=write_text(tmp_path / "moved")).difference is None
    applied = out / "applied.json"
    plain = json.loads(applied.read_text())
    applied.write_text(json.dumps({**plain, "origins": {**plain["origins"], "warp_speed": "flag"}}))
    assert "names the option 'warp_speed', which version " in refused(5)
    plain["options"]["deterministic"] = None
    applied.write_text(json.dumps(plain))
    assert "was trained without --deterministic world" in refused(5)
    applied.unlink()
    assert "holds no results of a run" in refused(5)


def test_the_first_difference_is_that_of_what_is_computed_first() -> None:
    digests = {"gradients": {"(root)": "01", "a": "02", "b": "03"}, "weights": {"(root)": "04"}}
    record = StepRecord(1, 6, 2.5, 1.0, 1e-3, 0, 77, digests=digests)
    assert first_difference(record, record) is None
    nan = replace(record, loss=float("nan"))
    assert first_difference(nan, nan) is None
    other = replace(record, grad_norm=1.5, digests={**digests, "weights": {"(root)": "05"}})
    told = "grad_norm: recorded 1.0 (0x1.0000000000000p+0), replayed 1.5 (0x1.8000000000000p+0)"
    assert first_difference(record, other) == told
    units = replace(other, digests={**digests, "gradients": {"(root)": "01", "a": "12", "b": "13"}})
    assert first_difference(record, units) == "gradients of unit a: recorded digest 02, replayed 12 (also b)"
    moved = replace(record, digests={"gradients": {"bucket 0": "06"}})
    assert first_difference(record, moved) is None, "digests of other units add up to the same"
    moved = replace(other, loss=2.0, data_checksum=78)
    assert first_difference(record, moved) == "data: recorded checksum 77, replayed 78"
