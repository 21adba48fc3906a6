"""`deterministic="world"`: the bits of one plain process on any number of ranks; norms; what cannot hold is refused."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.grad_norm import exact_norm
from megatron_fsdp.optim.optimizer import check_rounding
from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, hybrid
from tests.support.case import (
    Job,
    Recording,
    Run,
    Scenario,
    Setting,
    assert_bits,
    outcome_of,
    reference,
    run_sharded,
    whole_moments,
)
from tests.support.on_ranks import on_ranks, refusal
from tests.support.zoo import MODEL_CASES, ModelCase, ModelName

STEPS, MICROBATCHES, MAX_NORM = 2, 12, 0.05
CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(run: Run, first: int = 0, last: int = STEPS, auto_sync: bool = True) -> None:
    """Steps of twelve microbatches, of which each rank has some; one process has all, one after another."""
    own = range(MICROBATCHES) if run.sharded is None else range(dist.get_rank(), MICROBATCHES, run.num_ranks)
    for step in range(first, last):
        batch = run.case.make_batch(2 * MICROBATCHES, torch.Generator().manual_seed(step))
        for index in own:
            if run.sharded is not None:
                run.sharded.set_model_auto_sync(auto_sync or index == own[-1])
            loss = run.case.loss(run.model, batch.part(index, MICROBATCHES)) / MICROBATCHES
            run.note_loss(loss)
            loss.backward()
        run.note_gradients()
        run.note(
            "norm", {"norm": clip_exactly(run.model) if run.sharded is None else run.sharded.clip_grad_norm_(MAX_NORM)}
        )
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.note_parameters()
        run.note("moments", moments(run))


def clip_exactly(model: nn.Module) -> torch.Tensor:
    """Clip by a norm that is rounded once."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.tensor(math.sqrt(math.fsum(x * x for grad in grads for x in grad.reshape(-1).tolist())))
    torch._foreach_mul_(grads, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
    return norm


def moments(run: Run) -> dict[str, torch.Tensor]:
    if run.sharded is not None:
        return {f"{name} {key}": value for name, key, value in whole_moments(run.sharded, run.optimizer)}
    states = {name: run.optimizer.state.get(param, {}) for name, param in run.model.named_parameters()}
    return {f"{name} {key}": state[key] for name, state in states.items() for key in state if key != "step"}


def low() -> nn.Module:
    return MODEL_CASES["transformer"].build().bfloat16()


def job(
    case: ModelName | ModelCase = "transformer",
    strategy: int = 3,
    policy: MixedPrecisionPolicy | None = None,
    auto_sync: bool = True,
    outer: int = 0,
    **options: Any,
) -> Job:
    """What is trained, and all that must not change a bit."""
    case = MODEL_CASES[case] if isinstance(case, str) else case
    setting = Setting(strategy, outer_strategy=outer, per_token=True)
    setting = replace(setting, options=(("deterministic", "world"), *options.items()))
    if policy is not None:
        setting = replace(setting, policy=policy)
    return Scenario(partial(train, auto_sync=auto_sync), case, adamw), setting


def arranged(jobs: Sequence[Job], arrangement: Arrangement, **fields: Any) -> list[Job]:
    return [(scenario, replace(setting, arrangement=arrangement, **fields)) for scenario, setting in jobs]


def in_one_process(scenario: Scenario) -> Recording:
    """As anyone would train without ranks."""
    return reference(Scenario(train, scenario.case, adamw))


def check(
    run_ranks: RunRanks, num_ranks: int, jobs: Sequence[Job], expected: Sequence[Recording] | None = None
) -> None:
    """Assert that each job has the bits of one process, or those expected, on all ranks."""
    wanted = expected or [in_one_process(scenario) for scenario, _ in jobs]
    for each, recording, *outcomes in zip(jobs, wanted, *run_ranks(num_ranks, run_sharded, jobs), strict=True):
        try:
            assert_bits(outcomes, recording)
        except AssertionError as error:
            raise AssertionError(f"{each} on {num_ranks} ranks: {error}") from None


JOBS = [
    job(),
    job("unused", strategy=2, auto_sync=False),
    job("odd_shapes", fsdp_unit_modules=()),
    job("scalars", strategy=1, auto_sync=False),
    job("tied", strategy=0, auto_sync=False),
]


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_have_the_bits_of_one_process(run_ranks: RunRanks, num_ranks: int) -> None:
    check(run_ranks, num_ranks, JOBS)


LOW_CASE = replace(MODEL_CASES["transformer"], build=low)
LOW = [
    job(LOW_CASE, policy=MixedPrecisionPolicy(FP32, FP32, BF16)),
    job(LOW_CASE, policy=MixedPrecisionPolicy(FP32, FP32, FP32), auto_sync=False),
    job(LOW_CASE, policy=MixedPrecisionPolicy(None, BF16, BF16), strategy=2),
]


@pytest.mark.full
def test_low_precision_has_the_bits_of_one_rank(run_ranks: RunRanks) -> None:
    check(run_ranks, 3, LOW, run_ranks(1, run_sharded, LOW)[0])


HYBRID = [
    job(outer=1),
    job("unused", strategy=2, auto_sync=False),
    job("odd_shapes", strategy=1, outer=1, auto_sync=False),
    job("scalars", outer=1, auto_sync=False),
    job("odd_shapes", strategy=0),
    job("odd_shapes", outer=1, fsdp_unit_modules=(), report_nan_in_param_grad=True),
]


@pytest.mark.full(short=["(2, 2)"])
@pytest.mark.parametrize("mesh", [(3, 1), (2, 2)], ids=str)
def test_hybrid_meshes_have_the_bits_of_one_process(run_ranks: RunRanks, mesh: tuple[int, int]) -> None:
    """With HSDP and HFSDP."""
    check(run_ranks, mesh[0] * mesh[1], arranged(HYBRID, hybrid(*mesh)))


def save_after_a_step(folder: str) -> None:
    run = Run(*job(strategy=2))
    train(run, last=1)
    run.save(folder)


def go_on(folder: str, strategy: int) -> Recording:
    run = Run(*job(strategy=strategy))
    run.load(folder)
    train(run, first=1)
    return outcome_of(run)


@pytest.mark.full(short=["(2, 3)"])
@pytest.mark.parametrize("others", [(2, 3), (4, 0)], ids=str)
def test_a_run_goes_on_with_other_ranks_and_another_strategy(
    run_ranks: RunRanks, tmp_path: Path, others: tuple[int, int]
) -> None:
    num_ranks, strategy = others
    run_ranks(3, save_after_a_step, str(tmp_path))
    whole = in_one_process(JOBS[0][0])
    later = Recording(whole.losses[MICROBATCHES:], whole.notes[len(whole.notes) // STEPS :])
    assert_bits(run_ranks(num_ranks, go_on, str(tmp_path), strategy), later)


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


def test_the_norm_has_the_dtype_that_ranks_without_elements_know() -> None:
    assert exact_norm({(): [torch.zeros(0, dtype=torch.float64)]}, CPU).dtype is torch.float64


# ---- refusals ------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_what_cannot_hold_is_refused() -> None:
    def told(**arguments: Any) -> str:
        module = nn.Linear(4, 4, dtype=arguments.pop("dtype", None))
        arguments = {"calculate_per_token_loss": True, "deterministic": "world", **arguments}
        return refusal(fully_shard, module, torch.optim.SGD(module.parameters(), lr=0.1), **arguments)

    assert "divides by the number of ranks" in told(calculate_per_token_loss=False)
    assert "deterministic='rank' does not exist; give \"world\"" in told(deterministic="rank")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert "tensor parallelism" in told(device_mesh=mesh, dp_shard_dim="a", tp_dim="b")
    ranks = init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))
    message = told(device_mesh=ranks, dp_shard_dim="a", tp_dim="b", expt_device_mesh=mesh)
    assert "which tokens an expert computes together depends on the ranks" in message
    message = told(dtype=BF16, mixed_precision_policy=MixedPrecisionPolicy(None, BF16, BF16))
    assert "SGD on main weights in bfloat16 cannot step on the CPU" in message
    model = Run(*job()).sharded
    assert model is not None
    assert "no_sync cannot be used" in refusal(model.no_sync().__enter__)
    assert "only norms 2 and infinity" in refusal(model.clip_grad_norm_, 1.0, norm_type=1.0)


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
