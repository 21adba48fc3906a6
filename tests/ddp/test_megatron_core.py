"""`DistributedDataParallel` built and called as Megatron-Core's class is, by Megatron's training loop."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.ddp import DistributedOptimizer
from megatron_fsdp.errors import CallOrderError, ConfigurationError, ScheduleError
from tests.support.api_net import backward, batches, build, largest_difference, weights
from tests.support.on_ranks import on_ranks, refusal
from tests.test_megatron_core_client import CoreConfig

CORE = SimpleNamespace(calculate_per_token_loss=False, tensor_model_parallel_size=1, context_parallel_size=1)
"""The fields of Megatron's `TransformerConfig` that count."""


def core_model(own_class: bool = False, dtype: torch.dtype = torch.float32, **fields: Any) -> DistributedDataParallel:
    kind = DistributedDataParallelConfig if own_class else CoreConfig
    always = {"data_parallel_sharding_strategy": "optim_grads_params", "align_param_gather": True, "bucket_size": 30}
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
    return DistributedDataParallel(CORE, kind(**{**always, **overlaps, **fields}), build().to(dtype))


def adamw(model: DistributedDataParallel) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), model)


def assert_readable(model: DistributedDataParallel) -> None:
    """Gathered compute weights are the main weights."""
    full = {name: param.full_tensor() for name, param in model.module.named_parameters()}
    assert all(torch.equal(value, full[name]) for name, value in model.raw_param.items())


@pytest.mark.parametrize("own_class", [True, False])
@on_ranks(2)
def test_megatrons_loop_gives_the_weights_of_the_plain_loop(own_class: bool) -> None:
    plain, model = core_model(), core_model(own_class)
    assert model.config is CORE
    assert model.use_forward_hook
    assert not model.overlap_param_gather_with_optimizer_step
    optimizers = [adamw(plain), adamw(model)]
    model.disable_forward_pre_hook(param_sync=False)
    for step, batch in enumerate(batches(4)):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            backward(each, batch)
            optimizer.step()
        if step == 0:
            model.enable_forward_pre_hook()
        if step == 1:  # evaluation
            model.disable_forward_pre_hook()
            assert_readable(model)
            with torch.no_grad():
                assert torch.equal(model(batch[0]), plain(batch[0]))
            model.enable_forward_pre_hook()
        if step == 2:  # saving
            model.start_param_sync(force_sync=True)
            model.free_overlap_buffers()
            saved = model.state_dict_for_save_checkpoint()
            assert saved.keys() == dict(model.module.state_dict()).keys()
            assert model.state_dict_for_save_checkpoint(prefix="of.").keys() == {f"of.{name}" for name in saved}
    found, expected = weights(model), weights(plain)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@on_ranks(2)
def test_calls_in_another_order_are_refused() -> None:
    model = core_model()
    with pytest.raises(AssertionError, match=r"enable_forward_pre_hook\(\) was called twice"):
        model.enable_forward_pre_hook()
    model.disable_forward_pre_hook()
    with pytest.raises(CallOrderError, match=r"disable_forward_pre_hook\(\) was called twice"):
        model.disable_forward_pre_hook()
    with pytest.raises(AssertionError, match="needs overlap_param_gather=True"):
        core_model(overlap_param_gather=False).enable_forward_pre_hook()
    model.enable_forward_pre_hook()
    optimizer, batch = adamw(model), next(iter(batches(1)))
    backward(model, batch)
    optimizer.step()
    model.start_param_sync()
    with pytest.raises(AssertionError, match="while weights are being gathered"):
        model.reset_param_sync_dispatch_state()
    output = model(batch[0])
    model.offload_grad_buffers()
    with pytest.raises(ScheduleError, match="a backward began after offload_grad_buffers"):
        output.sum().backward()


@on_ranks(2)
def test_the_next_forward_gathers_what_a_replay_has_changed_unseen() -> None:
    model = core_model(dtype=torch.bfloat16)
    inputs = next(iter(batches(1)))[0].bfloat16()
    with torch.no_grad():
        before = model(inputs)
        for param in model.parameters():
            param._local_tensor.data.mul_(2.0)  # type: ignore[attr-defined]  # raises no version counter
        assert torch.equal(model(inputs), before)
        model.reset_param_sync_dispatch_state()
        doubled = {name: param.bfloat16() for name, param in model.full_parameters().items()}
        assert torch.equal(model(inputs), torch.func.functional_call(build().bfloat16(), doubled, inputs))


def gradient_bytes(model: DistributedDataParallel) -> int:
    return sum(gradients.main.held_bytes for _, gradients in model._engine.groups_with_gradients())


@on_ranks(2)
def test_gradients_give_up_their_memory_for_inference_and_come_back_as_none() -> None:
    model, plain = core_model(), core_model()
    optimizers = adamw(model), adamw(plain)
    for batch in batches(2):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            backward(each, batch)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, batch)
        held = gradient_bytes(model)
        model.offload_grad_buffers()
        assert (held, gradient_bytes(model)) == (model.memory().main_grad_bytes, 0)
        with torch.no_grad():
            model(batch[0])
        model.restore_grad_buffers()
        assert all(param.grad is None for param in model.parameters())
    assert largest_difference(weights(model), weights(plain)) == 0
    units = core_model(use_megatron_fsdp=True)
    assert "use_megatron_fsdp=True does not have" in refusal(units.offload_grad_buffers, error=ConfigurationError)


@on_ranks(2)
def test_gathered_weights_give_up_their_memory() -> None:
    model, batch = core_model(use_megatron_fsdp=True, bucket_size=None), next(iter(batches(1)))
    expected = model(batch[0])
    assert model.memory().gathered_bytes > 0
    model.free_overlap_buffers()
    assert model.memory().gathered_bytes == 0
    assert torch.equal(model(batch[0]), expected)


@on_ranks(4)
def test_groups_of_megatron_make_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = SimpleNamespace(dp_cp=mesh.get_group("dp"), tp=mesh.get_group("tp"), pp=None)
    config = CoreConfig(use_distributed_optimizer=True, bucket_size=10)
    core = SimpleNamespace(tensor_model_parallel_size=2, calculate_per_token_loss=True)
    message = refusal(DistributedDataParallel, core, config, build(), error=ConfigurationError)
    assert "config has tensor_model_parallel_size=2" in message
    model = DistributedDataParallel(
        config=core, ddp_config=config, module=build(), disable_bucketing=True, pg_collection=groups
    )
    assert model.calculate_per_token_loss
    assert model.bucket_size is None
    index = model.get_distributed_index()
    assert dist.get_process_group_ranks(index.fsdp_group) == dist.get_process_group_ranks(groups.dp_cp)
    assert index.get_submesh("tp").mesh.tolist() == dist.get_process_group_ranks(groups.tp)
    experts = build()
    experts.head.weight.allreduce = False  # type: ignore[assignment]
    form = (core, config, experts, False, groups)
    assert "no expt_dp" in refusal(DistributedDataParallel, *form, error=ConfigurationError)
