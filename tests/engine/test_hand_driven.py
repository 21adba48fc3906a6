"""The calls of loops that drive gathers and reductions by hand: an effect on communication, none on results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    fully_shard_optimizer,
)
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, train, weights, wrap
from tests.support.on_ranks import engine_of, on_ranks

pytestmark = pytest.mark.unmerged


def sgd(model: MegatronFSDP) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def trained_on_one_process() -> dict[str, Tensor]:
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 3)
    return weights(reference)


@on_ranks(2)
def test_released_units_are_gathered_again_and_others_are_not() -> None:
    model = wrap()
    first, head = model.module.layers[0], model.module.head

    def gathers(call: Callable[..., object], *args: object) -> int:
        before = model.traffic()
        call(*args)
        return model.traffic().since(before).gathers

    assert gathers(model.pre_backward, first) == 1
    assert gathers(model.pre_backward, first) == 0
    model.post_forward_release_module(first)
    assert gathers(model.pre_backward, first) == 1
    model.post_backward_release_module(first)
    assert gathers(model.pre_backward, first) == 1
    model.post_forward_release_module(model.module)  # every unit but the root
    assert gathers(model.pre_backward, head) == 1
    model.post_forward_release_module(head)
    assert gathers(model.pre_backward, head) == 0


@on_ranks(2)
def test_driving_by_hand_changes_traffic_and_not_results() -> None:
    """Every unit is released after each forward and the last is reduced on demand."""
    plain, driven = wrap(), wrap()
    train(plain, sgd(plain), 3)
    layers, optimizer = driven.module.layers, sgd(driven)
    for module in layers:
        module.register_forward_hook(lambda layer, _args, _out: driven.post_forward_release_module(layer))
    layers[1].register_full_backward_hook(lambda layer, _in, _out: driven.post_backward(layer))
    for batch in batches(3):
        optimizer.zero_grad()
        backward(driven, batch)
        optimizer.step()
    assert largest_difference(weights(driven), weights(plain)) < 1e-6
    assert driven.traffic().gathers > plain.traffic().gathers


@pytest.mark.parametrize("starts_only", [True, False])
@pytest.mark.parametrize("force_sync", [True, False])
@on_ranks(2)
def test_start_param_sync_starts_gathers_or_finishes_them_as_the_config_says(
    starts_only: bool, force_sync: bool
) -> None:
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        fsdp_all_gather_in_start_param_sync=starts_only,
    )
    model = MegatronFSDP(build(), FSDPDistributedIndex(mesh(), "dp"), config, fsdp_unit_modules=[Layer])
    optimizer = sgd(model)
    train(model, optimizer, 1)
    before = model.traffic()
    model.start_param_sync(force_sync=force_sync)
    assert [bool(unit.works) for unit in engine_of(model).units] == [starts_only and not force_sync] * 3
    assert model.traffic().since(before).gathers == 3
    train(model, optimizer, 2, first=1)
    # Those of the first step and of the second; backward finds all in their slots.
    assert model.traffic().since(before).gathers == 3 + 3
    assert largest_difference(weights(model), trained_on_one_process()) < 1e-6
