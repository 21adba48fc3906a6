"""With `verify_ranks`, ranks that do different things all stop with the same message, and none hangs.

A call that hangs is killed by the worker pool, and fails its test.
"""

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronFSDP,
    fsdp2,
    fully_shard_model,
)
from megatron_fsdp.comm.groups import timeout_of
from megatron_fsdp.config.engine_options import VERIFY_TIMEOUT_S, VERIFY_VARIABLE, resolve_verify_ranks
from megatron_fsdp.debug.verify_ranks import RankVerifier
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.case import FP32, Recording, Run, Scenario, Setting, assert_parity, reference, run_sharded
from tests.support.doors import in_place, one_by_one
from tests.support.on_ranks import of_ranks, on_ranks, refusal
from tests.support.settling import settled
from tests.support.zoo import FEATURES, Layer, Ordered, vector_case

_WAIT_S = 60.0
X = torch.ones(2, FEATURES)


def shard(strategy: int = 3, verify: float = _WAIT_S) -> MegatronFSDP:
    torch.manual_seed(0)
    return fully_shard_model(Ordered(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, verify_ranks=verify)


def backward(model: MegatronFSDP) -> None:
    model(X).sum().backward()


@pytest.mark.unmerged
@pytest.mark.parametrize(
    ("order", "strategy", "trains", "one", "other"),
    [
        ((0, 1, 3), 3, True, "gathers layers.2 (", "gathers layers.3 ("),
        ((0, 1, 2), 3, False, "gathers layers.3 (", "ends its forward"),
        ((0, 2, 3), 0, True, "reduces layers.1 (", "reduces layers.0 ("),  # weights are whole
        ((1, 2, 3), 0, True, "reduces layers.0 (", "reduces (root) ("),
    ],
    ids=["forward", "evaluation", "backward", "first"],
)
@on_ranks(2)
def test_a_skipped_unit_stops_every_rank_with_the_same_message(
    order: tuple[int, ...], strategy: int, trains: bool, one: str, other: str
) -> None:
    model = shard(strategy)
    model.module.order = (0, 1, 2, 3) if dist.get_rank() == 0 else order  # type: ignore[assignment]
    with torch.set_grad_enabled(trains):
        message = refusal(backward, model)
    assert f"rank 0 {one}" in message
    assert f"rank 1 {other}" in message
    assert "calls model.join(unit, hidden) instead" in message


@pytest.mark.parametrize("by", [partial(one_by_one, fsdp2.fully_shard), in_place])
@on_ranks(2)
def test_models_sharded_in_place_are_compared_where_the_environment_asks(by: Callable[..., object]) -> None:
    model = Ordered()
    model.order = (0, 1, 2, 3) if dist.get_rank() == 0 else (0, 1, 3)
    with mock.patch.dict(os.environ, {"MFSDP_VERIFY_RANKS": str(_WAIT_S)}):
        by(*model.layers, model)
        message = refusal(lambda: model(X).sum().backward())
    assert message.startswith("rank 0 gathers layers.2 (")
    assert "model.join" not in message


@on_ranks(2)
def test_the_time_limit_is_that_of_the_ranks_group() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = fully_shard_model(
        Ordered(), device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Layer], verify_ranks=True
    )
    (verifier,) = (each for each in model._engine.observers.watching if isinstance(each, RankVerifier))
    assert timeout_of(verifier._group) == timedelta(seconds=77)


@on_ranks(2)
def test_a_rank_that_fails_alone_stops_the_others() -> None:
    """They learn of it at their next gather."""
    model = shard()
    if dist.get_rank() == 1:
        model.module.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[index, union-attr]
    with pytest.raises((ZeroDivisionError, ScheduleError)) as raised:
        model(X)
    first, second = of_ranks(str(raised.value))
    assert second == "division by zero"
    assert first.startswith("rank 0 gathers layers.2 (")
    assert " while rank 1 breaks off its forward with an exception; " in first


@on_ranks(2)
def test_a_norm_that_some_ranks_do_not_take_stops_every_rank() -> None:
    model = shard()
    backward(model)
    message = refusal(lambda: model.clip_grad_norm_(1.0) if dist.get_rank() == 0 else model(X))
    assert message.startswith("rank 0 takes the norm of all gradients while rank 1 gathers ")


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("strategy", [0, 1, 3])
@on_ranks(2)
def test_a_skipped_optimizer_step_stops_every_rank(strategy: int) -> None:
    """At the next forward or backward; training goes on after `reset`."""
    model = shard(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for skips in (False, dist.get_rank() == 1):
        backward(model)
        if not skips:
            optimizer.step()
        optimizer.zero_grad()
    message = refusal(backward, model)
    assert message.startswith(
        "ranks differ in the number of optimizer steps: 1 on rank 1, 2 on rank 0, so their weights "
    )
    model.reset()
    for _ in range(2):
        backward(model)
        optimizer.step()


@on_ranks(2)
def test_a_rank_that_stays_away_is_named_after_the_time_limit() -> None:
    model = shard(verify=0.5)
    for _ in range(2 * (dist.get_rank() == 0)):
        with pytest.raises(ScheduleError, match=r"rank 1 did not come within 0.5 s while rank 0 gathers layers.2 \("):
            model.module.layers[2](X)  # type: ignore[index, operator]
        model.reset()


def train_verified(run: Run) -> None:
    """Equal ranks are never stopped: steps, deferred microbatches, evaluation in between."""
    run.train(0)
    with run.no_sync():
        run.loss(1).backward()
    with torch.no_grad():
        run.loss(2)
    run.train(3)
    run.train(4)


VERIFIED = Scenario(train_verified, vector_case(Ordered))


def run_verified(strategies: tuple[int, ...]) -> list[Recording]:
    os.environ[VERIFY_VARIABLE] = "30"
    try:
        return run_sharded([(VERIFIED, Setting(strategy)) for strategy in strategies])
    finally:
        del os.environ[VERIFY_VARIABLE]


def test_equal_ranks_are_never_stopped_and_train_as_one_process(run_ranks: RunRanks) -> None:
    for outcomes in zip(*run_ranks(2, run_verified, (0, 1, 2, 3)), strict=True):
        assert_parity(outcomes, reference(VERIFIED, 2), FP32)


@on_ranks(2)
def test_buckets_that_fill_in_another_order_on_each_rank_are_no_difference() -> None:
    """With an outer axis, where a rank that wants memory waits for what others send over it; one skips two layers."""
    order = tuple(range(8)) if dist.get_rank() == 0 else (0, 1, 2, 5, 6, 7)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        num_distributed_optimizer_instances=2,
        bucket_size=1,
        megatron_fsdp_main_params_dtype=None,
    )
    grads = []
    for verify in ("0", "20"):
        torch.manual_seed(0)
        with mock.patch.dict(os.environ, {VERIFY_VARIABLE: verify}):
            model = DistributedDataParallel(config, Ordered(order, 8))
        for _ in range(3):
            model.zero_grad()
            backward(model)
            model.finish_grad_sync()
        grads.append(dict(model.full_gradients()))
    plain, verified = grads
    assert plain.keys() == verified.keys()
    assert all(torch.equal(verified[name], plain[name]) for name in plain)


# ---- the switch ----------------------------------------------------------------------------------------------------


def test_argument_goes_before_environment_and_nonsense_is_refused() -> None:
    on = {VERIFY_VARIABLE: "1"}
    assert resolve_verify_ranks(None, {}) == 0.0
    assert resolve_verify_ranks(None, {VERIFY_VARIABLE: "0"}) == 0.0
    assert resolve_verify_ranks(None, on) == VERIFY_TIMEOUT_S
    assert resolve_verify_ranks(None, {VERIFY_VARIABLE: "12.5"}) == 12.5
    assert resolve_verify_ranks(False, on) == 0.0
    assert resolve_verify_ranks(True, {}) == VERIFY_TIMEOUT_S
    assert resolve_verify_ranks(7, on) == 7.0
    for argument, variable in ((None, "yes"), (-1.0, ""), (0, "1"), (float("inf"), "")):
        with pytest.raises(ConfigurationError, match="neither a switch nor a time; give 1, 0 or seconds to wait"):
            resolve_verify_ranks(argument, {VERIFY_VARIABLE: variable})


@on_ranks(2)
def test_ranks_have_to_agree_on_the_switch() -> None:
    message = refusal(fully_shard_model, Ordered(), fsdp_unit_modules=[Layer], verify_ranks=dist.get_rank() == 1)
    assert message == "ranks differ: verify_ranks_s is 0.0 on rank 0, 300.0 on rank 1; give the same on every rank"


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_ranks(2)
def test_nothing_is_left_of_the_verifier_of_a_deleted_model() -> None:
    """Counted after each of six models that trained a step and were deleted."""
    counts: list[int] = []
    for number in range(6):
        model = shard(verify=True)
        backward(model)
        del model
        gc.collect()
        dist.barrier()  # ends of connections that the other rank closes
        most = counts[1] if number > 1 else None
        counts.append(settled(open_files, lambda found, most=most: most is None or found <= most))
    assert max(counts[2:]) <= counts[1], counts
