"""The calls of loops that drive gathers and reductions by hand: an effect on communication, none on results."""

import pytest
import torch
from torch import Tensor

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, train, weights
from tests.support.seams import engine_of


def gathers_by_hand() -> dict[str, int]:
    """How many gathers each call starts, after a forward that left the last units in their slots."""
    model = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer])
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    counts = {}

    def count(name: str, call: object, *args: object) -> None:
        before = model.traffic()
        call(*args)  # type: ignore[operator]
        counts[name] = model.traffic().since(before).gathers

    count("gather", model.pre_backward, layers[0])
    count("gather again", model.pre_backward, layers[0])
    model.post_forward_release_module(layers[0])
    count("after release", model.pre_backward, layers[0])
    model.post_backward_release_module(layers[0])
    count("after backward release", model.pre_backward, layers[0])
    model.post_forward_release_module(model.module)  # every unit but the root
    count("root", model.pre_backward, model.module.head)
    model.post_forward_release_module(model.module.head)
    count("root again", model.pre_backward, model.module.head)
    return counts


def test_released_units_are_gathered_again_and_others_are_not(run_ranks: RunRanks) -> None:
    for counts in run_ranks(2, gathers_by_hand):
        assert counts == {
            "gather": 1,
            "gather again": 0,
            "after release": 1,
            "after backward release": 1,
            "root": 1,
            "root again": 0,
        }


def train_by_hand(by_hand: bool) -> tuple[dict[str, Tensor], int]:
    """Three steps; by hand, every unit is released after each forward and the last is reduced on demand."""
    model = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if not by_hand:
        train(model, optimizer, 3)
        return weights(model), model.traffic().gathers
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    for module in layers:
        module.register_forward_hook(lambda layer, _args, _out: model.post_forward_release_module(layer))
    layers[1].register_full_backward_hook(lambda layer, _in, _out: model.post_backward(layer))
    for batch in batches(3):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    return weights(model), model.traffic().gathers


def test_driving_by_hand_changes_traffic_and_not_results(run_ranks: RunRanks) -> None:
    for (plain, few), (driven, many) in zip(
        run_ranks(2, train_by_hand, False), run_ranks(2, train_by_hand, True), strict=True
    ):
        assert largest_difference(driven, plain) < 1e-6
        assert many > few


def param_sync(starts_only: bool, force_sync: bool) -> tuple[list[bool], int, int, dict[str, Tensor]]:
    """Which units are under way after `start_param_sync`, gathers in it and in the forward after it, and weights."""
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        fsdp_all_gather_in_start_param_sync=starts_only,
    )
    model = MegatronFSDP(build(), FSDPDistributedIndex(mesh(), "dp"), config, fsdp_unit_modules=[Layer])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 1)
    before = model.traffic()
    model.start_param_sync(force_sync=force_sync)
    under_way = [bool(unit._tickets) for unit in engine_of(model).units]
    started = model.traffic().since(before).gathers
    train(model, optimizer, 2, first=1)
    return under_way, started, model.traffic().since(before).gathers, weights(model)


@pytest.mark.parametrize(("starts_only", "force_sync"), [(True, False), (True, True), (False, False), (False, True)])
def test_start_param_sync_starts_gathers_or_finishes_them_as_the_config_says(
    run_ranks: RunRanks, starts_only: bool, force_sync: bool
) -> None:
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 3)
    for under_way, started, gathers, trained in run_ranks(2, param_sync, starts_only, force_sync):
        assert under_way == [starts_only and not force_sync] * 3
        assert started == 3
        assert gathers == 3 + 3  # those of the first step and of the second; backward finds all in their slots
        assert largest_difference(trained, weights(reference)) < 1e-6
