"""The methods and attributes of the wrapper that clients use, each by what it does to values."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
)
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh
from tests.support.on_ranks import on_ranks

TOLERANCE = 1e-6


def wrap(strategy: int, **arguments: Any) -> MegatronFSDP:
    return fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **arguments)


def summed_gradients(numbers: list[int]) -> dict[str, Tensor]:
    """Gradients of one process, summed over whole batches."""
    model = build()
    for number in numbers:
        backward(model, next(batches(1, first=number)))
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def gradients(model: MegatronFSDP) -> dict[str, Tensor]:
    return {name: grad for name, grad in model.full_gradients().items() if grad is not None}


def visible(model: MegatronFSDP) -> int:
    return sum(param.grad is not None for param in model.parameters())


def run_batch(model: MegatronFSDP, number: int) -> None:
    backward(model, next(batches(1, first=number)))


# ---- attributes ------------------------------------------------------------------------------------------------------


def stamp_of(param: Any) -> Any:
    """The one attribute that a sharded parameter carries."""
    return param._megatron_fsdp_model


@on_ranks(2)
def test_attributes_tell_what_was_asked_for() -> None:
    net = build()
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model = fully_shard_model(net, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=2, mixed_precision_policy=policy)
    raw, by_param = model.raw_param, model.param_to_name
    sharded = dict(model.module.named_parameters())
    found = {
        "module": model.module is net,
        "device": str(model.device),
        "config": model.ddp_config.data_parallel_sharding_strategy,
        "strategy": model.data_parallel_sharding_strategy,
        "policy": model.mp_policy is policy,
        "index": model.get_distributed_index() is model.dist_index
        and isinstance(model.dist_index, FSDPDistributedIndex),
        "group": dist.get_process_group_ranks(model.dist_index.get_fsdp_group()),
        "auto_sync": model.model_auto_sync,
        "microbatches": model.microbatch_count,
        "last": hasattr(model, "is_last_microbatch"),
        "bucket_size": model.bucket_size,
        "units": model.fsdp_unit_modules == [Layer],
        "flags": (model.report_nan_in_param_grad, model.calculate_per_token_loss, model.is_param_fsdp_distributed),
        "raw": {name: (type(param).__name__, tuple(param.shape)) for name, param in raw.items()},
        "names": all(by_param[param] == name for name, param in [*raw.items(), *sharded.items()]),
        "name count": len(by_param),
        "stamped": all(stamp_of(param).self_reference() is model for param in model.parameters()),
        "buffers": {name: type(buffer).__name__ for name, buffer in model.named_buffers()},
    }
    assert found == {
        "module": True,
        "device": "cpu",
        "config": "optim_grads",
        "strategy": "optim_grads",
        "policy": True,
        "index": True,
        "group": [0, 1],
        "auto_sync": True,
        "microbatches": 0,
        "last": False,
        "bucket_size": 40_000_000,
        "units": True,
        "flags": (False, False, True),
        "raw": {
            "gain": ("Parameter", (4,)),
            "layers.0.linear.weight": ("Parameter", (5, 5)),
            "layers.0.linear.bias": ("Parameter", (5,)),
            "layers.1.linear.weight": ("Parameter", (5, 5)),
            "layers.1.linear.bias": ("Parameter", (5,)),
            "head.weight": ("Parameter", (3, 5)),
            "head.bias": ("Parameter", (3,)),
        },
        "names": True,
        "name count": 14,
        "stamped": True,
        "buffers": {"module.offset": "Tensor"},
    }


@on_ranks(2)
def test_the_class_syncs_only_when_told_and_leaves_its_config_alone() -> None:
    index = FSDPDistributedIndex(mesh(), "dp")
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim")
    before = config.to_dict()
    plain, configured = MegatronFSDP(build(), index), MegatronFSDP(build(), index, config, fsdp_unit_modules=[Layer])
    run_batch(configured, 0)
    hidden = visible(configured)
    configured.finish_grad_sync()
    found = {
        "defaults": (plain.data_parallel_sharding_strategy, plain.model_auto_sync),
        "configured": (configured.data_parallel_sharding_strategy, configured.ddp_config is config),
        "config unchanged": config.to_dict() == before,
        "visible": (hidden, visible(configured)),
        "close": largest_difference(gradients(configured), summed_gradients([0])) <= TOLERANCE,
    }
    assert found == {
        "defaults": ("optim_grads_params", False),
        "configured": ("optim", True),
        "config unchanged": True,
        "visible": (0, 7),
        "close": True,
    }


# ---- gradients by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_gradients_are_synced_by_hand(strategy: int) -> None:
    model = wrap(strategy, sync_model_each_microbatch=False)
    counts, seen = [], []
    for number in (0, 1):
        run_batch(model, number)
        counts.append(model.microbatch_count)
        seen.append(visible(model))
    model.finish_grad_sync(force_all_reduce=True)
    found: dict[str, Any] = {"counts": [*counts, model.microbatch_count], "visible": [*seen, visible(model)]}
    found["finished"] = largest_difference(gradients(model), summed_gradients([0, 1]))
    model.finish_grad_sync()  # nothing is left to do
    found["again"] = largest_difference(gradients(model), summed_gradients([0, 1]))
    model.zero_grad()
    run_batch(model, 0)
    model.start_grad_sync("an argument that schedules pass")  # and so in the three steps that they call by themselves
    model.synchronize_gradient_reduce()
    hidden = visible(model)
    model.attach_grad_to_optimizer_state()
    found["in steps"] = (hidden, visible(model))
    found["stepped"] = largest_difference(gradients(model), summed_gradients([0]))
    model = wrap(strategy, sync_model_each_microbatch=False)
    model.is_last_microbatch = False
    run_batch(model, 0)
    before = (visible(model), model.microbatch_count)
    model.is_last_microbatch = True
    run_batch(model, 1)
    found["last"] = (before, (visible(model), model.microbatch_count))
    found["flagged"] = largest_difference(gradients(model), summed_gradients([0, 1]))
    assert (found["counts"], found["visible"]) == ([1, 2, 0], [0, 0, 7])
    assert (found["in steps"], found["last"]) == ((0, 7), ((0, 1), (7, 0)))
    assert max(found[key] for key in ("finished", "again", "stepped", "flagged")) <= TOLERANCE


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_gradients_are_zeroed_visible_or_not(strategy: int) -> None:
    model = wrap(strategy)
    run_batch(model, 0)
    model.zero_grad_buffer()
    assert visible(model) == 0
    run_batch(model, 1)
    assert largest_difference(gradients(model), summed_gradients([1])) <= TOLERANCE
    with model.no_sync():
        run_batch(model, 1)
    model.zero_grad_buffer()
    run_batch(model, 0)
    assert largest_difference(gradients(model), summed_gradients([0])) <= TOLERANCE


# ---- when gradients are synced ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_sync_and_no_sync_restore_what_was_there_before() -> None:
    model = wrap(3)

    def state() -> tuple[bool, Any]:
        return model.model_auto_sync, getattr(model, "is_last_microbatch", "absent")

    found = [state()]
    with model.no_sync():
        found.append(state())
        with model.sync():
            found.append(state())
        found.append(state())
    found.append(state())
    model.set_model_auto_sync(False)
    model.is_last_microbatch = True
    with model.no_sync():
        found.append(state())
    found.append(state())
    with model.sync():
        found.append(state())
    found.append(state())
    try:
        with model.no_sync():
            raise KeyError
    except KeyError:
        found.append(state())
    model.set_model_auto_sync()
    found.append(state())
    assert found == [
        (True, "absent"),
        (True, False),  # in no_sync
        (True, False),  # and in sync in it
        (True, False),
        (True, "absent"),
        (False, False),  # in no_sync
        (False, True),
        (True, True),  # in sync
        (False, True),
        (False, True),  # after an exception
        (True, True),
    ]
