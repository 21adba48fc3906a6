"""Megatron's own training schedule, experts, tensor parallelism, checkpoints across wrappers."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.conftest import RunRanks
from tests.meshes.test_expert_parallel import EXPERTS, TOP2
from tests.support.arrangements import divide_tensors, tensor_parallel
from tests.support.case import (
    DdpSetting,
    Run,
    Scenario,
    adamw_above_noise,
    check_jobs,
    ddp,
    defer_two_of_three,
    whole_moments,
)
from tests.support.on_ranks import assert_equal_tensors, engine_of, on_ranks
from tests.support.zoo import DENSE, MODEL_CASES, READING, ModelCase

SHARDS: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 60}
IN_TURN: dict[str, Any] = {**SHARDS, "overlap_param_gather": True}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"overlap_grad_reduce": True, "bucket_size": 60},
    {"use_distributed_optimizer": True},
    IN_TURN,
    {**IN_TURN, "align_param_gather": True},
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
)


# ---- Megatron's schedule ---------------------------------------------------------------------------------------------


def megatron_steps(run: Run) -> None:
    """`no_sync` for all but the last microbatch; gradients are final when `finish_grad_sync` returns."""
    model = run.sharded
    for step in range(3):
        if model is not None:
            model.zero_grad_buffer()
        run.optimizer.zero_grad()
        for microbatch in range(2):
            with run.no_sync():
                run.loss(10 * step + microbatch).backward()
        run.loss(10 * step + 2).backward()
        if model is not None:
            if step == 1:
                model.start_grad_sync()
            model.finish_grad_sync()
            if step == 2:
                model.finish_grad_sync(force_all_reduce=True)  # once more changes nothing
        run.scale(1 / 3)
        run.note_gradients()
        run.optimizer.step()
        if model is not None and step < 2:
            model.start_param_sync(force_sync=step == 1)
        run.note_parameters()


@pytest.mark.full(short=["True-2-settings1", "False-2-settings0"])
@pytest.mark.parametrize("settings", [SETTINGS[::2], SETTINGS[1::2]])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("auto", [False, True])
def test_megatrons_schedule_equals_one_process(
    run_ranks: RunRanks, num_ranks: int, auto: bool, settings: tuple[dict[str, Any], ...]
) -> None:
    scenario = Scenario(megatron_steps, MODEL_CASES["tied" if auto else "unused"])
    options = {"sync_model_each_microbatch": auto}
    check_jobs(run_ranks, num_ranks, [(scenario, ddp(options, **fields)) for fields in settings])


def defer_and_finish(run: Run) -> None:
    """Nothing is said of microbatches: every backward is deferred until `finish_grad_sync`."""
    for step in range(2):
        for microbatch in range(3):
            run.loss(10 * step + microbatch).backward()
        if run.sharded is not None:
            assert run.sharded.has_deferred_gradients
            run.sharded.start_grad_sync()
            run.sharded.finish_grad_sync()
            run.sharded.finish_grad_sync()
            assert not run.sharded.has_deferred_gradients
        run.step()
    if run.sharded is not None:
        run.sharded.broadcast_params()
        run.sharded.start_param_sync()
        run.sharded.finish_grad_sync()
    run.note_parameters("after broadcasting")
    for microbatch in range(2):
        run.loss(50 + microbatch).backward()
        if run.sharded is not None:
            run.sharded.zero_grad_buffer()
        else:
            run.optimizer.zero_grad()
    run.loss(60).backward()
    if run.sharded is not None:
        run.sharded.finish_grad_sync()
    run.step()


def test_gradients_wait_for_finish_grad_sync(run_ranks: RunRanks) -> None:
    options = {"sync_model_each_microbatch": False}
    jobs = [(Scenario(defer_and_finish, READING), ddp(options, **fields)) for fields in SETTINGS[:4]]
    instances = ddp(options, **IN_TURN, num_distributed_optimizer_instances=2)
    check_jobs(run_ranks, 2, [*jobs, (Scenario(defer_and_finish, READING), instances)])


def per_token(run: Run) -> None:
    """The loss of a rank is its part of the sum over all samples; gradients are summed without a factor."""
    for step in range(3):
        loss = run.case.loss(run.model, run.batch(step))
        run.note_loss(loss)
        (loss if run.sharded is None else loss / run.num_ranks).backward()
        run.step()


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_per_token_losses_are_summed(run_ranks: RunRanks, num_ranks: int) -> None:
    options = {"calculate_per_token_loss": True}
    jobs = [(Scenario(per_token, MODEL_CASES["odd_shapes"]), ddp(options, **fields)) for fields in SETTINGS]
    check_jobs(run_ranks, num_ranks, jobs)


# ---- other meshes ----------------------------------------------------------------------------------------------------


@pytest.mark.full(short=["True-0", "False-2"])
@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("averages", [False, True])
def test_experts_are_reduced_over_their_own_ranks(run_ranks: RunRanks, averages: bool, number: int) -> None:
    fields = {**SETTINGS[number], "average_in_collective": averages}
    check_jobs(run_ranks, 4, [(Scenario(defer_two_of_three, TOP2), ddp(arrangement=EXPERTS, **fields))])


@on_ranks(4)
def test_experts_have_buckets_of_their_own() -> None:
    run = Run(Scenario(defer_two_of_three, TOP2), ddp(arrangement=EXPERTS, **SHARDS))
    groups = run.sharded.parameter_groups()
    buckets = {(".experts." in name, group.plan.axis.num_ranks, id(group)) for group in groups for name in group.names}
    assert {bucket[:2] for bucket in buckets} == {(True, 2), (False, 4)}
    assert len(buckets) == len(groups)  # none has both


@pytest.mark.full
def test_tensor_parallel_parameters(run_ranks: RunRanks) -> None:
    arrangement = tensor_parallel(divide_tensors)
    jobs = [(Scenario(defer_two_of_three, DENSE), ddp(arrangement=arrangement, **fields)) for fields in SETTINGS]
    check_jobs(run_ranks, 4, jobs)


@on_ranks(4)
def test_a_number_of_buckets_counts_the_parts_of_tensor_parallel_ranks() -> None:
    """Each rank cuts what it holds into so many buckets, not what all tensor-parallel ranks hold together."""
    setting = ddp(arrangement=tensor_parallel(divide_tensors), num_buckets=4, overlap_grad_reduce=True)
    run = Run(Scenario(defer_two_of_three, DENSE), setting)
    assert sum(unit.is_trainable for unit in engine_of(run.sharded).units) in (3, 4)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _nothing(run: Run) -> None:
    """No script."""


def _state(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


def _whole(run: Run) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in run.sharded.iter_full_tensors()}
    for name, kind, value in whole_moments(run.sharded, run.optimizer):
        found[f"{name} {kind}"] = value
    return found


def save(case: ModelCase, setting: DdpSetting, folder: str) -> dict[str, Tensor]:
    """Train and save; returns weights and moments."""
    run = Run(Scenario(_nothing, case, adamw_above_noise), setting)
    run.train(0, 1)
    dcp.save(_state(run), checkpoint_id=folder)
    return _whole(run)


def load(case: ModelCase, setting: DdpSetting, folder: str) -> dict[str, Tensor]:
    run = Run(Scenario(_nothing, case, adamw_above_noise), setting)
    run.train(7)
    state = _state(run)
    dcp.load(state, checkpoint_id=folder)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    found = _whole(run)
    run.train(8)
    return found


@pytest.mark.full
def test_a_checkpoint_fits_every_wrapper(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Saved whole on 2 ranks, in shards on 3, as FSDP on 4; loaded by each of the others, bit for bit."""
    case = MODEL_CASES["odd_shapes"]
    places = [(2, SETTINGS[0]), (3, SETTINGS[2]), (4, SETTINGS[4])]
    places.append((4, {**SHARDS, "num_distributed_optimizer_instances": 2}))
    for number, (ranks, fields) in enumerate(places):
        folder = str(tmp_path / str(number))
        expected = run_ranks(ranks, save, case, ddp(**fields), folder)[0]
        assert sum(key.endswith("exp_avg") for key in expected) > 3
        others, other_fields = places[(number + 1) % len(places)]
        for found in run_ranks(others, load, case, ddp(**other_fields), folder):
            assert_equal_tensors(found, expected)
