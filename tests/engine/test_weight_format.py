"""Weights in a weight format: one process that rounds its weights, the same bits on any ranks, bytes, bad input."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.precision import WEIGHT_FORMATS as NAMES
from megatron_fsdp.errors import ConfigurationError, NonFiniteWeightError
from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS, WeightFormat, encoded_bytes
from tests.conftest import RunRanks
from tests.support.models import MODEL_CASES, Batch, make_token_batch
from tests.support.on_ranks import on_ranks

STEPS, SAMPLES = 3, 12
BF16, FP32 = torch.bfloat16, torch.float32
CASE = MODEL_CASES["transformer"]


@dataclass(frozen=True)
class Job:
    """A model, a format and ranks: inner ones, outer ones, and whether outer ones share the optimizer."""

    weight_format: str
    dtype: torch.dtype = FP32
    inner: int = 2
    outer: int = 1
    outer_strategy: int = 0
    main: torch.dtype | None = FP32
    skips: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.inner * self.outer

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(self.main, FP32, weight_format=self.weight_format, weight_format_skips=self.skips)


def build(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return CASE.build().to(job.dtype)


def batch() -> Batch:
    return make_token_batch(SAMPLES, torch.Generator().manual_seed(1))


def is_rounded(model: nn.Module, name: str, job: Job) -> bool:
    """What the documentation says: matrices, but for embeddings and what is skipped."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    param = dict(model.named_parameters())[name]
    return param.ndim > 1 and id(param) not in embeddings and name not in job.skips


def rounded(weight_format: WeightFormat, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Encode and decode a whole tensor."""
    flat, shape = weight.detach().reshape(-1), tuple(weight.shape)
    amaxes = weight_format.amaxes(flat, 0, shape)
    encoded = torch.empty(encoded_bytes(weight_format, flat.numel()), dtype=torch.uint8)
    weight_format.encode(flat, 0, shape, amaxes, encoded)
    decoded = torch.empty(flat.numel(), dtype=dtype)
    weight_format.decode(encoded, 0, shape, amaxes, decoded)
    return decoded.view(shape)


Result = tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Losses, gradients of each step, main weights at the end."""


def reference(job: Job) -> Result:
    """Train in one process: each step computes with rounded weights, and the optimizer updates exact ones."""
    model = build(job)
    main_dtype = job.main or job.dtype
    masters = {name: param.detach().to(main_dtype, copy=True) for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(list(masters.values()), lr=0.1, momentum=0.9)
    losses, grads = [], []
    for _ in range(STEPS):
        computed = {
            name: (
                rounded(WEIGHT_FORMATS[job.weight_format], master, job.dtype)
                if is_rounded(model, name, job)
                else master.to(job.dtype)
            ).requires_grad_()
            for name, master in masters.items()
        }
        sums = {name: torch.zeros_like(master, dtype=FP32) for name, master in masters.items()}
        for part in range(job.ranks):  # as ranks do, whose gradients are added in float32
            own = batch().part(part, job.ranks)
            loss = CASE.loss(_Called(model, computed), own)
            for name, grad in zip(computed, torch.autograd.grad(loss, list(computed.values())), strict=True):
                sums[name] += grad.float() / job.ranks
            losses.append(loss.item())
        for name, master in masters.items():
            master.grad = sums[name].to(main_dtype)
        optimizer.step()
        grads.append(sums)
    return losses, grads, masters


class _Called(nn.Module):
    def __init__(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["model"], self.weights = model, weights

    def forward(self, *args: Any) -> Any:
        return functional_call(self.__dict__["model"], self.weights, args)


def wrap(job: Job, **arguments: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    names = ("outer", "inner") if job.outer > 1 else ("inner",)
    mesh = init_device_mesh("cpu", (job.outer, job.inner) if job.outer > 1 else (job.inner,), mesh_dim_names=names)
    if job.outer > 1:
        both = mesh[names]._flatten("both")
        arguments |= {
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": both.get_group(),
            "outer_dp_sharding_strategy": job.outer_strategy,
        }
    model = build(job)
    return fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        device_mesh=mesh,
        dp_shard_dim="inner",
        zero_dp_strategy=3,
        fsdp_unit_modules=list(CASE.unit_classes),
        mixed_precision_policy=job.policy,
        sync_model_each_microbatch=True,
        **arguments,
    )


def train(job: Job) -> Result:
    model, optimizer = wrap(job)
    own = batch().part(dist.get_rank(), job.ranks)
    losses, grads = [], []
    for _ in range(STEPS):
        loss = CASE.loss(model, own)
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.full_tensor().float().clone() for n, p in model.module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, {n: p.full_tensor().detach().clone() for n, p in model.module.named_parameters()}


JOBS = [
    *(Job(name, inner=2) for name in NAMES),
    *(pytest.param(Job(name, BF16, inner=3), marks=pytest.mark.full) for name in NAMES),
    Job("fp8", inner=1),
    Job("fp8", inner=4),
    Job("fp8", outer=2),
    Job("fp8", BF16, outer=2, outer_strategy=1),
    Job("fp8", main=None),
    Job("fp8", skips=("head.weight",)),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_equals_one_process_that_rounds_its_weights(run_ranks: RunRanks, job: Job) -> None:
    losses, grads, masters = reference(job)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if job.dtype is FP32 else {"rtol": 2**-5, "atol": 2**-6}
    for rank, (own_losses, own_grads, own_masters) in enumerate(run_ranks(job.ranks, train, job)):
        torch.testing.assert_close(own_losses, losses[rank :: job.ranks], **tolerance)
        for step, expected in enumerate(grads):
            torch.testing.assert_close(own_grads[step], expected, **tolerance)
        torch.testing.assert_close(own_masters, masters, **tolerance)


def shards_of(job: Job) -> dict[str, torch.Tensor]:
    """Return the weights that compute sees in the units of a forward, by name."""
    model, _ = wrap(job)
    seen: dict[str, torch.Tensor] = {}

    def look(prefix: str, module: nn.Module, _: object) -> None:
        seen.update({f"{prefix}.{name}": param.detach().clone() for name, param in module.named_parameters()})

    for name, module in model.module.named_modules():
        if isinstance(module, CASE.unit_classes):
            module.register_forward_pre_hook(partial(look, name))
    CASE.loss(model, batch())
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_compute_sees_the_same_bits_on_any_ranks(run_ranks: RunRanks, name: str) -> None:
    model = build(Job(name))
    whole = {
        key: rounded(WEIGHT_FORMATS[name], param, FP32) if is_rounded(model, key, Job(name)) else param.detach()
        for key, param in model.named_parameters()
    }
    for job in (Job(name, inner=1), Job(name, inner=3), Job(name, inner=2, outer=2, outer_strategy=1)):
        for seen in run_ranks(job.ranks, shards_of, job):
            assert seen
            for key, value in seen.items():
                assert torch.equal(value, whole[key]), (job, key)


class _Pre(torch.Tensor):
    def fsdp_pre_all_gather(self) -> None: ...


class _Both(_Pre):
    def fsdp_post_all_gather(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_Pre, "weight is a _Pre with fsdp_pre_all_gather and without fsdp_post_all_gather; a tensor class"),
        (_Both, "weight is a _Both with fsdp_pre_all_gather and fsdp_post_all_gather, which are not called here"),
    ],
)
def test_a_tensor_class_that_gathers_itself_is_refused(run_ranks: RunRanks, kind: type[_Pre], words: str) -> None:
    said = run_ranks(2, guest_error, kind)
    assert said[0] == said[1]
    assert words in said[0]


def guest_error(kind: type[_Pre]) -> str:
    model = nn.Linear(3, 2)
    if dist.get_rank() == 1:  # the other rank sees nothing wrong
        model.weight = nn.Parameter(model.weight.detach().as_subclass(kind))
    with pytest.raises(ConfigurationError) as caught:
        fully_shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return str(caught.value)


def poisoned(weight: float) -> list[str]:
    """Return what a forward says after the elements on the first rank became `weight`."""
    model, _ = wrap(Job("fp8"))
    own = dict(model.module.named_parameters())["blocks.1.attention.q.weight"]
    with torch.no_grad():
        local = own.to_local()
        local.fill_(weight if dist.get_rank() == 0 else 0.5)
    with pytest.raises(NonFiniteWeightError) as caught:
        CASE.loss(model, batch())
    return [str(caught.value)]


@pytest.mark.parametrize("weight", [torch.nan, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused_on_all_ranks(run_ranks: RunRanks, weight: float) -> None:
    said = run_ranks(2, poisoned, weight)
    assert said[0] == said[1]
    assert said[0][0].startswith(
        "blocks.1.attention.q.weight has an element that is NaN or infinite, which weight_format='fp8'"
    )


@on_ranks(2)
def test_bytes_are_counted_and_described() -> None:
    """Return bytes sent in a forward beyond those expected, encoded ones held, those in bf16, and the description."""
    job = Job("fp8", BF16)
    model, _ = wrap(job)
    groups = model.parameter_groups()
    before = model.traffic()
    CASE.loss(model, batch())
    sent = model.traffic().since(before).gather_bytes
    held = sum(group.weights.compute.local.nbytes for group in groups if group.weights.is_encoded)
    expected = sum(group.plan.sent_bytes // job.inner for group in groups if group.plan.needs_all_gather)
    in_bf16 = sum(group.plan.layout.numel * 2 // job.inner for group in groups if group.weights.is_encoded)
    unexpected = sent - expected
    told = str(model.describe())
    assert unexpected == 0
    assert 2 * held == in_bf16 > 0
    assert "gather fp8" in told
    assert "saved_bytes" in told


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"weight_format": "fp7"}, ConfigurationError, "weight_format='fp7' does not exist; give one of fp8"),
        ({"weight_format_skips": ("a",)}, ConfigurationError, "has no effect without a weight_format"),
        ({"weight_format": "fp8", "weight_format_skips": "head"}, TypeError, "'head' is not a tuple of strings"),
    ],
)
def test_a_policy_refuses_impossible_formats(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MixedPrecisionPolicy(**fields)


def test_the_names_are_those_of_the_codecs() -> None:
    assert tuple(WEIGHT_FORMATS) == NAMES


@on_ranks(2)
def test_encoded_shards_live_in_kept_memory() -> None:
    with pytest.warns(UserWarning, match="only NCCL registers memory"):
        kept, _ = wrap(Job("mxfp8"), nccl_ub=True)
    lazy, _ = wrap(Job("mxfp8"))
    same = [torch.equal(CASE.loss(kept, batch()), CASE.loss(lazy, batch()))]
    for mine, other in zip(kept.parameter_groups(), lazy.parameter_groups(), strict=True):
        same.append(torch.equal(mine.weights.compute.local, other.weights.compute.local))
    assert all(same)
