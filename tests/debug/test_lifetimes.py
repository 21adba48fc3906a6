"""With lifetimes checked, and with delays at random places, every bit of the results stays the same."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.comm.lanes import Moment
from megatron_fsdp.ddp.distributed_optimizer import DistributedOptimizer
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import ScheduleError
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of
from tests.support.case import Recording, Run, Scenario, Setting, outcome_of
from tests.support.delays import DelayObserver, inject_delays
from tests.support.on_ranks import engine_of, fixed_seed, on_ranks
from tests.support.zoo import (
    MODEL_CASES,
    TOWER_FEATURES,
    Failing,
    FailingModel,
    Floor,
    ModelName,
    PlannedError,
    Recomputed,
    Tower,
    failing_at,
    tower_loss,
    vector_case,
)

UP_TO_S = 0.001
_BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def steps(run: Run) -> None:
    """Two steps of one microbatch and one of three."""
    run.train(0, 1)
    with run.no_sync():
        run.backward(2, 3)
    run.train(4)


def checked(run: Run) -> None:
    assert run.sharded is not None
    run.sharded.check_lifetimes()
    steps(run)


def delayed(run: Run, seed: int) -> None:
    assert run.sharded is not None
    run.sharded.check_lifetimes()
    with inject_delays(run.sharded, seed, UP_TO_S) as delays:
        steps(run)
    assert delays.count > 20


def outcomes(name: ModelName | None, setting: Setting, seeds: tuple[int, ...]) -> list[Recording]:
    """The same run: alone, checked, and checked with the delays of each seed."""
    case = vector_case(partial(Recomputed, "pairs", False)) if name is None else MODEL_CASES[name]
    found = []
    scripts: list[Callable[[Run], None]] = [steps, checked, *(partial(delayed, seed=seed) for seed in seeds)]
    for script in scripts:
        run = Run(Scenario(script, case, adam), setting)
        script(run)
        found.append(outcome_of(run))
    return found


_HYBRID = {"outer": 2, "inner": 2}


def hybrid_outcomes(strategy: int, outer_strategy: int, seeds: tuple[int, ...]) -> list[Recording]:
    mesh = mesh_of((2, 2), ("outer", "inner"))
    group = mesh["outer", "inner"]._flatten("outer_inner_of_lifetimes").get_group()
    options = (
        ("device_mesh", mesh),
        ("dp_shard_dim", "inner"),
        ("dp_outer_dim", "outer"),
        ("hybrid_fsdp_group", group),
    )
    setting = Setting(strategy, outer_strategy=outer_strategy, options=options)
    return outcomes("transformer", setting, seeds)


def _assert_same(by_rank: list[list[Recording]]) -> None:
    for alone, *others in by_rank:
        assert all(torch.isfinite(torch.tensor(alone.losses)))
        for other in others:
            assert (other.losses, other.digest) == (alone.losses, alone.digest)


_PLAIN = Setting(3)
_SETTINGS: dict[str, tuple[ModelName | None, Setting]] = {
    **{f"strategy {strategy}": ("transformer", Setting(strategy)) for strategy in range(3)},
    "slots": ("tied", _PLAIN),
    "one slot": ("partly_frozen", replace(_PLAIN, options=(("max_gathered_units", 1),))),
    "resize": ("transformer", replace(_PLAIN, options=(("weight_allocator", "resize"),))),
    "double buffer": ("transformer", replace(_PLAIN, options=(("fsdp_double_buffer", True),))),
    "max pool": ("unused", replace(_PLAIN, options=(("maxpool_double_buffer", True),))),
    "mixed precision": ("bf16_fp32_norm", replace(_PLAIN, policy=_BF16)),
    "recomputation": (None, _PLAIN),
}


@pytest.mark.full(short=["resize"])
@pytest.mark.parametrize(("name", "setting"), _SETTINGS.values(), ids=_SETTINGS.keys())
def test_two_ranks(name: ModelName | None, setting: Setting, run_ranks: RunRanks) -> None:
    _assert_same(run_ranks(2, outcomes, name, setting, (1, 7) if name == "tied" else (1,)))


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "outer_strategy"), [(3, 0), (3, 1)], ids=["HSDP", "HFSDP"])
def test_four_ranks_in_two_dimensions(strategy: int, outer_strategy: int, run_ranks: RunRanks) -> None:
    _assert_same(run_ranks(4, hybrid_outcomes, strategy, outer_strategy, (5,)))


def train_buckets(seed: int | None) -> list[Tensor]:
    """Losses and weights of three steps of the bucketed wrapper; checked and delayed where there is a seed."""
    with fixed_seed(0):
        module = Tower()
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=2000
    )
    model = DistributedDataParallel(config, module)
    optimizer = DistributedOptimizer(adam(model), model)
    if seed is not None:
        model.check_lifetimes()
    found = []
    for step in range(3):
        x = torch.linspace(-1, 1 + step + dist.get_rank(), 4 * TOWER_FEATURES).view(4, TOWER_FEATURES)
        with contextlib.nullcontext() if seed is None else inject_delays(model, seed + step, UP_TO_S):
            loss = tower_loss(model, x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *model.full_parameters().values()]
    return found


@on_ranks(2)
def test_buckets() -> None:
    alone, disturbed = [train_buckets(None), train_buckets(3)]
    assert len(alone) == 3 * (1 + 18)
    assert all(map(torch.equal, alone, disturbed))


def fail_and_go_on(is_checked: bool, point: str) -> list[Tensor]:
    """Weights after a step, a pass that fails at a point on every rank, a reset, and two more steps."""
    with fixed_seed(0):
        module = FailingModel()
    model, optimizer = fully_shard(module, adam(module), fsdp_unit_modules=[Failing])
    if is_checked:
        model.check_lifetimes()
    found = []
    for fails in (False, True, False, False):
        x = torch.ones(3, module.first.in_features)
        if fails:
            with pytest.raises(PlannedError), failing_at(module, 1, point):
                model(x).square().mean().backward()
            model.reset()
            optimizer.zero_grad()
            continue
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *model.full_parameters().values()]
    return found


@on_ranks(2)
def test_exceptions_and_resets() -> None:
    by_point = [
        (fail_and_go_on(False, point), fail_and_go_on(True, point)) for point in ("forward", "backward of the output")
    ]
    for alone, disturbed in by_point:
        assert len(alone) == 3 * (1 + len(list(FailingModel().parameters())))
        assert all(map(torch.equal, alone, disturbed))


def _inside(model: Any, x: Tensor) -> None:
    handle = model.module.floors[2].register_forward_hook(lambda *_: model.check_lifetimes())
    try:
        tower_loss(model, x)
    finally:
        handle.remove()


@on_ranks(2)
def test_off_until_asked_for_and_then_once() -> None:
    with fixed_seed(0):
        module = Tower()
    model, optimizer = fully_shard(module, adam(module), fsdp_unit_modules=[Floor])
    told: list[Any] = [not bool(engine_of(model).observers)]
    x = torch.ones(2, TOWER_FEATURES)
    loss = tower_loss(model, x)
    with pytest.raises(ScheduleError, match="call it between steps"):
        _inside(model, x)
    model.reset()
    tower_loss(model, x).backward()
    model.check_lifetimes()
    first = engine_of(model).observers.watching
    model.check_lifetimes()
    told.append(engine_of(model).observers.watching == first)
    tower_loss(model, x).backward()
    optimizer.step()
    assert [*told, bool(torch.isfinite(loss))] == [True, True, True]


def on_device(is_disturbed: bool) -> list[Tensor]:
    """Losses and weights of three steps on this rank's GPU: alone, or checked and delayed."""
    with fixed_seed(0):
        module = Tower().cuda()
    model, optimizer = fully_shard(module, adam(module), fsdp_unit_modules=[Floor])
    found = []
    with contextlib.ExitStack() as stack:
        if is_disturbed:
            model.check_lifetimes()
            stack.enter_context(inject_delays(model, 1, UP_TO_S))
        for _ in range(3):
            loss = tower_loss(model, torch.ones(2, TOWER_FEATURES, device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.detach().cpu(), *(weight.cpu() for weight in model.full_parameters().values())]
    return found


@pytest.mark.gpu
def test_gpus(run_ranks: RunRanks) -> None:
    count = min(4, torch.cuda.device_count())
    both = (run_ranks(count, on_device, is_disturbed, device_type="cuda") for is_disturbed in (False, True))
    for alone, disturbed in zip(*both, strict=True):
        assert all(map(torch.equal, alone, disturbed))


def _draws(seed: int) -> tuple[list[float], list[float]]:
    """The delays of a phase that computes and of a launch, drawn on this rank."""
    drawn: list[float] = []

    def note(_device: torch.device, host_s: float, device_s: float) -> None:
        drawn.append(host_s + device_s)

    observer = DelayObserver(seed, 1.0, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.delays.hold_up", note)
        for phase in Phase:
            observer.begins(phase, 0)
        computing = list(drawn)
        for moment in Moment:
            observer.communicates(0, moment, "gather", None)
    assert observer.count == len(drawn)
    return computing, drawn[len(computing) :]


def test_every_rank_delays_compute_and_communication_in_its_own_way(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, _draws, 5)
    assert [len(part) for part in first] == [3, 3]
    assert first != second
    assert second == run_ranks(2, _draws, 6)[0]
