"""Each planted fault is found, named, and put on the right tensor."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.doctor import Difference, ParityReport, check_parity, parity
from tests.conftest import RunRanks
from tests.doctor import faults, models
from tests.doctor.faults import UP
from tests.support.on_ranks import on_ranks

LAST = "head.weight"
"""Its gradient is the first one that backward makes."""


def check(shard_fn: Any, options: dict[str, Any]) -> ParityReport:
    options = {"model_fn": models.build, "batch": models.tokens, "steps": 1, **options}
    model_fn, batch = options.pop("model_fn"), options.pop("batch")
    return check_parity(model_fn, batch, shard_fn=shard_fn, checkpoint=False, **options)


def first(run_ranks: RunRanks, num_ranks: int, shard_fn: Any, **options: Any) -> Difference:
    """The first difference that every rank is told."""
    reports = run_ranks(num_ranks, check, shard_fn, options)
    assert all(report.to_dict() == reports[0].to_dict() for report in reports)
    assert not reports[0].passed
    found: Difference = reports[0].differences[0]
    assert found.summary() in reports[0].summary()
    return found


def place(found: Difference) -> tuple[str, int, str, str]:
    return found.where, found.step, found.name, found.kind


HEAD = "gradient", 1, LAST
FEATURE = "gradient", 1, UP
FROZEN = {"model_fn": models.build_frozen}
BY_HAND = partial(faults.by_hand, name=UP)
NEGATED = partial(BY_HAND, change=faults.negate)
NORM = "gradient norm", 1, ""
# shard_fn, ranks, place, kind, part of the words, options
FAULTS: list[tuple[Any, int, tuple[str, int, str], str, str, dict[str, Any]]] = [
    (faults.summed, 3, HEAD, "differs", "has 3 times the norm of one process, cosine 1", {}),
    (NEGATED, 2, FEATURE, "differs", "has 1 times the norm of one process, cosine -1", {}),
    (partial(BY_HAND, change=faults.spoil), 2, FEATURE, "non-finite", "is NaN in 72 of 72 elements", {}),
    (faults.never_reduced, 3, HEAD, "not reduced", "on rank 0 it is not reduced over ranks: it equals the gra", {}),
    (faults.each_shard_its_own, 2, HEAD, "not reduced", "each shard equals the gradient of one rank's samples", {}),
    (faults.one_rank_left_out, 3, HEAD, "not reduced", "lacks the gradient of rank 2's samples: it is not in the", {}),
    (faults.dropped, 2, FEATURE, "missing", "is missing (None), where one process has one", {}),
    (faults.stale_forward, 2, ("loss", 2, ""), "stale", "is what the weights before update 1 give", {"steps": 2}),
    (faults.not_in_the_optimizer, 2, ("weight", 1, UP), "differs", "has an update with 0 times the norm of one", {}),
    (faults.frozen_is_trained, 2, ("gradient", 1, "embed.weight"), "unexpected", "is there, where one process", FROZEN),
    (faults.norm_of_rank_one, 2, NORM, "differs", "not the same on all ranks: on rank 1 it is ", {}),
]


NAMES = [getattr(fn, "__name__", None) or fn.keywords["change"].__name__ for fn, *_ in FAULTS]
SHORT = ["summed", "one_rank_left_out", "stale_forward", "frozen_is_trained", "norm_of_rank_one"]


@pytest.mark.full(short=SHORT)
@pytest.mark.parametrize(("shard_fn", "num_ranks", "where", "kind", "words", "options"), FAULTS, ids=NAMES)
def test_a_planted_fault_is_found_named_and_placed(
    run_ranks: RunRanks,
    shard_fn: Any,
    num_ranks: int,
    where: tuple[str, int, str],
    kind: str,
    words: str,
    options: dict[str, Any],
) -> None:
    found = first(run_ranks, num_ranks, shard_fn, **options)
    assert place(found) == (*where, kind)
    assert words in found.words


@pytest.mark.full(short=["ours"])
@pytest.mark.parametrize(
    ("shard", "right", "words"),
    [
        (faults.by_hand, 0, "is not the same on all ranks: on rank 1 it has "),
        (faults.by_torch_fsdp, 0, "has "),
        (faults.sharded, 1, "has "),
    ],
    ids=["by hand", "torch", "ours"],
)
def test_weights_that_each_rank_draws_are_found(run_ranks: RunRanks, shard: Any, right: int, words: str) -> None:
    found = first(run_ranks, 2, partial(faults.seeded_by_rank, shard=shard, right=right), steps=1)
    assert (found.where, found.kind) == ("initial weight", "differs")
    assert found.words.startswith(words)


def test_one_fault_of_all_strategies_is_told_once(run_ranks: RunRanks) -> None:
    options = {"model_fn": louder_rank, "batch": models.vectors, "loss_fn": models.square_loss, "steps": 1}
    report = run_ranks(2, check, None, options)[0]
    (line,) = [line for line in report.diagnosis() if not line.startswith("note")]
    assert line.startswith("strategy 0 (no_shard), strategy 1 (optim), strategy 2 (optim_grads), strategy 3 (")


def louder_rank() -> nn.Module:
    """Doubles what rank 1 is given."""
    return faults.Around(models.build_linear(), lambda module, x: module(x * (1 + (dist.get_rank() == 1))))


class ForgetfulCheckpointer(Checkpointer):
    """Loads one momentum at half its size."""

    def load(self, model: Any, optimizer: Any = None, **options: Any) -> Any:
        report = super().load(model, optimizer, **options)
        for param, state in optimizer.state.items():
            if param.shape == (12, 6) and param is optimizer.param_groups[0]["params"][-1]:
                state["exp_avg"].mul_(0.5)
        return report


@on_ranks(2)
def test_a_checkpoint_that_loads_something_else_is_named() -> None:
    with patch.object(parity, "Checkpointer", ForgetfulCheckpointer):
        report = check_parity(models.build, models.tokens, strategies=(3,), steps=2)
    loaded, resumed = report.differences
    assert place(loaded) == ("checkpoint", 0, f"{LAST}: exp_avg", "differs")
    assert (loaded.ratio, loaded.also) == (pytest.approx(0.5), ())
    assert "after saving and loading" in loaded.words
    assert (resumed.where, resumed.step, resumed.name) == ("step after loading", 3, LAST)
    assert report.runs[0].cells() == ["ok"] * 5 + ["DIFFERS"]


@on_ranks(2)
def test_the_callers_random_state_is_put_back() -> None:
    before = torch.get_rng_state()
    report = check_parity(models.build, models.tokens, strategies=(3,), steps=1, checkpoint=False)
    assert (report.passed, torch.equal(before, torch.get_rng_state())) == (True, True)


# ---- buffers, of which only batch norms' own statistics are excused --------------------------------------------------


def check_buffers(model_fn: Any, options: dict[str, Any]) -> ParityReport:
    options = {"loss_fn": models.square_loss, "checkpoint": False, "steps": 2, **options}
    return check_parity(model_fn, options.pop("batch", models.vectors), **options)


def test_buffers_that_every_rank_has_alike_pass(run_ranks: RunRanks) -> None:
    report = run_ranks(2, check_buffers, models.Counting, {"strategies": (3,), "microbatches": 2})[0]
    assert report.passed, report.summary()


@pytest.mark.full(short=["running_mean-rank 1"])
@pytest.mark.parametrize(("buffer", "wrong"), [("running_mean", "rank 1"), ("calls", "rank 1")])
def test_a_buffer_of_one_rank_is_named_whatever_it_is_called(run_ranks: RunRanks, buffer: str, wrong: str) -> None:
    shard_fn = partial(faults.buffer_of_rank_one, buffer=buffer)
    report = run_ranks(2, check_buffers, models.Counting, {"shard_fn": shard_fn})[0]
    (found,) = report.differences
    assert (found.where, found.step, found.name, found.also) == ("buffer", 2, buffer, ())
    assert f"is not the same on all ranks: on {wrong} it " in found.words
    assert (found.error, found.ratio) == (10.0, 6.0)


@pytest.mark.parametrize(("buffer", "passes"), [("1.running_mean", True), ("1.num_batches_tracked", False)])
def test_only_statistics_of_batch_norms_are_excused(run_ranks: RunRanks, buffer: str, passes: bool) -> None:
    shard_fn = partial(faults.buffer_of_rank_one, buffer=buffer)
    report = run_ranks(2, check_buffers, models.build_batch_norm, {"shard_fn": shard_fn, "microbatches": 2})[0]
    assert "running_mean and running_var differ between ranks and are not compared" in report.notes[0]
    assert [found.name for found in report.differences] == ([] if passes else [buffer])
