"""Every dtype of the policy is the one that is used: bit for bit what one process gets by naming each cast and sum."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MixedPrecisionPolicy
from tests.conftest import RunRanks
from tests.support.models import MODEL_CASES, Batch, ModelCase, UnusedBlock
from tests.support.on_ranks import on_ranks
from tests.support.precision_emulation import (
    BF16,
    CASES,
    FP16,
    FP32,
    FP64,
    MIXED,
    Job,
    check,
    emulate,
    loss_in_own_dtype,
)
from tests.support.sharded_run import Run, Scenario, Setting, Tolerance, assert_values, check_strategies

# ---- all pairs of dtypes and strategies ----------------------------------------------------------------------------

_TIMES = ((0, 0, 0, 0), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))
"""Multiplication in the field of four elements; addition is exclusive or."""

MAIN_PARAMS = (None, FP32, BF16, FP64)
MAIN_GRADS = (FP64, None, FP32, BF16)
GRAD_COMM = (BF16, FP32, None, FP16)
COMPUTE = (FP32, BF16, FP16, BF16)


def covering_jobs() -> list[Job]:
    """16 jobs in which every value of each choice meets every value of each other (Bose's orthogonal array, 1938)."""
    jobs = []
    for a in range(4):
        for b in range(4):
            params, grads, comm, compute, strategy = a, b, a ^ b, a ^ _TIMES[2][b], a ^ _TIMES[3][b]
            policy = MixedPrecisionPolicy(MAIN_PARAMS[params], MAIN_GRADS[grads], GRAD_COMM[comm])
            jobs.append(Job(CASES[COMPUTE[compute]], policy, strategy))
    return jobs


@pytest.mark.full(short=["each", "last"])
@pytest.mark.parametrize("mode", ["each", "last", "no_sync"])
def test_every_cast_and_sum_is_in_the_dtype_it_is_promised_in(run_ranks: RunRanks, mode: str) -> None:
    check(run_ranks, 2, [replace(job, mode=mode) for job in covering_jobs()])


@pytest.mark.full
def test_sums_of_four_ranks_are_taken_in_rank_order(run_ranks: RunRanks) -> None:
    check(run_ranks, 4, [replace(job, mode="each", steps=1) for job in covering_jobs() if job.strategy > 0])


@pytest.mark.full(short=[str(MixedPrecisionPolicy(FP64, BF16, FP16))])
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(None, None, FP32),
        MixedPrecisionPolicy(FP32, FP32, BF16),
        MixedPrecisionPolicy(FP64, BF16, FP16),
    ],
    ids=str,
)
def test_each_dtype_inside_a_unit_follows_by_itself(run_ranks: RunRanks, policy: MixedPrecisionPolicy) -> None:
    check(run_ranks, 2, [Job(MIXED, policy, strategy) for strategy in range(4)])


# ---- what accumulation in 16 bits costs ----------------------------------------------------------------------------


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", range(4))
def test_accumulation_is_in_main_grads_dtype_and_in_no_other(run_ranks: RunRanks, strategy: int) -> None:
    """Twelve microbatches: bfloat16 loses what float32 keeps, and both are what one process gets in that dtype."""
    sums = {}
    for grads in (BF16, FP32):
        job = Job(CASES[BF16], MixedPrecisionPolicy(FP32, grads, FP32), strategy, steps=1, microbatches=12)
        check(run_ranks, 2, [job])
        sums[grads] = dict(emulate(job, 2).notes)["gradients"]
    for name, in_fp32 in sums[FP32].items():
        assert torch.equal(sums[BF16][name], sums[BF16][name].bfloat16().float())
        largest = in_fp32.abs().max()
        lost = (sums[BF16][name] - in_fp32).abs().max() / largest
        assert 2**-10 < lost < 12 * 2**-8, name  # each of 12 sums is rounded by up to 2**-9 of its value


# ---- what travels ----------------------------------------------------------------------------------------------------


def large_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Gradients of tens of thousands: their sum over four ranks leaves the range of float16, their mean does not."""
    return 2e5 * loss_in_own_dtype(model, batch)


@pytest.mark.full(short=["no_sync-4-False", "each-4-True", "each-2-True"])
@pytest.mark.parametrize("in_collective", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])  # an all-reduce over four adds in an order of its own
@pytest.mark.parametrize("mode", ["each", "last", "no_sync"])
def test_float16_sums_of_large_gradients_stay_in_range(
    run_ranks: RunRanks, mode: str, num_ranks: int, in_collective: bool
) -> None:
    case = replace(CASES[FP32], loss=large_loss)
    policy = MixedPrecisionPolicy(FP32, FP32, FP16)
    options = (("average_in_collective", in_collective),)
    jobs = [Job(case, policy, strategy, mode, 1, 2, options) for strategy in range(num_ranks == 4, 4)]
    check(run_ranks, num_ranks, jobs)
    for job in jobs:
        gradients = dict(emulate(job, num_ranks).notes)["gradients"].values()
        assert max(gradient.abs().max().item() for gradient in gradients) > 65504 / 4
        assert all(gradient.isfinite().all() for gradient in gradients)


def accumulate_and_step(run: Run) -> None:
    for step in range(3):
        for microbatch in range(2):
            (run.loss(2 * step + microbatch) / 2).backward()
        run.step()


def test_gradients_may_travel_in_float64(run_ranks: RunRanks) -> None:
    policy = MixedPrecisionPolicy(grad_comm_dtype=FP64)
    settings = [Setting(strategy, policy) for strategy in range(4)]
    check_strategies(run_ranks, 2, Scenario(accumulate_and_step, MODEL_CASES["odd_shapes"]), settings)


class TwiceRecomputed(nn.Module):
    """A unit that is recomputed twice per backward, and of which one layer is never used: its bucket stays open."""

    def __init__(self) -> None:
        super().__init__()
        self.block = UnusedBlock(7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


def with_grad_inputs(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error; reentrant recomputation needs inputs that take a gradient."""
    return nn.functional.mse_loss(model(batch.inputs.clone().requires_grad_()), batch.targets)


def test_a_second_gradient_for_the_same_bucket_is_scaled_like_the_first(run_ranks: RunRanks) -> None:
    """11 significant bits: each summand and each sum errs by 2**-12 of its value."""
    policy, band = MixedPrecisionPolicy(grad_comm_dtype=FP16), Tolerance(of_largest=2**-9, atol=1e-6)
    case = ModelCase(TwiceRecomputed, MODEL_CASES["unused"].make_batch, with_grad_inputs, (UnusedBlock,))
    settings = [Setting(strategy, policy) for strategy in range(4)]
    check_strategies(run_ranks, 2, Scenario(accumulate_and_step, case), settings, band)


# ---- what is done to copies ------------------------------------------------------------------------------------------


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("main_grads", [None, FP32])
@pytest.mark.parametrize("strategy", range(4))
@on_ranks(2)
def test_changed_copies_of_main_gradients_count(strategy: int, main_grads: torch.dtype | None) -> None:
    """`.grad` is a float32 copy of bfloat16 main gradients: what is done to the copy must count."""
    policy = MixedPrecisionPolicy(main_grads_dtype=main_grads)
    run = Run(Scenario(accumulate_and_step, CASES[BF16]), Setting(strategy, policy), 2)

    def gradients() -> dict[str, Tensor | None]:
        run.loss(1).backward()
        return {name: None if grad is None else grad.clone() for name, grad in run.sharded.full_gradients().items()}

    run.loss(0).backward()
    for param in run.parameters().values():
        param.grad.mul_(0.0)
    scaled = gradients()
    run.optimizer.zero_grad()
    alone = gradients()
    run.optimizer.zero_grad(set_to_none=False)
    assert_values(scaled, alone, Tolerance())
    assert_values(gradients(), alone, Tolerance())
