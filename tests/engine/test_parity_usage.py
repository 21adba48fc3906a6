"""Units used again, in turn, from inside each other, and with all kinds of outputs, equal one process."""

import copy
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ScheduleError
from tests.conftest import RunRanks
from tests.support.case import (
    EVERY_WAY,
    FP32,
    IN_TURN,
    REPLICATED,
    STRATEGIES,
    Run,
    Scenario,
    Setting,
    assert_parity,
    check_strategies,
    decayed_adamw,
    each_half,
    reference,
    run_sharded,
    three_steps,
    train_and_accumulate,
)
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.zoo import (
    Branches,
    HidesResults,
    InObject,
    InPlace,
    InSlot,
    ModelCase,
    Nested,
    Ordered,
    Penalised,
    Recomputed,
    Unpacking,
    Where,
    vector_case,
)

SHARDED = (Setting(3), Setting(2))
BUCKETS = (REPLICATED, IN_TURN)
ORDERED = vector_case(Ordered)


# ---- who is used, and when -----------------------------------------------------------------------------------------


def change_order(run: Run) -> None:
    for step, order in enumerate([(0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0, 1, 3), (0, 1, 2, 3), (3, 2, 1, 0)]):
        run.module.order = order  # type: ignore[assignment]
        run.train(step)


def skip_from_the_start(run: Run) -> None:
    """Layer 3 is first used in the third step: until then it has no gradient."""
    for step, order in enumerate([(0, 1, 2), (2, 0), (0, 1, 2, 3), (0, 1, 2, 3)]):
        run.module.order = order  # type: ignore[assignment]
        run.loss(step).backward()
        if step in (0, 2, 3):
            run.note_gradients()
        run.optimizer.step()
        run.note_parameters()
        run.optimizer.zero_grad()


# ---- forwards and backwards that do not alternate ------------------------------------------------------------------


def sum_two_forwards(run: Run) -> None:
    for step in range(2):
        (run.loss(2 * step) + run.loss(2 * step + 1)).backward()
        run.step()


def two_forwards_two_backwards_reversed(run: Run) -> None:
    for step in range(2):
        losses = [run.loss(2 * step), run.loss(2 * step + 1)]
        for loss in reversed(losses):
            loss.backward()
        run.step()


def deferred_second_backward(run: Run) -> None:
    losses = [run.loss(0), run.loss(1)]
    with run.no_sync():
        losses[0].backward()
    losses[1].backward()
    run.step()


def forward_only_then_train(run: Run) -> None:
    run.loss(5)
    run.train(0)
    dropped = run.loss(6)
    del dropped
    run.loss(7)
    run.train(1)


def backward_twice(run: Run) -> None:
    for step in range(2):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        run.note_gradients("once")
        loss.backward()
        run.step()


def gradient_of_the_input(run: Run) -> None:
    """The input asks for a gradient too; its graph goes on below the model."""
    for step in range(2):
        batch = run.batch(step)
        below = torch.ones(6, requires_grad=True)
        loss = torch.nn.functional.mse_loss(run.model(batch.inputs * below), batch.targets)
        loss.backward()
        assert below.grad is not None
        run.note_loss(below.grad.sum())
        run.step()


TWICE, NESTED = vector_case(partial(Ordered, (0, 1, 0, 2, 1, 1, 3, 0))), vector_case(Nested)
CASES: tuple[tuple[Callable[[Run], None], ModelCase], ...] = (
    (three_steps, TWICE),
    (three_steps, NESTED),
    (three_steps, vector_case(Unpacking)),
    (three_steps, vector_case(InPlace)),
    (three_steps, vector_case(Penalised)),
    (change_order, ORDERED),
    (skip_from_the_start, ORDERED),
    (sum_two_forwards, TWICE),
    (two_forwards_two_backwards_reversed, TWICE),
    (deferred_second_backward, TWICE),
    (forward_only_then_train, NESTED),
    (backward_twice, TWICE),
    (gradient_of_the_input, ORDERED),
    (gradient_of_the_input, vector_case(partial(HidesResults, True, InObject))),
    (three_steps, vector_case(partial(HidesResults, unit=InObject))),
    (three_steps, vector_case(partial(HidesResults, unit=InSlot))),
)


@pytest.mark.parametrize(("script", "case"), CASES)
def test_units_used_in_any_way_equal_one_process(
    run_ranks: RunRanks, script: Callable[[Run], None], case: ModelCase
) -> None:
    number = CASES.index((script, case))
    settings = (SHARDED[number % 2], BUCKETS[number // 2 % 2]) if number else (*SHARDED, *BUCKETS)
    check_strategies(run_ranks, 2, Scenario(script, case), settings)


# ---- outputs that hide something -------------------------------------------------------------------------------------


def train_or_refuse(run: Run) -> None:
    """On several ranks a refusal is as good as the right values."""
    try:
        run.loss(0).backward()
    except RuntimeError as error:  # ScheduleError, or autograd's own finding that saved weights were overwritten
        if re.search("in which no tensor can be found|has been modified by an inplace operation", str(error)) is None:
            raise
        run.recording.losses[:] = [-1.0]
        return
    run.step()


@pytest.mark.parametrize("build", [HidesResults, partial(HidesResults, frozen=True), Penalised])
def test_results_that_cannot_be_seen_give_an_error_or_the_right_gradient(
    run_ranks: RunRanks, build: Callable[[], torch.nn.Module]
) -> None:
    scenario = Scenario(train_or_refuse, vector_case(build))
    for outcomes in zip(*run_ranks(2, run_sharded, [(scenario, setting) for setting in SHARDED]), strict=True):
        refused = [outcome.losses == [-1.0] for outcome in outcomes]
        assert len(set(refused)) == 1
        if not refused[0]:
            assert_parity(outcomes, reference(scenario, 2), FP32)


def expect_refusal(run: Run) -> None:
    with pytest.raises(ScheduleError, match=r"unit layers\.0 returned .* return tuples, lists, dicts, dataclasses"):
        run.loss(0)


@pytest.mark.unmerged
def test_opaque_outputs_are_refused_where_weights_were_released(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(2, run_sharded, [(Scenario(expect_refusal, vector_case(HidesResults)), Setting(3))])
    assert len(outcomes) == 2


class Doubled(torch.autograd.Function):
    """A function of one's own, of which autograd makes a node even where nothing takes a gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class WithoutGraph(torch.nn.Module):
    """A layer that returns its result inside of something, computed without a graph where `wraps` asks for it."""

    def __init__(self, wraps: Callable[[Tensor], Any], *, frozen: bool) -> None:
        super().__init__()
        self.layer, self.wraps, self.frozen = torch.nn.Linear(4, 4), wraps, frozen

    def forward(self, x: Tensor) -> Any:
        with torch.set_grad_enabled(self.frozen):
            return self.wraps(Doubled.apply(self.layer(x)) if self.frozen else self.layer(x))  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_forwards_without_a_graph_return_whatever_they_like() -> None:
    x = torch.arange(8.0).view(2, 4)
    for frozen in (True, False):
        for wraps in (lambda y: SimpleNamespace(y=y), lambda y: (y, SimpleNamespace(y=y), 3, "x"), lambda _: None):
            with fixed_seed(0):
                model = torch.nn.ModuleList([WithoutGraph(wraps, frozen=frozen) for _ in range(3)])
            model.requires_grad_(not frozen)
            reference = copy.deepcopy(model)
            for units in ([WithoutGraph], []):
                sharded = fully_shard_model(copy.deepcopy(model), fsdp_unit_modules=units)
                for layer, expected in zip(sharded.module, reference, strict=True):
                    found, wanted = layer(x), expected(x)
                    found, wanted = (each[1] if isinstance(each, tuple) else each for each in (found, wanted))
                    assert found is None or torch.equal(found.y, wanted.y)


# ---- ranks that do different things --------------------------------------------------------------------------------


def branch_by_rank(run: Run) -> None:
    """Rank 0 uses one layer, the others another, the last rank neither in its last unit."""
    for step in range(3):
        for rank in run.ranks_here:
            for position, layer in enumerate(run.module.layers):  # type: ignore[arg-type]
                idle = rank == run.num_ranks - 1 and position == 2
                layer.branch = None if idle else ("even" if rank == 0 else "odd")
            run.backward_of(rank, step)
        run.step()


def test_parameter_used_on_one_rank_only_has_the_mean(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 3, Scenario(branch_by_rank, vector_case(Branches)), EVERY_WAY[1::2])


def branch_nowhere_at_first(run: Run) -> None:
    """No rank uses a branch in the first step, one rank does in the second."""
    for step in range(2):
        for rank in run.ranks_here:
            for layer in run.module.layers:  # type: ignore[union-attr]
                layer.branch = "even" if step and rank == 0 else None
            run.backward_of(rank, step)
        run.step()


def test_parameter_that_comes_into_use_on_one_rank(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 2, Scenario(branch_nowhere_at_first, vector_case(Branches)), EVERY_WAY[::2])


def leave_out_what_was_used(run: Run) -> None:
    """One backward uses everything, the next one does not."""
    for step, branches in enumerate([("even", "odd"), ("odd",), ("even", "odd")]):
        losses = []
        for branch in branches:
            for layer in run.module.layers:  # type: ignore[union-attr]
                layer.branch = branch
            losses.append(run.loss(step))
        torch.stack(losses).sum().backward()
        run.step()


def test_parameter_that_falls_out_of_use_has_no_gradient_where_every_step_looks(run_ranks: RunRanks) -> None:
    scenario = Scenario(leave_out_what_was_used, vector_case(Branches), decayed_adamw)
    check_strategies(run_ranks, 2, scenario, [Setting(3, options=(("find_unused_parameters", True),))])


PLACES: tuple[Where, ...] = ("units", "inside", "pairs", "all")


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_recomputed_activations_give_the_same_gradients(run_ranks: RunRanks, where: Where, reentrant: bool) -> None:
    scenario = Scenario(train_and_accumulate, vector_case(partial(Recomputed, where, reentrant)))
    check_strategies(run_ranks, 2, scenario, [SHARDED[reentrant], BUCKETS[reentrant]])


@each_half(STRATEGIES)
def test_gradients_of_two_recomputations_in_one_backward_add_up(
    run_ranks: RunRanks, settings: tuple[Setting, ...]
) -> None:
    """Of one unit, which is called twice."""
    case = vector_case(partial(Recomputed, "units", True, (0, 0), layers=1))
    check_strategies(run_ranks, 2, Scenario(three_steps, case), settings)
