"""Parameters that are frozen or thawed after wrapping train, or do not, as on one process."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.api_net import build, gradients, run_batch, summed_gradients, wrap
from tests.support.case import (
    Run,
    Scenario,
    Setting,
    adamw_above_noise,
    check_jobs,
    check_strategies,
    ddp,
    decayed_adamw,
)
from tests.support.on_ranks import assert_equal_tensors, on_ranks, refusal
from tests.support.zoo import MODEL_CASES, ModelCase, Nested, Recomputed, vector_case

Chosen = Callable[[int, str], bool]
"""(number of a parameter, its name) -> whether it is frozen."""


def nothing(_number: int, _name: str) -> bool:
    return False


def biases(_number: int, name: str) -> bool:
    """Units with some of their parameters frozen."""
    return name.endswith("bias")


def whole_units(_number: int, name: str) -> bool:
    """Units in the middle, and some of what is in none."""
    return any(part in name for part in (".0.", "norm", "first", "offset"))


def every_other(number: int, _name: str) -> bool:
    return number % 2 == 0


def freeze(run: Run, chosen: Chosen) -> None:
    for number, (name, param) in enumerate(run.parameters().items()):
        param.requires_grad_(not chosen(number, name))


def note_gradients(run: Run) -> None:
    """Of every parameter, frozen ones too."""
    shown = {name: param.grad for name, param in run.parameters().items()}
    if run.sharded is not None:
        shown = {**dict.fromkeys(shown), **run.sharded.full_gradients()}
    run.note("gradients", run.arrangement.whole(shown))


def step(run: Run, *, clears: bool = True) -> None:
    if run.sharded is not None:
        run.sharded.finish_grad_sync()
    note_gradients(run)
    run.optimizer.step()
    run.note_parameters()
    if clears:
        run.optimizer.zero_grad()


# ---- one process -----------------------------------------------------------------------------------------------------


def freeze_and_thaw(run: Run) -> None:
    """Another choice for every step, some of them again."""
    for index, chosen in enumerate((nothing, biases, nothing, whole_units, every_other, whole_units, nothing)):
        freeze(run, chosen)
        if not all(param.requires_grad for param in run.parameters().values()):
            with torch.no_grad():
                run.loss(50 + index)
        run.loss(index).backward()
        step(run)


def begin_frozen(run: Run) -> None:
    """Frozen before the first backward: nobody knows yet who is used."""
    for index, chosen in enumerate((whole_units, nothing, nothing)):
        freeze(run, chosen)
        run.loss(index).backward()
        step(run)


def keep_gradients(run: Run) -> None:
    """A gradient that was there when its parameter was frozen stays there, and the optimizer takes it."""
    for index, chosen in enumerate((nothing, every_other, nothing, biases)):
        freeze(run, chosen)
        run.loss(index).backward()
        step(run, clears=index == 2)


def change_between_microbatches(run: Run) -> None:
    """What came before the change counts: frozen in between, a parameter has the gradient of the first microbatch."""
    for index, (first, second) in enumerate(((nothing, biases), (whole_units, nothing), (biases, whole_units))):
        freeze(run, first)
        with run.no_sync():
            run.loss(2 * index).backward()
        freeze(run, second)
        run.loss(2 * index + 1).backward()
        step(run)


def change_before_backward(run: Run) -> None:
    """Frozen after the forward: no gradient. Thawed after it: no gradient either."""
    for index, chosen in enumerate((biases, every_other, nothing)):
        loss = run.loss(index)
        freeze(run, chosen)
        loss.backward()
        step(run)


CASES: dict[str, ModelCase] = {
    "transformer": MODEL_CASES["transformer"],
    "tied": MODEL_CASES["tied"],
    "scalars": MODEL_CASES["scalars"],
    "nested": vector_case(Nested),
    "recomputed": vector_case(partial(Recomputed, "units", reentrant=False)),
    "recomputed inside": vector_case(partial(Recomputed, "inside", reentrant=False)),
}


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [0, 3])
def test_frozen_and_thawed_parameters_equal_one_process(run_ranks: RunRanks, strategy: int) -> None:
    for number, case in enumerate(CASES.values()):
        if (number + strategy) % 2:
            check_strategies(run_ranks, 2, Scenario(freeze_and_thaw, case, decayed_adamw), [Setting(strategy)])


@pytest.mark.parametrize(  # torch itself refuses what it recomputes when that saves other tensors than forward did
    ("name", "script"),
    [
        ("transformer", change_before_backward),
        ("tied", keep_gradients),
        ("scalars", begin_frozen),
        ("nested", change_between_microbatches),
        ("recomputed", change_between_microbatches),
        ("recomputed inside", begin_frozen),
    ],
)
def test_changes_at_odd_moments_equal_one_process(
    run_ranks: RunRanks, name: str, script: Callable[[Run], None]
) -> None:
    number = list(CASES).index(name)
    settings = [Setting(number % 4), Setting((number + 1) % 4, auto_sync=False)]
    check_strategies(run_ranks, 2, Scenario(script, CASES[name], decayed_adamw), settings)


SHARDS: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 60}


BUCKETS: dict[str, dict[str, Any]] = {
    "whole": {"overlap_grad_reduce": True, "bucket_size": 60},
    "shards": {**SHARDS, "overlap_param_gather": True},
    "delayed": {"delay_wgrad_compute": True},
    "units": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads", "delay_wgrad_compute": True},
}


@pytest.mark.parametrize(
    ("script", "buckets"),
    [
        (freeze_and_thaw, "shards"),
        (keep_gradients, "whole"),
        (change_between_microbatches, "delayed"),
        (change_between_microbatches, "units"),
    ],
)
def test_buckets_follow(run_ranks: RunRanks, script: Callable[[Run], None], buckets: str) -> None:
    check_jobs(run_ranks, 2, [(Scenario(script, CASES["tied"], decayed_adamw), ddp(**BUCKETS[buckets]))])


# ---- frozen when the model was sharded -------------------------------------------------------------------------------


def thaw_what_was_frozen(run: Run) -> None:
    """The optimizer gets to know of what is thawed by a group of its own."""
    known = {id(param) for group in run.optimizer.param_groups for param in group["params"]}
    for index, chosen in enumerate((None, whole_units, nothing, biases, nothing)):
        if chosen is not None:
            freeze(run, chosen)
        added = [param for param in run.parameters().values() if param.requires_grad and id(param) not in known]
        if added:
            known.update(map(id, added))
            run.optimizer.add_param_group({"params": added})
        with run.no_sync():
            run.loss(10 + index).backward()
        run.loss(index).backward()
        step(run)


def all_but_the_head() -> nn.Module:
    model = build()
    model.layers.requires_grad_(False)
    model.gain.requires_grad_(False)
    return model


PARTLY_FROZEN = MODEL_CASES["partly_frozen"]


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [0, 3])
def test_what_was_frozen_when_sharded_trains_once_it_is_thawed(run_ranks: RunRanks, strategy: int) -> None:
    scenario = Scenario(thaw_what_was_frozen, PARTLY_FROZEN, adamw_above_noise)
    check_strategies(run_ranks, 2, scenario, [Setting(strategy)])


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_a_thawed_parameter_gets_main_weights_as_if_it_had_been_wrapped_so(strategy: int) -> None:
    """After three steps in which the layers are trained last."""
    trained = []
    for make in (all_but_the_head, build):
        net = make().to(torch.bfloat16)
        model = wrap(strategy, net)
        frozen = [*net.layers.parameters(), net.gain]
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for index in range(3):
            for param in frozen:
                param.requires_grad_(index > 0)
            run_batch(model, index)
            optimizer.step()
            optimizer.zero_grad()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        trained.append(model.full_parameters())
    assert_equal_tensors(*trained, rtol=1e-6, atol=1e-6)


# ---- a teacher, costs, errors ----------------------------------------------------------------------------------------


@pytest.mark.unmerged
@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_ranks_agree_once_when_something_changes_and_never_in_a_steady_step(strategy: int) -> None:
    model = wrap(strategy)
    agreements, reductions = [], []
    for frozen in (False, False, True, True, False, False):
        model.module.layers.requires_grad_(not frozen)
        before = model.traffic()
        with (
            patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
            patch.object(dist, "all_gather", wraps=dist.all_gather) as objects,
        ):
            run_batch(model, 0)
        model.zero_grad()
        reductions.append(model.traffic().since(before).reductions)
        by_all_reduce = 0 if strategy else reductions[-1]
        agreements.append(sums.call_count + objects.call_count - by_all_reduce)
    assert agreements == [1, 0, 1, 0, 1, 0]  # the first about which parameters are used
    assert reductions == [3, 3, 1, 1, 3, 3]


def freeze_another(model: MegatronFSDP) -> None:
    model.module.layers[dist.get_rank()].linear.bias.requires_grad_(False)


def freeze_on_one(model: MegatronFSDP) -> None:
    model.module.layers[0].requires_grad_(dist.get_rank() == 0)


FREEZES_ANOTHER = (
    "ranks differ: requires_grad of layers.0.linear.bias is False on rank 0, True on rank 1; "
    "requires_grad of layers.1.linear.bias is True on rank 0, False on rank 1; give the same on every rank"
)


@pytest.mark.parametrize(("change", "strategy"), [(freeze_another, 3), (freeze_on_one, 1)])
@on_ranks(2)
def test_ranks_that_freeze_different_parameters_stop_with_one_message(
    strategy: int, change: Callable[[MegatronFSDP], None]
) -> None:
    options = {} if change is freeze_another else {"verify_ranks": True}
    model = wrap(strategy, **options)
    run_batch(model, 0)
    model.zero_grad()
    change(model)
    if change is freeze_another:
        assert refusal(run_batch, model, 0, error=ConfigurationError) == FREEZES_ANOTHER
    else:
        assert "rank 1 follows a change of requires_grad" in refusal(run_batch, model, 0, error=ScheduleError)
    model.requires_grad_(True)
    model.reset()
    model.zero_grad()
    run_batch(model, 0)
    assert_equal_tensors(gradients(model), summed_gradients(0), atol=1e-6)
