"""Each planted fault is found, named, and put on the right tensor."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.doctor import Difference, check_parity, parity
from tests.doctor import faults, models
from tests.doctor.faults import UP
from tests.support.on_ranks import on_ranks, same_on_ranks

LAST = "head.weight"
"""Its gradient is the first one that backward makes."""


def first(**options: Any) -> Difference:
    """The first difference that every rank is told."""
    report = models.check({**models.BARE, **options})
    same_on_ranks(report.to_dict())
    assert not report.passed
    found: Difference = report.differences[0]
    assert found.summary() in report.summary()
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
@on_ranks()
def test_a_planted_fault_is_found_named_and_placed(
    shard_fn: Any, where: tuple[str, int, str], kind: str, words: str, options: dict[str, Any]
) -> None:
    found = first(shard_fn=shard_fn, **options)
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
@on_ranks(2)
def test_weights_that_each_rank_draws_are_found(shard: Any, right: int, words: str) -> None:
    found = first(shard_fn=partial(faults.seeded_by_rank, shard=shard, right=right))
    assert (found.where, found.kind) == ("initial weight", "differs")
    assert found.words.startswith(words)


@on_ranks(2)
def test_one_fault_of_all_strategies_is_told_once() -> None:
    report = models.check({"model_fn": louder_rank, **models.SQUARES, **models.BARE})
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


BUFFERS: dict[str, Any] = {"model_fn": models.Counting, **models.SQUARES, "checkpoint": False, "steps": 2}


@on_ranks(2)
def test_buffers_that_every_rank_has_alike_pass() -> None:
    report = models.check({**BUFFERS, "strategies": (3,), "microbatches": 2})
    assert report.passed, report.summary()


@pytest.mark.full(short=["running_mean"])
@pytest.mark.parametrize("buffer", ["running_mean", "calls"])
@on_ranks(2)
def test_a_buffer_of_one_rank_is_named_whatever_it_is_called(buffer: str) -> None:
    report = models.check({**BUFFERS, "shard_fn": partial(faults.buffer_of_rank_one, buffer=buffer)})
    (found,) = report.differences
    assert (found.where, found.step, found.name, found.also) == ("buffer", 2, buffer, ())
    assert "is not the same on all ranks: on rank 1 it " in found.words
    assert (found.error, found.ratio) == (10.0, 6.0)


@pytest.mark.parametrize(("buffer", "passes"), [("1.running_mean", True), ("1.num_batches_tracked", False)])
@on_ranks(2)
def test_only_statistics_of_batch_norms_are_excused(buffer: str, passes: bool) -> None:
    shard_fn = partial(faults.buffer_of_rank_one, buffer=buffer)
    options = {"model_fn": models.build_batch_norm, "shard_fn": shard_fn, "microbatches": 2}
    report = models.check(BUFFERS | options)
    assert "running_mean and running_var differ between ranks and are not compared" in report.notes[0]
    assert [found.name for found in report.differences] == ([] if passes else [buffer])
