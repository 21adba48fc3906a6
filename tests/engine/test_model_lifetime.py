"""Deleting a model frees it at once: no cycle keeps it, its buffers or its hooks waiting for the garbage collector."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_fsdp import MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.errors import ScheduleError
from tests.support.api_net import run_batch, train, wrap
from tests.support.case import adamw_above_noise, shard
from tests.support.counting import held_bytes
from tests.support.on_ranks import engine_of, on_ranks
from tests.support.settling import settled
from tests.support.zoo import TOWER_FEATURES, Floor, Tower, tower_loss, tower_step


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def references(model: MegatronFSDP) -> dict[str, weakref.ref[Any]]:
    """Weak references to everything large or hooked that belongs to a model."""
    things: dict[str, Any] = {
        "wrapper": model,
        "module": model.module,
        "engine": engine_of(model),
        "executor": engine_of(model).executor,
        "buffer": next(model.buffers()),
    }
    for number, group in enumerate(model.parameter_groups()):
        things[f"main weights {number}"] = group.weights.main.local
        things[f"compute weights {number}"] = group.weights.compute.local
        things[f"main gradients {number}"] = group.gradients.main.local
        things[f"full {number}"] = group.full[0]
        things[f"sharded {number}"] = group.sharded[0]
    for number, unit in enumerate(engine_of(model).units):
        things[f"gathered {number}"] = unit.gathered[0]
    return {name: weakref.ref(thing) for name, thing in things.items()}


@on_ranks(2)
def test_a_step_leaves_no_handle_of_a_collective_behind() -> None:
    model = wrap(3)
    train(model, fully_shard_optimizer(torch.optim.AdamW(model.parameters())), 2)
    assert [work for unit in engine_of(model).units for work in unit.works] == []


@pytest.mark.parametrize(("strategy", "keeps_optimizer"), [(0, False), (1, False), (3, True)])
@on_ranks(2)
def test_deleting_frees_everything_at_once_but_the_parameters_of_a_kept_optimizer(
    strategy: int, keeps_optimizer: bool
) -> None:
    model = wrap(strategy, report_nan_in_param_grad=True)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))
    train(model, optimizer, 2)
    with model.no_sync():
        run_batch(model, 0)
    model.clip_grad_norm_(1.0)
    model.state_dict()
    optimizer.zero_grad()
    watched, kept = references(model), {"sharded"} if keeps_optimizer else set()

    def alive() -> set[str]:
        return {name.rstrip(" 0123456789") for name, reference in watched.items() if reference() is not None}

    with no_garbage_collection():
        del model
        if not keeps_optimizer:
            del optimizer
        assert settled(alive, lambda kinds: kinds <= kept) <= kept


@on_ranks(2)
def test_parameters_refer_to_their_model_weakly_and_the_inner_module_misses_it() -> None:
    model = wrap()
    param, inner = next(model.parameters()), model.module
    assert param._megatron_fsdp_model.data_parallel_sharding_strategy == "optim_grads_params"
    with no_garbage_collection():
        del model
        with pytest.raises(ReferenceError):
            param._megatron_fsdp_model.data_parallel_sharding_strategy  # noqa: B018
    with pytest.raises(ScheduleError, match=r"the object that owned its parameters .* has been deleted; keep"):
        inner(torch.ones(2, 5))


CASES: dict[str, dict[str, Any]] = {
    "no_shard, late": {"zero_dp_strategy": 0, "overlap_grad_reduce": False},
    "optim_grads": {"zero_dp_strategy": 2},
    "slots": {},
    "resize": {"weight_allocator": "resize"},
    "double buffer": {"fsdp_double_buffer": True},
    "fine-grained": {"enable_fine_grained_param_gather": True},
}
X = torch.ones(2, TOWER_FEATURES)


@pytest.mark.full(short=["resize"])
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_deleting_gives_every_byte_back_without_garbage_collection(name: str) -> None:
    for is_first in (True, False):  # what torch makes once per process, at the first use of something, is not ours
        before = held_bytes()
        model, optimizer = shard(Tower((8, 8, 16, 8)), adamw_above_noise, fsdp_unit_modules=[Floor], **CASES[name])
        for _ in range(2):
            tower_step(model, optimizer, X)
        with model.no_sync():
            tower_loss(model, X).backward()
        assert held_bytes() > before
        with no_garbage_collection():
            del model, optimizer
            assert is_first or held_bytes(collect=False) == before
