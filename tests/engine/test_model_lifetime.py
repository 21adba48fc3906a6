"""Deleting a model frees it at once: no cycle keeps it, its buffers or its hooks waiting for the garbage collector."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ScheduleError
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, mesh, train
from tests.support.seams import engine_of
from tests.support.settling import settled


def wrap(strategy: int, **arguments: Any) -> MegatronFSDP:
    return fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **arguments)


def references(model: MegatronFSDP) -> dict[str, weakref.ref[Any]]:
    """Weak references to everything large or hooked that belongs to a model."""
    found: dict[str, weakref.ref[Any]] = {
        "wrapper": weakref.ref(model),
        "module": weakref.ref(model.module),
        "engine": weakref.ref(engine_of(model)),
        "executor": weakref.ref(engine_of(model).executor),
        "buffer": weakref.ref(next(model.buffers())),
    }
    for number, group in enumerate(model.parameter_groups()):
        assert group.gradients is not None
        found[f"main weights {number}"] = weakref.ref(group.weights.main.local)
        found[f"compute weights {number}"] = weakref.ref(group.weights.compute.local)
        found[f"main gradients {number}"] = weakref.ref(group.gradients.main.local)
        found[f"full {number}"] = weakref.ref(group.full[0])
        found[f"sharded {number}"] = weakref.ref(group.sharded[0])
    for number, unit in enumerate(engine_of(model).units):
        found[f"gathered {number}"] = weakref.ref(unit._gathered[0])
    return found


def alive_after_deletion(strategy: int, keep_optimizer: bool) -> set[str]:
    """What of a trained model is still alive after `del`, with the garbage collector off."""
    model = wrap(strategy, report_nan_in_param_grad=True)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))
    train(model, optimizer, 2)
    with model.no_sync():
        backward(model, next(batches(1)))
    model.clip_grad_norm_(1.0)
    model.state_dict()
    optimizer.zero_grad()
    watched = references(model)
    gc.collect()
    gc.disable()
    try:
        if keep_optimizer:
            del model
        else:
            del model, optimizer
        return settled(lambda: alive(watched), lambda kinds: kinds <= ({"sharded"} if keep_optimizer else set()))
    finally:
        gc.enable()


def alive(watched: dict[str, weakref.ref[Any]]) -> set[str]:
    """What is alive, without the numbers."""
    return {name.rstrip(" 0123456789") for name, reference in watched.items() if reference() is not None}


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_deleting_model_and_optimizer_frees_everything_at_once(strategy: int, run_ranks: RunRanks) -> None:
    assert run_ranks(2, alive_after_deletion, strategy, False) == [set(), set()]


@pytest.mark.parametrize("strategy", [0, 3])
def test_an_optimizer_keeps_its_parameters_alive_and_nothing_else(strategy: int, run_ranks: RunRanks) -> None:
    for kinds in run_ranks(2, alive_after_deletion, strategy, True):
        assert kinds <= {"sharded"}


def back_reference() -> dict[str, Any]:
    model = wrap(3)
    param = next(model.parameters())
    found: dict[str, Any] = {"before": param._megatron_fsdp_model.data_parallel_sharding_strategy}  # type: ignore[attr-defined]
    gc.disable()
    try:
        del model
        try:
            found["after"] = param._megatron_fsdp_model.data_parallel_sharding_strategy  # type: ignore[attr-defined]
        except ReferenceError:
            found["after"] = "gone"
    finally:
        gc.enable()
    return found


def test_parameters_refer_to_their_model_weakly(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, back_reference):
        assert found == {"before": "optim_grads_params", "after": "gone"}


def use_the_inner_module_alone() -> str:
    inner = wrap(3).module
    try:
        inner(torch.ones(2, 5))
    except ScheduleError as error:
        return str(error)
    return "ran"


def test_the_inner_module_says_that_its_wrapper_is_gone(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, use_the_inner_module_alone):
        assert "the MegatronFSDP object that owned its parameters has been deleted; keep the object" in message


def failed_wrap() -> tuple[bool, list[str]]:
    """A model that is refused is left as it was: same parameters, no hooks, and free when deleted."""
    model = build()
    before = [id(param) for param in model.parameters()]
    refused = False
    try:
        fully_shard_model(model, mesh(), fsdp_unit_modules=[nn.Conv2d])
    except ValueError:
        refused = True
    changed = [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._state_dict_hooks
    ]
    if [id(param) for param in model.parameters()] != before:
        changed.append("parameters")
    return refused, changed


def test_a_refused_model_is_left_as_it_was(run_ranks: RunRanks) -> None:
    assert run_ranks(2, failed_wrap) == [(True, []), (True, [])]


def wrap_train_delete(count: int) -> list[int]:
    """Number of live tensors after each of several models in one process."""
    counts: list[int] = []
    for _ in range(count):
        model = wrap(3)
        train(model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)), 1)
        del model
        gc.collect()
        most = counts[-1] if len(counts) > 1 else None
        counts.append(settled(live_tensors, lambda found, most=most: most is None or found <= most))
    return counts


def live_tensors() -> int:
    return sum(
        issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()
    )  # proxies may have lost their object


def test_models_one_after_another_leave_nothing_behind(run_ranks: RunRanks) -> None:
    for counts in run_ranks(2, wrap_train_delete, 4, timeout_s=300.0):
        # What earlier tests left in the worker may go meanwhile; nothing may come.
        assert counts[1:] == sorted(counts[1:], reverse=True)
