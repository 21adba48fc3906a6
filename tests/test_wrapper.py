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
)
from tests.support.api_net import (
    Layer,
    build,
    gradients,
    largest_difference,
    mesh,
    run_batch,
    summed_gradients,
    wrap,
)
from tests.support.on_ranks import on_ranks

TOLERANCE = 1e-6


def visible(model: MegatronFSDP) -> int:
    return sum(param.grad is not None for param in model.parameters())


# ---- attributes ------------------------------------------------------------------------------------------------------


def stamp_of(param: Any) -> Any:
    """The one attribute that a sharded parameter carries."""
    return param._megatron_fsdp_model


@on_ranks(2)
def test_attributes_tell_what_was_asked_for() -> None:
    net = build()
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model = wrap(2, net, mixed_precision_policy=policy)
    raw, sharded = model.raw_param, dict(model.module.named_parameters())
    assert model.module is net
    assert str(model.device) == "cpu"
    assert model.ddp_config.data_parallel_sharding_strategy == model.data_parallel_sharding_strategy == "optim_grads"
    assert model.mp_policy is policy
    assert model.get_distributed_index() is model.dist_index
    assert isinstance(model.dist_index, FSDPDistributedIndex)
    assert dist.get_process_group_ranks(model.dist_index.get_fsdp_group()) == [0, 1]
    assert (model.model_auto_sync, model.microbatch_count, hasattr(model, "is_last_microbatch")) == (True, 0, False)
    assert (model.bucket_size, model.fsdp_unit_modules) == (40_000_000, [Layer])
    flags = model.report_nan_in_param_grad, model.calculate_per_token_loss, model.is_param_fsdp_distributed
    assert flags == (False, False, True)
    assert {name: (type(param), param.shape) for name, param in raw.items()} == {
        name: (torch.nn.Parameter, param.shape) for name, param in build().named_parameters()
    }
    assert all(model.param_to_name[param] == name for name, param in [*raw.items(), *sharded.items()])
    assert len(model.param_to_name) == 14
    assert all(stamp_of(param).module is model.module for param in model.parameters())
    assert {name: type(buffer) for name, buffer in model.named_buffers()} == {"module.offset": Tensor}


@on_ranks(2)
def test_the_class_syncs_only_when_told_and_leaves_its_config_alone() -> None:
    index = FSDPDistributedIndex(mesh(), "dp")
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim")
    before = config.to_dict()
    plain, configured = MegatronFSDP(build(), index), MegatronFSDP(build(), index, config, fsdp_unit_modules=[Layer])
    run_batch(configured, 0)
    assert visible(configured) == 0
    configured.finish_grad_sync()
    assert visible(configured) == 7
    assert largest_difference(gradients(configured), summed_gradients(0)) <= TOLERANCE
    assert (plain.data_parallel_sharding_strategy, plain.model_auto_sync) == ("optim_grads_params", False)
    assert configured.data_parallel_sharding_strategy == "optim"
    assert configured.ddp_config is config
    assert config.to_dict() == before


# ---- gradients by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_gradients_are_synced_by_hand(strategy: int) -> None:
    def check(*numbers: int) -> None:
        assert visible(model) == 7
        assert largest_difference(gradients(model), summed_gradients(*numbers)) <= TOLERANCE

    model = wrap(strategy, sync_model_each_microbatch=False)
    for number in (0, 1):
        run_batch(model, number)
        assert (model.microbatch_count, visible(model)) == (number + 1, 0)
    model.finish_grad_sync(force_all_reduce=True)
    assert model.microbatch_count == 0
    check(0, 1)
    model.finish_grad_sync()  # nothing is left to do
    check(0, 1)
    model.zero_grad()
    run_batch(model, 0)
    model.start_grad_sync("an argument that schedules pass")  # and so in the three steps that they call by themselves
    model.synchronize_gradient_reduce()
    assert visible(model) == 0
    model.attach_grad_to_optimizer_state()
    check(0)
    model = wrap(strategy, sync_model_each_microbatch=False)
    model.is_last_microbatch = False
    run_batch(model, 0)
    assert (visible(model), model.microbatch_count) == (0, 1)
    model.is_last_microbatch = True
    run_batch(model, 1)
    assert model.microbatch_count == 0
    check(0, 1)


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
