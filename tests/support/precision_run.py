"""Training sharded under a policy, and the comparison with its emulation."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.config.precision import resolve_precision
from tests.support.models import MODEL_CASES, Batch, ModelCase, OddBlock, build_odd_shapes
from tests.support.parity import fixed_seed
from tests.support.precision_emulation import History, Job, emulate, exact_sgd
from tests.support.sharded_run import SAMPLES, RunRanks

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


def train(jobs: Sequence[Job], **arguments: Any) -> list[tuple[History, list[str]]]:
    """Train each job sharded; for each the history (with this rank's losses) and what is not in its promised dtype."""
    return _train_all(jobs, arguments)


def _train_all(jobs: Sequence[Job], arguments: dict[str, Any]) -> list[tuple[History, list[str]]]:
    return [_train(job, arguments) for job in jobs]


def _train(job: Job, arguments: dict[str, Any]) -> tuple[History, list[str]]:
    with fixed_seed(0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is narrower")
        model = fully_shard_model(
            job.case.build(),
            fsdp_unit_modules=job.case.unit_classes,
            zero_dp_strategy=job.strategy,
            mixed_precision_policy=job.policy,
            sync_model_each_microbatch=job.mode == "each",
            **arguments,
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


def check(run_ranks: RunRanks, num_ranks: int, jobs: Sequence[Job], **arguments: Any) -> None:
    """Assert that training on ranks, with these arguments of wrapping, gives bit for bit what the emulation gives."""
    check_histories(num_ranks, jobs, run_ranks(num_ranks, _train_all, jobs, arguments))


def check_histories(num_ranks: int, jobs: Sequence[Job], by_rank: Sequence[list[tuple[History, list[str]]]]) -> None:
    """The comparison of `check`, for what `train` returned on each rank."""
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
    """Assert the same names, dtypes and bits."""
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, f"{what}: {name}"
        assert torch.equal(got[name], value), (
            f"{what}: {name} differs by up to {(got[name].double() - value.double()).abs().max():.3g}"
        )
