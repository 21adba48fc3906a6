"""Weights in a weight format: one process that rounds its weights, the same bits on any ranks, bytes, bad input."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, MegatronFSDP, MixedPrecisionPolicy
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.config.precision import WEIGHT_FORMAT_NAMES
from megatron_fsdp.errors import ConfigurationError, NonFiniteWeightError
from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS, WeightFormat, encoded_bytes
from tests.conftest import RunRanks
from tests.support import case
from tests.support.arrangements import FLAT, divide_tensors, hybrid, tensor_parallel
from tests.support.case import SAMPLES, Run, Scenario, Setting, Tolerance, assert_parity, run_sharded
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.rounded_weights import train_rounded
from tests.support.zoo import MODEL_CASES, Batch, make_token_batch

STEPS = 3
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
    others: dict[str, str | None] = field(default_factory=dict)  # by name
    tensor: int = 1  # tensor-parallel ranks

    @property
    def ranks(self) -> int:
        return self.inner * self.outer * self.tensor

    @property
    def scenario(self) -> Scenario:
        return Scenario(train, replace(CASE, build=partial(build, self)), case.momentum)

    @property
    def setting(self) -> Setting:
        chosen = {**self.others, "*": self.weight_format} if self.others else self.weight_format
        policy = MixedPrecisionPolicy(self.main, FP32, weight_format=chosen)
        arrangement = hybrid(self.outer, self.inner) if self.outer > 1 else FLAT
        if self.tensor > 1:
            arrangement = tensor_parallel(divide_tensors)
        return Setting(3, policy, outer_strategy=self.outer_strategy, arrangement=arrangement)


def build(job: Job) -> nn.Module:
    with fixed_seed(0):
        return CASE.build().to(job.dtype)


def batch() -> Batch:
    return make_token_batch(SAMPLES, torch.Generator().manual_seed(1))


def train(run: Run) -> None:
    for _ in range(STEPS):
        run.backward(1)
        run.step()


def format_of(model: nn.Module, name: str, job: Job) -> WeightFormat | None:
    """What the documentation says: that of matrices, but for embeddings and what is named otherwise."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    param = dict(model.named_parameters())[name]
    chosen = job.others.get(name, job.weight_format)
    return None if chosen is None or param.ndim < 2 or id(param) in embeddings else WEIGHT_FORMATS[chosen]


def rounded(weight_format: WeightFormat | None, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Encode and decode a whole tensor, or cast it where it has no format."""
    if weight_format is None:
        return weight.detach().to(dtype)
    flat = weight.detach().float().reshape(-1)
    scale = weight_format.scales(weight_format.amax(flat))
    encoded = torch.empty(encoded_bytes(weight_format, flat.numel()), dtype=torch.uint8)
    weight_format.encode(flat, scale, encoded)
    decoded = torch.empty(flat.numel(), dtype=dtype)
    weight_format.decode(encoded, scale, decoded)
    return decoded.view(weight.shape)


def round_weights(job: Job, model: nn.Module, main: nn.Module) -> None:
    """Give a model its main weights, rounded."""
    exact = dict(main.named_parameters())
    for name, param in model.named_parameters():
        param.data = rounded(format_of(model, name, job), exact[name], job.dtype)


def wrap(job: Job, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    run = Run(job.scenario, replace(job.setting, options=tuple(options.items())))
    assert run.sharded is not None
    return run.sharded, run.optimizer


JOBS = [
    Job("fp8", others={"head.weight": None, "blocks.0.attention.q.weight": "nvfp4"}),
    pytest.param(Job("fp8", BF16, main=None, inner=3), marks=pytest.mark.full),
    Job("mxfp8", BF16, outer=2, outer_strategy=1),
    pytest.param(Job("nvfp4", main=torch.float64), marks=pytest.mark.full),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_equals_one_process_that_rounds_its_weights(run_ranks: RunRanks, job: Job) -> None:
    outcomes = [of_rank for (of_rank,) in run_ranks(job.ranks, run_sharded, [(job.scenario, job.setting)])]
    ranks, compute = (job.outer, job.inner), partial(round_weights, job)
    expected = train_rounded(job.scenario, ranks, [[1]] * STEPS, compute, job.main or job.dtype)
    expected.losses = torch.tensor(expected.losses).view(-1, job.ranks).mean(1).tolist()
    assert_parity(outcomes, expected, case.FP32 if job.dtype is FP32 else Tolerance(rtol=2**-5, atol=2**-6))


def shards_of(job: Job) -> dict[str, torch.Tensor]:
    """Return the weights that compute sees in the units of a forward, by name."""
    model, _ = wrap(job)
    seen: dict[str, torch.Tensor] = {}

    def look(prefix: str, module: nn.Module, _: object) -> None:
        for name, param in module.named_parameters():
            value = param.detach() + 0  # whatever its class is
            seen[f"{prefix}.{name}"] = value.full_tensor() if isinstance(value, DTensor) else value

    for name, module in model.module.named_modules():
        if isinstance(module, CASE.unit_classes):
            module.register_forward_pre_hook(partial(look, name))
    CASE.loss(model, batch())
    return seen


@pytest.mark.full(short=["fp8"])
@pytest.mark.parametrize("name", WEIGHT_FORMAT_NAMES)
def test_compute_sees_the_same_bits_on_any_ranks(run_ranks: RunRanks, name: str) -> None:
    model = build(Job(name))
    for job in (
        Job(name, inner=3),
        Job(name, inner=2, outer=2),
        Job(name, inner=2, outer=2, outer_strategy=1),
        Job(name, inner=2, tensor=2),
    ):
        whole = {}
        for key, param in model.named_parameters():
            dim = int(".out." in key or ".down." in key)  # what tensor parallelism cuts, into tensors of their own
            parts = param.chunk(2, dim) if job.tensor > 1 and param.ndim > 1 else (param,)
            whole[key] = torch.cat(
                [rounded(format_of(model, key, job), part, FP32) for part in parts], dim * (len(parts) > 1)
            )
        for seen in run_ranks(job.ranks, shards_of, job):
            assert seen
            for key, value in seen.items():
                assert torch.equal(value, whole[key]), (job, key)


@pytest.mark.parametrize(
    ("job", "num_ranks", "count"),
    [
        (Job("fp8"), 2, 1),
        (Job("fp8", inner=2, outer=2), 4, 2),
        (replace(Job("fp8"), weight_format=None), 2, 0),  # type: ignore[arg-type]
    ],
    ids=["one axis", "two axes", "no format"],
)
@on_ranks()
def test_magnitudes_of_all_tensors_are_agreed_on_at_once(job: Job, count: int) -> None:
    """One all-reduce for each axis, from the step until new weights are installed, whatever the number of tensors."""
    model, optimizer = wrap(job)
    CASE.loss(model, batch()).backward()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        optimizer.step()
    assert counted.call_count == count


@on_ranks(2)
def test_a_weight_that_is_not_finite_is_refused_on_all_ranks() -> None:
    model, _ = wrap(Job("fp8"))
    local = model.module.get_parameter("blocks.1.attention.q.weight").to_local()  # type: ignore[attr-defined]
    with torch.no_grad():
        local.fill_(-torch.inf if dist.get_rank() == 0 else 0.5)
    assert refusal(CASE.loss, model, batch(), error=NonFiniteWeightError).startswith(
        "blocks.1.attention.q.weight has an element that is NaN or infinite, which weight_format='fp8'"
    )


@on_ranks(2)
def test_bytes_are_counted_and_described() -> None:
    job = Job("fp8", BF16)
    model, _ = wrap(job)
    groups = model.parameter_groups()
    before = model.traffic()
    CASE.loss(model, batch())
    sent = model.traffic().since(before).gather_bytes
    held = sum(group.weights.compute.local.nbytes for group in groups if group.weights.is_encoded)
    expected = sum(group.plan.sent_bytes // job.inner for group in groups if group.plan.needs_all_gather)
    in_bf16 = sum(group.plan.layout.numel * 2 // job.inner for group in groups if group.weights.is_encoded)
    told = str(model.describe())
    assert sent == expected
    assert 2 * held == in_bf16 > 0
    assert "gather fp8" in told
    assert "saved_bytes" in told


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"weight_format": "fp7"}, ConfigurationError, "weight_format='fp7': 'fp7' does not exist; give one of fp8"),
        ({"weight_format": {"head": None}}, ConfigurationError, "names no format"),
        ({"weight_format": {0: "fp8"}}, TypeError, "has a pattern that is no string"),
        ({"weight_format": {"head": None, "*": "int3"}}, ConfigurationError, "'int3' does not exist; give one of fp8"),
    ],
)
def test_a_policy_refuses_impossible_formats(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MixedPrecisionPolicy(**fields)


def resumed(folder: Path, other: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train a step in fp8, save, and load into a model of another format; return its loss and both models' weights."""
    model, optimizer = wrap(Job("fp8"))
    own = batch().part(dist.get_rank(), 2)
    CASE.loss(model, own).backward()
    optimizer.step()
    save_checkpoint(model, optimizer, folder, iteration=1)
    again, optimizer = wrap(Job(other))
    load_checkpoint(again, optimizer, folder)
    weights = [{n: p.full_tensor() for n, p in each.module.named_parameters()} for each in (model, again)]
    return CASE.loss(again, own).detach(), *weights


def test_a_checkpoint_resumes_in_another_format(run_ranks: RunRanks, tmp_path: Path) -> None:
    plain, other = build(Job("fp8")), "nvfp4"
    for rank, (loss, saved, loaded) in enumerate(run_ranks(2, resumed, tmp_path, other)):
        computed = {n: rounded(format_of(plain, n, Job(other)), weight, FP32) for n, weight in saved.items()}
        assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
        plain.load_state_dict(computed, strict=False)
        torch.testing.assert_close(loss, CASE.loss(plain, batch().part(rank, 2)).detach())


@on_ranks(2)
def test_fields_of_a_configuration_choose_a_format() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    own = batch().part(dist.get_rank(), 2)
    choices: list[tuple[str, Any, str]] = [
        ("fp8_param_gather", True, "fp8"),
        ("fp4_param_gather", True, "nvfp4"),
        ("megatron_fsdp_weight_format", ("mxfp8",), "mxfp8"),
    ]
    reused = DistributedDataParallelConfig(**sharded, fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True)
    for config, name in [
        *((DistributedDataParallelConfig(**{**sharded, option: value}), name) for option, value, name in choices),
        (reused, "mxfp8"),
    ]:
        model = DistributedDataParallel(config, build(Job(name)), mesh, fsdp_unit_modules=list(CASE.unit_classes))
        other, _ = wrap(Job(name))
        assert torch.equal(CASE.loss(model, own), CASE.loss(other, own))
        assert f"gather {name}" in str(model.describe())
    for option, value, name in choices:
        with pytest.raises(ConfigurationError, match=rf"{option}=.* has no effect with"):
            DistributedDataParallel(DistributedDataParallelConfig(**{option: value}), build(Job(name)), mesh)
