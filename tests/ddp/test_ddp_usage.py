"""Buckets under everything a loop may do: each script of the fully sharded engine's tests, and some of their own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import RunRanks
from tests.engine import test_parity_accumulation as accumulation
from tests.engine import test_parity_recomputation as recomputation
from tests.engine import test_parity_recovery as recovery
from tests.engine import test_parity_usage as usage
from tests.engine import test_recovery_everywhere as everywhere
from tests.support.case import (
    DdpSetting,
    Run,
    Scenario,
    check_jobs,
    clip_by_model,
    clip_by_torch,
    ddp,
    defer_two_of_three,
    each_half,
    three_steps,
)
from tests.support.zoo import (
    ATTENTION,
    ENCODER,
    FEATURES,
    MODEL_CASES,
    READING,
    Between,
    Branches,
    FailingModel,
    InPlace,
    Layer,
    ModelCase,
    Nested,
    Ordered,
    Penalised,
    Recomputed,
    Unpacking,
    Where,
    vector_case,
)

REPLICATED = ddp(overlap_grad_reduce=True, bucket_size=40)
LATE = ddp(use_distributed_optimizer=True)
_OVERLAPPED = dict.fromkeys(["use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"], True)
IN_TURN = ddp(**_OVERLAPPED, bucket_size=40)
TOGETHER = ddp(**_OVERLAPPED, align_param_gather=True, bucket_size=90)
ALL = (REPLICATED, LATE, IN_TURN, TOGETHER)

Script = Callable[[Run], None]

ORDERED = vector_case(Ordered)
UNUSED = MODEL_CASES["unused"]
FAILING = vector_case(FailingModel)


def each_shift(test: Callable[..., None]) -> Callable[..., None]:
    """A test that puts each of its scripts in one of the settings, in turn; the full suite in one more."""
    return pytest.mark.full(short=["0"])(pytest.mark.parametrize("shift", [0, 2])(test))


def _check(run_ranks: RunRanks, pairs: list[tuple[Script, ModelCase]], shift: int, num_ranks: int = 2) -> None:
    jobs = [
        (Scenario(script, case), ALL[(position + shift) % len(ALL)]) for position, (script, case) in enumerate(pairs)
    ]
    check_jobs(run_ranks, num_ranks, jobs)


Settings = tuple[DdpSetting, ...]


def _check_in(settings: Settings, run_ranks: RunRanks, script: Script, case: ModelCase, num_ranks: int = 2) -> None:
    check_jobs(run_ranks, num_ranks, [(Scenario(script, case), setting) for setting in settings])


@each_shift
def test_deferring_clearing_and_scaling(run_ranks: RunRanks, shift: int) -> None:
    clears = [accumulation.zero_optimizer, accumulation.zero_model]
    scripts = (
        defer_two_of_three,
        accumulation.defer_on_top_of_visible_gradients,
        accumulation.defer_forwards_only_half_way,
        accumulation.say_which_is_last,
        *(partial(accumulation.clear_and_go_on, clear=clear) for clear in (*clears, accumulation.none_by_hand)),
        *(partial(accumulation.clear_deferred, clear=clear) for clear in clears),
        accumulation.clear_before_any_sync,
        accumulation.scale_between_microbatches,
        accumulation.replace_between_microbatches,
        accumulation.scale_all,
    )
    _check(run_ranks, [(script, UNUSED) for script in scripts], shift)


@each_shift
def test_orders_of_forwards_and_backwards(run_ranks: RunRanks, shift: int) -> None:
    twice_used = vector_case(usage.build_twice_used)
    scripts = (
        usage.sum_two_forwards,
        usage.two_forwards_two_backwards_reversed,
        usage.deferred_second_backward,
        usage.forward_only_then_train,
        usage.backward_twice,
        usage.gradient_of_the_input,
    )
    pairs = [(script, case) for script in scripts for case in (ORDERED, twice_used)]
    pairs += [(usage.change_order, ORDERED), (usage.skip_from_the_start, ORDERED)]
    pairs += [(three_steps, vector_case(build)) for build in (Nested, Unpacking, InPlace, Penalised)]
    _check(run_ranks, pairs, shift)


@pytest.mark.full(short=["2-even"])
@pytest.mark.parametrize("settings", [ALL[::2], ALL[1::2]], ids=["even", "odd"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_use_different_parameters(run_ranks: RunRanks, num_ranks: int, settings: Settings) -> None:
    """Gathers and reductions stay in one order; a rank that skips a bucket takes part in it all the same."""
    for script in (usage.branch_by_rank, usage.branch_nowhere_at_first):
        _check_in(settings, run_ranks, script, vector_case(Branches), num_ranks)


def layers_by_rank(run: Run) -> None:
    """Ranks call different layers in different orders and numbers, also none; otherwise in every step."""
    orders = [[(0, 1, 2, 3), (3, 3), ()], [(2,), (0, 1, 1, 0), (1, 3)], [(0,), (), (2, 1, 0, 3)]]
    for step, of_ranks in enumerate([*orders, orders[1]]):
        for rank in run.ranks_here:
            run.module.order = of_ranks[(rank + step) % 3]  # type: ignore[assignment]
            run.backward_of(rank, step)
        run.step()


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_call_different_layers(run_ranks: RunRanks, num_ranks: int) -> None:
    asking = [replace(setting, options=(("find_unused_parameters", True),)) for setting in ALL]
    check_jobs(run_ranks, num_ranks, [(Scenario(layers_by_rank, ORDERED), setting) for setting in asking])


@each_shift
def test_evaluation_and_weights_changed_by_hand(run_ranks: RunRanks, shift: int) -> None:
    scripts = (
        recovery.evaluate_between_microbatches,
        recovery.evaluate_between_forward_and_backward,
        recovery.infer_first,
        recovery.scale_weights_by_hand,
        recovery.scale_local_weights_by_hand,
        recovery.scale_one_weight_after_evaluation,
        recovery.load_state_between_steps,
    )
    _check(run_ranks, [(script, ORDERED) for script in scripts], shift)


class Fused(Between):
    """In evaluation it reads the weights of its layers, which it calls in training."""

    def __init__(self) -> None:
        super().__init__(layers=nn.ModuleList([Layer()]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        inner: Any = self.layers[0]
        fused = self.last.weight @ inner.down.weight @ inner.up.weight
        return F.linear(F.linear(x, self.first.weight, self.first.bias), fused)


FUSED = vector_case(Fused)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [ATTENTION, ENCODER, READING, FUSED], ids=["attention", "encoder", "reading", "fused in evaluation"]
)
def test_evaluation_of_models_that_read_weights_of_modules_they_do_not_call(
    run_ranks: RunRanks, case: ModelCase
) -> None:
    """torch's encoder layer calls its parts in training and reads their weights by itself in evaluation."""
    jobs = [
        (Scenario(script, case), setting)
        for script in (train_then_evaluate, recovery.infer_first)
        for setting in (IN_TURN, TOGETHER)
    ]
    check_jobs(run_ranks, 2, jobs)


def train_then_evaluate(run: Run) -> None:
    for step in range(2):
        run.train(step)
        run.model.eval()
        with torch.no_grad():
            run.loss(50 + step)
        run.model.train()


@each_half(ALL)
def test_generation_between_steps(run_ranks: RunRanks, settings: Settings) -> None:
    _check_in(settings, run_ranks, generate_between_steps, MODEL_CASES["tied"])


def generate_between_steps(run: Run) -> None:
    """Many forwards without a backward; in the middle of accumulation too."""
    for step in range(2):
        with run.no_sync():
            run.loss(step).backward()
        tokens = run.whole_batch(step).inputs[:2]
        for _ in range(4):
            with torch.no_grad():
                following = run.model(tokens)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens[:, 1:], following], dim=1)
        run.note("tokens", {"tokens": tokens})
        run.train(10 + step)


# ---- parts -----------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two outputs, of which a loop may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()
        self.left = nn.Linear(FEATURES, FEATURES)
        self.right = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.left(x), self.right(x)


def backward_of_one_output(run: Run) -> None:
    for step, used in enumerate([(0, 1), (0,), (1,), (0, 1)]):
        batch = run.batch(step)
        outputs = run.model(batch.inputs)
        for position in used:
            loss = F.mse_loss(outputs[position], batch.targets)
            run.note_loss(loss)
            loss.backward(retain_graph=True)
        run.note_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.note_parameters()


def call_parts(run: Run) -> None:
    """Parts of the model are called on their own, with and without gradients, right after a step."""
    for step in range(3):
        batch = run.batch(step)
        with torch.no_grad():
            run.note("head", {"head": run.module.right(run.whole_batch(step).inputs)})  # type: ignore[operator]
        hidden = run.module.body(batch.inputs)  # type: ignore[operator]
        loss = F.mse_loss(run.module.left(hidden), batch.targets)  # type: ignore[operator]
        run.note_loss(loss)
        loss.backward()
        other = F.mse_loss(run.model(batch.inputs)[1], batch.targets)
        other.backward()
        run.step()


@each_half(ALL)
def test_parts_of_outputs_and_parts_of_models(run_ranks: RunRanks, settings: Settings) -> None:
    _check_in(settings, run_ranks, call_parts, vector_case(TwoHeads))
    _check_in(settings, run_ranks, backward_of_one_output, vector_case(TwoHeads))


# ---- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_everywhere(run_ranks: RunRanks, reentrant: bool, shift: int) -> None:
    places: tuple[Where, ...] = ("units", "inside", "pairs", "all")
    scripts = [recomputation.train_and_accumulate, *([] if reentrant else [recomputation.two_recomputed_forwards])]
    cases = [vector_case(partial(Recomputed, where, reentrant)) for where in places]
    _check(run_ranks, [(script, case) for case in cases for script in scripts], shift)


class Repeated(Between):
    """A layer called, and recomputed, as often as the data say."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(layers=nn.ModuleList([Layer()]))
        self.reentrant = reentrant
        self.times = 1

    def middle(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.layers[0], x, use_reentrant=self.reentrant)
        return x


def repeat(times: tuple[tuple[int, ...], ...], run: Run) -> None:
    """`times[step][rank]` recomputed calls."""
    for step, of_ranks in enumerate(times):
        for rank in run.ranks_here:
            run.module.times = of_ranks[rank]  # type: ignore[assignment]
            run.backward_of(rank, step)
        run.step()


FEWER = ((3, 3), (2, 1), (1, 3), (3, 2))
MORE = ((1, 1), (2, 1), (1, 3), (0, 2), (4, 4))


@each_half(ALL)
def test_recomputed_calls_of_a_number_that_depends_on_data(run_ranks: RunRanks, settings: Settings) -> None:
    for reentrant, times in ((False, MORE), (True, FEWER)):
        script = partial(repeat, times)
        _check_in(settings, run_ranks, script, vector_case(partial(Repeated, reentrant)))


# ---- exceptions ------------------------------------------------------------------------------------------------------


@each_shift
def test_training_goes_on_after_exceptions(run_ranks: RunRanks, shift: int) -> None:
    scripts = (
        recovery.fail_in_forward_between_microbatches,
        recovery.fail_in_backward_between_microbatches,
        recovery.fail_in_a_deferred_backward,
        everywhere.fail_at_once,
        everywhere.fail_in_the_middle,
    )
    _check(run_ranks, [(script, FAILING) for script in scripts], shift)


@each_shift
def test_clipping(run_ranks: RunRanks, shift: int) -> None:
    _check(run_ranks, [(script, MODEL_CASES["odd_shapes"]) for script in (clip_by_model, clip_by_torch)], shift, 3)
