"""Every dtype of the policy is the one that is used: bit for bit what one process gets by naming each cast and sum."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.mixed_precision import resolve_precision
from tests.conftest import RunRanks
from tests.support.models import MODEL_CASES, Batch, ModelCase, OddBlock, build_odd_shapes
from tests.support.parity import fixed_seed
from tests.support.precision_emulation import History, Job, emulate, exact_sgd
from tests.support.sharded_run import SAMPLES

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# ---- models --------------------------------------------------------------------------------------------------------


def build_bf16() -> nn.Module:
    return build_odd_shapes().bfloat16()


def build_fp16() -> nn.Module:
    return build_odd_shapes().half()


def loss_in_own_dtype(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error, in float32, of a model that computes in the dtype of its first parameter."""
    dtype = next(iter(model.raw_param.values() if isinstance(model, MegatronFSDP) else model.parameters())).dtype
    return nn.functional.mse_loss(model(batch.inputs.to(dtype)).float(), batch.targets)


CASES = {
    dtype: ModelCase(build, MODEL_CASES["odd_shapes"].make_batch, loss_in_own_dtype, (OddBlock,))
    for dtype, build in ((FP32, build_odd_shapes), (BF16, build_bf16), (FP16, build_fp16))
}
MIXED = MODEL_CASES["bf16_fp32_norm"]
"""Units whose norm is float32 and whose linear layer is bfloat16."""


# ---- training ------------------------------------------------------------------------------------------------------


def train(jobs: Sequence[Job]) -> list[tuple[History, list[str]]]:
    """Train each job sharded; for each the history (with this rank's losses) and what is not in its promised dtype."""
    return [_train(job) for job in jobs]


def _train(job: Job) -> tuple[History, list[str]]:
    with fixed_seed(0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is narrower")
        model = fully_shard_model(
            job.case.build(),
            fsdp_unit_modules=job.case.unit_classes,
            zero_dp_strategy=job.strategy,
            mixed_precision_policy=job.policy,
            sync_model_each_microbatch=job.mode == "each",
        )
    optimizer = fully_shard_optimizer(exact_sgd(list(model.parameters())))
    history, wrong = History(), []
    for step in range(job.steps):
        history.losses.append([_backward(job, model, step, microbatch) for microbatch in range(job.microbatches)])
        wrong += _wrong_dtypes(job, model)
        history.gradients.append({n: g.clone() for n, g in model.full_gradients().items() if g is not None})
        optimizer.step()
        optimizer.zero_grad()
        history.weights.append({n: w.clone() for n, w in model.full_parameters().items()})
    return history, wrong


def _backward(job: Job, model: MegatronFSDP, step: int, microbatch: int) -> float:
    is_last = microbatch == job.microbatches - 1
    model.is_last_microbatch = is_last
    whole = job.case.make_batch(SAMPLES, torch.Generator().manual_seed(step * job.microbatches + microbatch))
    loss = job.case.loss(model, whole.part(dist.get_rank(), dist.get_world_size()))
    if job.mode == "no_sync" and not is_last:
        with model.no_sync():
            (loss / job.microbatches).backward()
    else:
        (loss / job.microbatches).backward()
    return loss.item()


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
    by_rank = run_ranks(num_ranks, train, jobs)
    for job, *of_ranks in zip(jobs, *by_rank, strict=True):
        expected = emulate(job, num_ranks)
        for rank, (history, wrong) in enumerate(of_ranks):
            assert wrong == [], job
            for step in range(job.steps):
                assert_same(history.gradients[step], expected.gradients[step], f"gradients of step {step}, {job}")
                assert_same(history.weights[step], expected.weights[step], f"weights of step {step}, {job}")
                losses = expected.losses[step][rank::num_ranks]  # microbatch by microbatch, ranks in turn
                assert history.losses[step] == losses, f"rank {rank}, step {step}, {job}"


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, f"{what}: {name}"
        assert torch.equal(got[name], value), (
            f"{what}: {name} differs by up to {(got[name].double() - value.double()).abs().max():.3g}"
        )


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


def test_the_jobs_cover_every_pair_of_choices() -> None:
    dtype_of = {case: dtype for dtype, case in CASES.items()}
    rows = [
        (job.strategy, dtype_of[job.case], job.policy.main_params_dtype, job.policy.main_grads_dtype,
         job.policy.grad_comm_dtype)
        for job in covering_jobs()
    ]  # fmt: skip
    levels = [set(column) for column in zip(*rows, strict=True)]
    assert [len(values) for values in levels] == [4, 3, 4, 4, 4]
    for i in range(5):
        for j in range(i):
            assert len({(row[i], row[j]) for row in rows}) == len(levels[i]) * len(levels[j])


@pytest.mark.parametrize("mode", ["each", "last", "no_sync"])
def test_every_cast_and_sum_is_in_the_dtype_it_is_promised_in(run_ranks: RunRanks, mode: str) -> None:
    check(run_ranks, 2, [replace(job, mode=mode) for job in covering_jobs()])


def test_sums_of_four_ranks_are_taken_in_rank_order(run_ranks: RunRanks) -> None:
    check(run_ranks, 4, [replace(job, mode="each", steps=1) for job in covering_jobs() if job.strategy > 0])


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


@pytest.mark.parametrize("strategy", range(4))
def test_accumulation_is_in_main_grads_dtype_and_in_no_other(run_ranks: RunRanks, strategy: int) -> None:
    """Twelve microbatches: bfloat16 loses what float32 keeps, and both are what one process gets in that dtype."""
    sums = {}
    for grads in (BF16, FP32):
        job = Job(CASES[BF16], MixedPrecisionPolicy(FP32, grads, FP32), strategy, steps=1, microbatches=12)
        check(run_ranks, 2, [job])
        sums[grads] = emulate(job, 2).gradients[0]
    for name, in_fp32 in sums[FP32].items():
        assert torch.equal(sums[BF16][name], sums[BF16][name].bfloat16().float())
        largest = in_fp32.abs().max()
        lost = (sums[BF16][name] - in_fp32).abs().max() / largest
        assert 2**-10 < lost < 12 * 2**-8, name  # each of 12 sums is rounded by up to 2**-9 of its value


# ---- float16 in transit --------------------------------------------------------------------------------------------


def large_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Gradients of tens of thousands: their sum over four ranks leaves the range of float16, their mean does not."""
    return 2e5 * loss_in_own_dtype(model, batch)


@pytest.mark.parametrize("mode", ["each", "last", "no_sync"])
def test_float16_sums_of_large_gradients_stay_in_range(run_ranks: RunRanks, mode: str) -> None:
    case = replace(CASES[FP32], loss=large_loss)
    policy = MixedPrecisionPolicy(FP32, FP32, FP16)
    jobs = [Job(case, policy, strategy, mode, steps=1, microbatches=2) for strategy in (1, 2, 3)]
    check(run_ranks, 4, jobs)
    for job in jobs:
        gradients = emulate(job, 4).gradients[0].values()
        assert max(gradient.abs().max().item() for gradient in gradients) > 65504 / 4
        assert all(gradient.isfinite().all() for gradient in gradients)
