"""Faults of the published package that were seen by running it; each is a test here, or one that is named here.

Silent wrong results:

    1  Adam state made by a fake step       optim/test_optimizer.py  test_groups_keep_order_and_options_...
    2  stale weights without overlap        below
    3  mapping outputs, unused last module  usage/test_hugging_face.py; engine/test_parity.py, model "unused"
    4  optimizer built after a forward      optim/test_optimizer.py  test_an_optimizer_may_be_built_after_a_forward
    5  parameter groups collapsed           optim/test_optimizer.py  test_groups_keep_order_and_options_...
    6  auto sync and accumulation           engine/test_parity_accumulation.py
    7  never reduced, if nobody says "last" engine/test_parity_accumulation.py
    8  ranks with different weights         engine/test_rank_disagreement.py  test_all_ranks_get_the_weights_of_rank_...
    9  step(closure) returns None           optim/test_optimizer_step.py  test_step_runs_a_closure_and_...
    10 contexts do not restore              test_wrapper.py  test_sync_and_no_sync_restore_what_was_there_before
    11 arguments dropped by fully_shard     below
    12 communication dtype never changes    engine/test_communication_precision.py
    14 loaded weights not used in compute   below

Loud ones:

    average_in_collective                   engine/test_parity.py  test_averaging_in_the_collective_gives_the_same_mean
    strategy 3 without units                engine/test_deterministic.py  test_ranks_have_the_bits_of_one_process
    a mesh without tp_dim                   every test that uses support/api_net.py
    clip_grad_norm_ on uneven shards        optim/test_parity_clipping.py
    shapes that cannot be wrapped           engine/test_parity.py, model "odd_shapes"; padding: tools/test_tools.py
    main_grads_dtype=float64                engine/test_precision_emulation.py
    a class that matches no module          test_bad_input.py  class_that_matches_nothing
    the caller's config is changed          test_wrapper.py  test_the_class_syncs_only_when_told_and_...
    requires_grad changed later             engine/test_requires_grad.py
    memory held by reference cycles         engine/test_model_lifetime.py
    unused parameters get zeros             engine/test_parity.py, model "unused"
"""

import inspect
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.api_net import Layer, batches, build, largest_difference, mesh, train, weights
from tests.support.on_ranks import on_ranks

TOLERANCE = 2e-6  # sums of 12 samples in another order, on weights of about 1


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_alone(steps: int) -> dict[str, Tensor]:
    net = build()
    train(net, sgd(net), steps)
    return weights(net)


# ---- 2: weights that were never gathered again ---------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "overlap_grad_reduce"), [(1, False), (2, True), (3, False)])
@on_ranks(2)
def test_without_overlap_every_rank_computes_with_the_weights_of_the_last_step(
    strategy: int, overlap_grad_reduce: bool
) -> None:
    net = build()
    model, optimizer = fully_shard(
        net,
        sgd(net),
        mesh(),
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=strategy,
        overlap_param_gather=False,
        overlap_grad_reduce=overlap_grad_reduce,
    )
    train(model, optimizer, 4)
    assert largest_difference(weights(model), trained_alone(4)) <= TOLERANCE


# ---- 11: arguments that are dropped --------------------------------------------------------------------------------


@on_ranks(1)
def test_the_one_call_hands_every_argument_on() -> None:
    net, values = build(), {name: object() for name in list(inspect.signature(fully_shard_model).parameters)[2:]}
    values |= {"zero_dp_strategy": 2, "zero_dp_strategy_experts": 1, "cuda_graph_mode": False}
    assert len(values) > 40
    patched = mock.patch.object(
        inspect.getmodule(fully_shard), "fully_shard_model", autospec=True, side_effect=InterruptedError
    )
    with patched as called, pytest.raises(InterruptedError):
        fully_shard(net, sgd(net), mesh(), **values)
    assert called.call_args.kwargs == values


# ---- 14: loaded, but not used --------------------------------------------------------------------------------------


def _loss(model: MegatronFSDP) -> float:
    inputs, targets = next(batches(1, 7))
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets).item()


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_a_bare_load_reaches_the_weights_that_compute_uses(strategy: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    net = build().bfloat16()
    model, optimizer = fully_shard(net, sgd(net), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    train(model, optimizer, 1)
    losses = [_loss(model)]
    saved = weights(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    train(model, optimizer, 2, first=1)
    losses.append(_loss(model))
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    losses.append(_loss(model))
    before, later, loaded = losses
    assert later != before
    assert loaded == before
    assert largest_difference(weights(model), saved) == 0.0
