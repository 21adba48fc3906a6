"""Every dtype of the policy is the one that is used: bit for bit what one process gets by naming each cast and sum."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy
from megatron_fsdp.config.precision import ResolvedPrecision, resolve_precision
from tests.engine import test_parity as parity
from tests.support.case import (
    SAMPLES,
    Recording,
    Run,
    RunRanks,
    Scenario,
    Setting,
    Tolerance,
    assert_bits,
    assert_values,
    check_strategies,
    one_thread,
    run_sharded,
)
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.zoo import MODEL_CASES, Batch, Branching, ModelCase, OddBlock, Recomputed, vector_case

# ---- what a policy promises, worked out on one process ---------------------------------------------------------------

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def build_odd_shapes(dtype: torch.dtype) -> nn.Module:
    return MODEL_CASES["odd_shapes"].build().to(dtype)


def loss_in_own_dtype(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error, in float32, of a model that computes in the dtype of its first parameter."""
    dtype = next(iter(model.raw_param.values() if isinstance(model, MegatronFSDP) else model.parameters())).dtype
    return nn.functional.mse_loss(model(batch.inputs.to(dtype)).float(), batch.targets)


CASES = {
    dtype: ModelCase(
        partial(build_odd_shapes, dtype), MODEL_CASES["odd_shapes"].make_batch, loss_in_own_dtype, (OddBlock,)
    )
    for dtype in (FP32, BF16, FP16)
}
MIXED = MODEL_CASES["bf16_fp32_norm"]
"""Units whose norm is float32 and whose linear layer is bfloat16."""


def exact_sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD whose factors are powers of two: products are exact, so fused and plain multiply-adds agree."""
    return torch.optim.SGD(params, lr=2**-4, momentum=0.5)


@dataclass(frozen=True)
class Job:
    """One training run."""

    case: ModelCase
    policy: MixedPrecisionPolicy
    strategy: int
    mode: str = "each"
    steps: int = 2
    microbatches: int = 3
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def defers(self) -> bool:
        """Whether gradients wait, whole and not reduced, for the last microbatch."""
        return self.mode == "no_sync" or (self.mode == "last" and self.strategy < 2)

    @property
    def all_reduces(self) -> bool:
        """Whether the sum over ranks is an all-reduce, in the dtype that travels."""
        return self.strategy == 0


def emulate(job: Job, num_ranks: int) -> Recording:
    """Train on this process as ranks are to train; the losses of a microbatch are those of all ranks in turn."""
    with one_thread():
        return _Emulation(job, num_ranks).run()


class _Emulation:
    """One process that does what each rank does, in turn: every cast and sum in the dtype and order that are promised.

    Autograd's gradient is cast to the dtype that travels. The sum in rank order, in float32 or wider (an all-reduce: in
    the dtype that travels), times the factor, is cast into the main gradient and added up there over microbatches. Then
    a copy in the dtype of the main weights, an update of these, and a cast into compute weights. The operations are
    elementwise and the factors powers of two, so the values do not depend on how a tensor is cut.
    """

    def __init__(self, job: Job, num_ranks: int) -> None:
        self.job, self.num_ranks = job, num_ranks
        with fixed_seed(0):
            self.model: nn.Module = job.case.build()
        self.compute = dict(self.model.named_parameters())
        self.precision = {name: resolve_precision(job.policy, param.dtype) for name, param in self.compute.items()}
        self.main = {
            name: nn.Parameter(param.detach().to(self.precision[name].main_params, copy=True))
            for name, param in self.compute.items()
        }
        self.optimizer = exact_sgd(list(self.main.values()))

    def run(self) -> Recording:
        recording = Recording()
        for step in range(self.job.steps):
            losses, gradients = self.accumulate(step * self.job.microbatches)
            recording.losses += losses
            for name, gradient in gradients.items():
                self.main[name].grad = gradient.to(self.precision[name].main_params)
            recording.notes.append(("gradients", {name: _copy(self.main[name].grad) for name in gradients}))
            self.optimizer.step()
            with torch.no_grad():
                for name, param in self.compute.items():
                    param.copy_(self.main[name])
            recording.notes.append(("parameters", {name: _copy(param) for name, param in self.main.items()}))
        return recording

    def accumulate(self, first: int) -> tuple[list[float], dict[str, Tensor]]:
        """Main gradients of one step, in `main_grads_dtype`, and the losses of rank 0, 1, ... of each microbatch."""
        losses: list[float] = []
        waiting: list[dict[str, Tensor]] = [{} for _ in range(self.num_ranks)]
        main: dict[str, Tensor] = {}
        for microbatch in range(self.job.microbatches):
            for rank in range(self.num_ranks):
                loss, gradients = self.backward(first + microbatch, rank)
                losses.append(loss)
                self.wait(waiting[rank], gradients)
            if self.job.defers and microbatch < self.job.microbatches - 1:
                continue
            for name in self.compute:
                total = self.reduce(self.precision[name], [of_rank.pop(name) for of_rank in waiting])
                if name in main:
                    main[name].add_(total)
                else:
                    main[name] = total.to(self.precision[name].main_grads, copy=True)
        return losses, main

    def backward(self, index: int, rank: int) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients, in the dtype that the model computes in, of one rank's part of a batch."""
        self.model.zero_grad()
        part = self.job.case.make_batch(SAMPLES, torch.Generator().manual_seed(index)).part(rank, self.num_ranks)
        loss = self.job.case.loss(self.model, part)
        (loss / self.job.microbatches).backward()
        return loss.item(), {name: p.grad.clone() for name, p in self.compute.items() if p.grad is not None}

    def wait(self, waiting: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Keep a rank's gradients until they are reduced: as they are, or added up in `main_grads_dtype`."""
        for name, gradient in gradients.items():
            if not self.job.defers:
                waiting[name] = gradient
            elif name in waiting:
                waiting[name].add_(gradient)
            else:
                waiting[name] = gradient.to(self.precision[name].main_grads, copy=True)

    def reduce(self, precision: ResolvedPrecision, of_ranks: list[Tensor]) -> Tensor:
        """The mean over ranks; float16 is scaled before it travels, everything else after the sum."""
        comm = precision.grad_comm
        share = 1.0 / self.num_ranks
        before, after = (share, 1.0) if comm == torch.float16 else (1.0, share)
        sent = [gradient.mul(before).to(comm) for gradient in of_ranks]
        total = sent[0] if self.job.all_reduces else sent[0].to(torch.promote_types(comm, torch.float32))
        for gradient in sent[1:]:
            total = total + gradient
        return total.mul(after)


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


# ---- training on ranks -----------------------------------------------------------------------------------------------


def train(jobs: Sequence[Job]) -> list[Recording]:
    """Train each job sharded on this rank, and look whether every dtype is the one that its policy names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is narrower")
        return run_sharded([(_scenario(job), _setting(job)) for job in jobs])


def _scenario(job: Job) -> Scenario:
    return Scenario(partial(_accumulate, job), job.case, lambda model: exact_sgd(model.parameters()))


def _setting(job: Job) -> Setting:
    return Setting(job.strategy, job.policy, one_call=False, auto_sync=job.mode == "each", options=job.options)


def _accumulate(job: Job, run: Run) -> None:
    assert run.sharded is not None
    for step in range(job.steps):
        for microbatch in range(job.microbatches):
            run.sharded.is_last_microbatch = is_last = microbatch == job.microbatches - 1
            with run.no_sync() if job.mode == "no_sync" and not is_last else nullcontext():
                (run.loss(step * job.microbatches + microbatch) / job.microbatches).backward()
        assert _wrong_dtypes(job, run.sharded) == [], job
        run.step()


def _wrong_dtypes(job: Job, model: MegatronFSDP) -> list[str]:
    """Live buffers and gradients that are not in the dtype that the policy names."""
    found = []
    for group in model.parameter_groups():
        wanted = resolve_precision(job.policy, group.full[0].dtype)
        assert group.gradients is not None
        for what, tensor, dtype in (
            ("main gradient", group.gradients.main.local, wanted.main_grads),
            ("main weight", group.weights.main.local, wanted.main_params),
            ("compute weight", group.weights.compute.local, wanted.compute),
            *((".grad", p.grad, wanted.main_params) for p in group.sharded),
        ):
            if tensor is None or tensor.dtype != dtype:
                found.append(f"{what} of {group.names[0]}: {tensor if tensor is None else tensor.dtype}, not {dtype}")
    return found


def check(run_ranks: RunRanks, num_ranks: int, jobs: Sequence[Job]) -> None:
    """Assert that training on ranks gives bit for bit what the emulation gives."""
    assert_emulated(num_ranks, jobs, run_ranks(num_ranks, train, jobs))


def assert_emulated(num_ranks: int, jobs: Sequence[Job], by_rank: Sequence[list[Recording]]) -> None:
    """The comparison of `check`, for what `train` returned on each rank."""
    for job, *outcomes in zip(jobs, *by_rank, strict=True):
        try:
            assert_bits(outcomes, emulate(job, num_ranks))
        except AssertionError as error:
            raise AssertionError(f"{job}: {error}") from None


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


@pytest.mark.full(short=["each"])
@pytest.mark.parametrize("mode", ["each", "last", "no_sync"])
def test_every_cast_and_sum_is_in_the_dtype_it_is_promised_in(run_ranks: RunRanks, mode: str) -> None:
    check(run_ranks, 2, [replace(job, mode=mode) for job in covering_jobs()])


@pytest.mark.full(short=[str(MixedPrecisionPolicy(FP64, BF16, FP16))])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(FP64, BF16, FP16)], ids=str)
def test_each_dtype_inside_a_unit_follows_by_itself(run_ranks: RunRanks, policy: MixedPrecisionPolicy) -> None:
    check(run_ranks, 2, [Job(MIXED, policy, strategy) for strategy in range(4)])


# ---- what travels ----------------------------------------------------------------------------------------------------


def large_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Gradients of tens of thousands: their sum over four ranks leaves the range of float16, their mean does not."""
    return 2e5 * loss_in_own_dtype(model, batch)


@pytest.mark.parametrize(  # an all-reduce over four adds in an order of its own
    ("mode", "num_ranks", "in_collective"), [("no_sync", 4, False), ("each", 4, True), ("last", 2, True)]
)
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


two_microbatches = partial(parity.train, microbatches=2)


def test_a_second_gradient_for_the_same_bucket_is_scaled_like_the_first(run_ranks: RunRanks) -> None:
    """A layer that no branch uses keeps the bucket open. 11 bits: each summand and sum errs by 2**-12 of its value."""
    policy, band = MixedPrecisionPolicy(grad_comm_dtype=FP16), Tolerance(of_largest=2**-9, atol=1e-6)
    case = vector_case(partial(Recomputed, "units", True, (0, 0), layers=1, unit=Branching))
    settings = [Setting(strategy, policy) for strategy in range(4)]
    check_strategies(run_ranks, 2, Scenario(two_microbatches, case), settings, band)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("main_grads", [None, FP32])
@pytest.mark.parametrize("strategy", range(4))
@on_ranks(2)
def test_changed_copies_of_main_gradients_count(strategy: int, main_grads: torch.dtype | None) -> None:
    """`.grad` is a float32 copy of bfloat16 main gradients: what is done to the copy must count."""
    policy = MixedPrecisionPolicy(main_grads_dtype=main_grads)
    run = Run(Scenario(two_microbatches, CASES[BF16]), Setting(strategy, policy), 2)

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
