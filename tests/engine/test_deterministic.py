"""`deterministic="world"`: the bits of one plain process on any number of ranks; norms; what cannot hold is refused."""

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.grad_norm import exact_norm
from megatron_fsdp.optim.optimizer import check_rounding
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks
from tests.support.zoo import MODEL_CASES, Batch, ModelName

STEPS, MICROBATCHES, MAX_NORM = 2, 12, 0.05
CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Job:
    """A model and how it is trained; everything that must not change a bit is here."""

    model: ModelName = "transformer"
    strategy: int = 3
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 (frozen)
    dtype: torch.dtype = FP32
    auto_sync: bool = True
    units: bool = True
    mesh: tuple[int, int] | None = None  # outer and inner ranks
    outer: int = 0  # the strategy across
    options: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return MODEL_CASES[self.model].build().to(self.dtype)

    def microbatch(self, step: int, index: int) -> Batch:
        batch = MODEL_CASES[self.model].make_batch(2 * MICROBATCHES, torch.Generator().manual_seed(step))
        if batch.inputs.is_floating_point():
            batch = Batch(batch.inputs.to(self.dtype), batch.targets)
        return batch.part(index, MICROBATCHES)

    def loss(self, model: nn.Module, step: int, index: int) -> torch.Tensor:
        return MODEL_CASES[self.model].loss(model, self.microbatch(step, index)) / MICROBATCHES


Tensors = dict[str, torch.Tensor]
Step = tuple[dict[int, float], Tensors, torch.Tensor, Tensors]
"""Losses by microbatch, gradients, their norm, weights and moments after the update."""


def clip_exactly(grads: list[torch.Tensor]) -> torch.Tensor:
    """Clip by a norm that is rounded once."""
    norm = torch.tensor(math.sqrt(math.fsum(x * x for grad in grads for x in grad.reshape(-1).tolist())))
    torch._foreach_mul_(grads, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
    return norm


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    found = {}
    for name, param in model.named_parameters():
        found[name] = full(param)
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name} {key}"] = full(value)
    return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def in_one_process(job: Job) -> list[Step]:
    """Train as anyone would without ranks, one microbatch after another."""
    return plain_steps(Job(job.model, dtype=job.dtype))


@cache
def plain_steps(job: Job) -> list[Step]:
    model = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    steps: list[Step] = []
    for step in range(STEPS):
        losses = {}
        for index in range(MICROBATCHES):
            loss = job.loss(model, step, index)
            loss.backward()
            losses[index] = loss.item()
        grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norm = clip_exactly([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        steps.append((losses, grads, norm, state_of(model, optimizer)))
    return steps


def wrapped(job: Job) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module, places = job.build(), dict[str, Any]()
    if job.mesh is not None:
        mesh = init_device_mesh("cpu", job.mesh, mesh_dim_names=("outer", "inner"))
        group = mesh._flatten("both").get_group()
        places = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", "hybrid_fsdp_group": group}
    return fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=True),
        fsdp_unit_modules=list(MODEL_CASES[job.model].unit_classes) if job.units else [],
        zero_dp_strategy=job.strategy,
        mixed_precision_policy=job.policy,
        calculate_per_token_loss=True,
        sync_model_each_microbatch=job.auto_sync,
        deterministic="world",
        outer_dp_sharding_strategy=job.outer,
        **places,
        **dict(job.options),
    )


def on_a_rank(jobs: tuple[Job, ...]) -> list[list[Step]]:
    return [sharded(job) for job in jobs]


def sharded(job: Job, first: int = 0, last: int = STEPS, folder: str = "") -> list[Step]:
    """Train from step `first` to before `last`; with a folder load before a first step that is not 0, and save."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = wrapped(job)
    if first:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    steps: list[Step] = []
    for step in range(first, last):
        losses = {}
        own = range(rank, MICROBATCHES, ranks)
        for index in own:
            model.set_model_auto_sync(job.auto_sync or index == own[-1])
            loss = job.loss(model, step, index)
            loss.backward()
            losses[index] = loss.item()
        grads = {name: full(p.grad) for name, p in model.module.named_parameters() if p.grad is not None}
        norm = model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((losses, grads, norm, state_of(model.module, optimizer)))
    if folder and last < STEPS:
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    return steps


def compare(found: list[list[Step]], wanted: list[Step], what: str) -> None:
    """Compare the steps of each rank with those of one process, bit for bit."""
    for number, expected in enumerate(wanted):
        losses: dict[int, float] = {}
        for steps in found:
            losses |= steps[number][0]
            _, grads, norm, state = steps[number]
            for kind, ours, theirs in (("gradient", grads, expected[1]), ("state", state, expected[3])):
                assert ours.keys() == theirs.keys(), (what, kind)
                different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
                assert not different, f"{what}: {kind} of step {number} differs: {different}"
            assert torch.equal(norm, expected[2]), f"{what}: norm {norm.item()} is not {expected[2].item()}"
        assert losses == expected[0], f"{what}: losses of step {number}"


JOBS = (
    Job(),
    Job(strategy=2),
    Job(auto_sync=False),
    Job("tied", auto_sync=False),
    Job("unused", strategy=2, auto_sync=False),
    Job(units=False),
    Job(strategy=1, auto_sync=False),
    Job("tied", strategy=0, auto_sync=False),
)


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_ranks_have_the_bits_of_one_process(run_ranks: RunRanks, num_ranks: int) -> None:
    results = run_ranks(num_ranks, on_a_rank, JOBS)
    for position, job in enumerate(JOBS):
        compare([of_rank[position] for of_rank in results], in_one_process(job), f"{job} on {num_ranks} ranks")


MORE = (
    Job("partly_frozen"),
    Job("scalars", strategy=1),
    Job("odd_shapes", strategy=0),
    Job(strategy=0, options=(("report_nan_in_param_grad", True),)),
    Job("scalars", strategy=2),
    Job("odd_shapes", auto_sync=False),
    Job(options=(("weight_allocator", "resize"), ("forward_prefetch_units", 3))),
    Job(options=(("max_gathered_units", 1), ("backward_prefetch_units", 0), ("forward_prefetch_units", 0))),
    Job(options=(("report_nan_in_param_grad", True), ("find_unused_parameters", True))),
)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_options_and_odd_models_change_no_bit(run_ranks: RunRanks, num_ranks: int) -> None:
    results = run_ranks(num_ranks, on_a_rank, MORE)
    for position, job in enumerate(MORE):
        compare([of_rank[position] for of_rank in results], in_one_process(job), f"{job} on {num_ranks} ranks")


LOW = (
    Job(dtype=BF16, policy=MixedPrecisionPolicy(FP32, FP32, BF16)),
    Job(dtype=BF16, policy=MixedPrecisionPolicy(FP32, FP32, FP32), auto_sync=False),
    Job(dtype=BF16, policy=MixedPrecisionPolicy(None, BF16, BF16), strategy=2),
)


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_low_precision_has_the_bits_of_one_rank(run_ranks: RunRanks, num_ranks: int) -> None:
    alone = run_ranks(1, on_a_rank, LOW)[0]
    results = run_ranks(num_ranks, on_a_rank, LOW)
    for position, job in enumerate(LOW):
        compare([of_rank[position] for of_rank in results], alone[position], f"{job} on {num_ranks} ranks")


HYBRID = (
    Job(),
    Job(outer=1),
    Job("unused", strategy=2, auto_sync=False),
    Job("odd_shapes", strategy=1, outer=1, auto_sync=False),
    Job("tied", strategy=1),
    Job("scalars", outer=1, auto_sync=False),
    Job("partly_frozen", auto_sync=False),
    Job("odd_shapes", strategy=0),
    Job(units=False, outer=1, options=(("report_nan_in_param_grad", True),)),
)


@pytest.mark.full(short=["(2, 2)"])
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (3, 1), (2, 2), (3, 2), (2, 3), (6, 1)], ids=str)
def test_hybrid_meshes_have_the_bits_of_one_process(run_ranks: RunRanks, mesh: tuple[int, int]) -> None:
    """With HSDP and HFSDP, in every factorisation."""
    jobs = tuple(replace(job, mesh=mesh) for job in HYBRID)
    results = run_ranks(mesh[0] * mesh[1], on_a_rank, jobs)
    for position, job in enumerate(HYBRID):
        compare([of_rank[position] for of_rank in results], in_one_process(job), f"{job} on {mesh} ranks")


@pytest.mark.full
def test_low_precision_on_a_hybrid_mesh_has_the_bits_of_one_rank(run_ranks: RunRanks) -> None:
    alone = run_ranks(1, on_a_rank, LOW)[0]
    for outer in (0, 1):
        results = run_ranks(4, on_a_rank, tuple(replace(job, mesh=(2, 2), outer=outer) for job in LOW))
        for position, job in enumerate(LOW):
            compare([of_rank[position] for of_rank in results], alone[position], f"{job}, {outer} across")


@pytest.mark.full(short=["(2, 3)"])
@pytest.mark.parametrize("others", [(2, 3), (4, 0), (1, 1)], ids=str)
def test_a_run_goes_on_with_other_ranks_and_another_strategy(
    run_ranks: RunRanks, tmp_path: Path, others: tuple[int, int]
) -> None:
    num_ranks, strategy = others
    run_ranks(3, sharded, Job(strategy=2), 0, 1, str(tmp_path))
    later = run_ranks(num_ranks, sharded, Job(strategy=strategy), 1, STEPS, str(tmp_path))
    compare(later, in_one_process(Job())[1:], f"from 3 to {num_ranks} ranks")


# ---- the norm ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_the_norm_does_not_depend_on_cuts(values: list[float], cuts: list[int]) -> None:
    whole = torch.tensor(values)
    ends = sorted({min(cut, len(values)) for cut in cuts})
    norm = exact_norm({(): [whole]}, CPU)
    assert torch.equal(exact_norm({(): list(whole.tensor_split(ends))}, CPU), norm)
    assert torch.equal(exact_norm({(): [whole.flip(0)]}, CPU), norm)
    exact = math.hypot(*values)
    assert norm.item() == pytest.approx(float(torch.tensor(exact)), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_norm_of_many_blocks_is_that_of_one_sum(dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(0)
    whole = torch.randn(100_001, generator=numbers, dtype=torch.float64)
    whole = (whole * 10 ** torch.randint(-12, 3, whole.shape, generator=numbers)).to(dtype)
    norm = exact_norm({(): [whole]}, CPU)
    for cuts in ([1], [4096, 40_000], list(range(0, 100_000, 777))):
        assert torch.equal(exact_norm({(): list(whole.tensor_split(cuts))}, CPU), norm)
    expected = math.sqrt(math.fsum(value * value for value in whole.tolist()))
    assert norm.item() == pytest.approx(expected, rel=1e-12 if dtype is torch.float64 else 1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_says_so(bad: float) -> None:
    norm = exact_norm({(): [torch.tensor([1.0, bad])]}, CPU).item()
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


def test_the_norm_of_zeros_is_zero() -> None:
    assert exact_norm({(): [torch.zeros(3), torch.zeros(0)]}, CPU).item() == 0.0


def test_the_norm_has_the_dtype_that_ranks_without_elements_know() -> None:
    assert exact_norm({(): [torch.zeros(0, dtype=torch.float64)]}, CPU).dtype is torch.float64


# ---- refusals ------------------------------------------------------------------------------------------------------


def refusal(**arguments: Any) -> str:
    module = nn.Linear(4, 4, dtype=arguments.pop("dtype", None))
    arguments = {"calculate_per_token_loss": True, "deterministic": "world", **arguments}
    with pytest.raises(ConfigurationError) as caught:
        fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1), **arguments)
    return str(caught.value)


@on_ranks(4)
def test_what_cannot_hold_is_refused() -> None:
    assert "divides by the number of ranks" in refusal(calculate_per_token_loss=False)
    assert "deterministic='rank' does not exist; give \"world\"" in refusal(deterministic="rank")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert "tensor parallelism" in refusal(device_mesh=mesh, dp_shard_dim="a", tp_dim="b")
    ranks = init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))
    told = refusal(device_mesh=ranks, dp_shard_dim="a", tp_dim="b", expt_device_mesh=mesh)
    assert "which tokens an expert computes together depends on the ranks" in told
    narrow = MixedPrecisionPolicy(None, BF16, BF16)
    told = refusal(dtype=BF16, mixed_precision_policy=narrow)
    assert "SGD on main weights in bfloat16 cannot step on the CPU" in told
    assert gather_objects(told) == [told] * 4
    model, _ = wrapped(Job())
    with pytest.raises(ConfigurationError, match="no_sync cannot be used"), model.no_sync():
        pass
    with pytest.raises(ConfigurationError, match="only norms 2 and infinity"):
        model.clip_grad_norm_(1.0, norm_type=1.0)


STEPPED = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw, foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw, fused": (torch.optim.AdamW, {"fused": True}),
}
CUTS = ((0, 5), (5, 38), (38, 101))


def stepped(kind: Any, options: dict[str, Any], dtype: torch.dtype, cuts: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Steps on pieces of one tensor: weights, first and second moments."""
    draw = torch.Generator().manual_seed(3)
    weights, *grads = (torch.randn(101, generator=draw).to(dtype) for _ in range(6))
    pieces = [nn.Parameter(weights[start:stop].clone()) for start, stop in cuts]
    optimizer = kind(pieces, lr=0.013, **options)
    for grad in grads:
        for piece, (start, stop) in zip(pieces, cuts, strict=True):
            piece.grad = grad[start:stop].clone()
        optimizer.step()
    moments = [[value for value in optimizer.state[p].values() if value.dim()] for p in pieces]
    kinds = zip(*([piece.detach(), *own] for piece, own in zip(pieces, moments, strict=True)), strict=True)
    return torch.stack([torch.cat(each) for each in kinds])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", STEPPED)
def test_what_rounds_by_place_is_what_is_refused(name: str, dtype: torch.dtype) -> None:
    kind, options = STEPPED[name]
    by_place = not torch.equal(stepped(kind, options, dtype, ((0, 101),)), stepped(kind, options, dtype, CUTS))
    optimizer = kind([nn.Parameter(torch.zeros(3, dtype=dtype))], **options)
    check_rounding(optimizer, is_deterministic=False)
    if by_place or "fused" in options:
        what = "with fused=True" if "fused" in options else "on main weights in bfloat16"
        with pytest.raises(ConfigurationError, match=f"{kind.__name__} {what} cannot step on the CPU"):
            check_rounding(optimizer, is_deterministic=True)
    else:
        check_rounding(optimizer, is_deterministic=True)
