"""Names that client frameworks import and read, and what they do."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_model
from megatron_fsdp.utils import (
    find_megatron_fsdp,
    get_mcore_tensor_parallel_partition_dim,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
)
from tests.support.on_ranks import on_ranks
from tests.support.zoo import FEATURES, Layer, Ordered


@pytest.mark.parametrize(
    ("marks", "dim"),
    [
        ({}, None),
        ({"_tensor_parallel_mode": "column"}, 0),
        ({"_tensor_parallel_mode": "row"}, 1),
        ({"_tensor_parallel_mode": "replicated"}, None),
        ({"tensor_model_parallel": True, "partition_dim": 1}, 1),
        ({"tensor_model_parallel": True, "partition_dim": -1}, None),
        ({"tensor_model_parallel": False, "partition_dim": 1}, None),
        ({"_tensor_parallel_mode": "row", "tensor_model_parallel": True, "partition_dim": 0}, 1),
    ],
)
def test_tensor_parallel_marks_are_read(marks: dict[str, object], dim: int | None) -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    vars(param).update(SimpleNamespace(**marks).__dict__)
    assert get_mcore_tensor_parallel_partition_dim(param) == dim
    split = marks.get("tensor_model_parallel", False) or dim is not None
    assert is_mcore_tensor_model_parallel(param) == split
    assert is_mcore_tensor_parallel_duplicated(param) != split


class Box(nn.Module):
    """A wrapper of a client."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _model() -> MegatronFSDP:
    torch.manual_seed(0)
    return fully_shard_model(Ordered(), fsdp_unit_modules=[Layer])


@on_ranks(2)
def test_the_wrapper_is_found_inside_others() -> None:
    model = _model()
    assert find_megatron_fsdp(model) is model
    assert find_megatron_fsdp(Box(Box(model))) is model
    assert find_megatron_fsdp(Box(nn.Linear(1, 1))) is None
    assert find_megatron_fsdp(None) is None


@on_ranks(2)
def test_buffers_and_pipelines_do_what_they_say() -> None:
    model = _model()
    layer = list(model.module.layers[0].parameters())  # type: ignore[index, union-attr]
    buffer, gathers, reductions = model.param_and_grad_buffer, model.all_gather_pipeline, model.grad_reduce_pipeline
    before = model.traffic()
    gathers.all_gather_params(layer)
    gathers.wait_params(layer)
    assert model.traffic().since(before).gathers == 1
    gathers.release_params(layer)
    gathers.wait_params(layer)
    assert model.traffic().since(before).gathers == 2
    with model.no_sync():
        model(torch.full((2, FEATURES), 1.0 + dist.get_rank())).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    reductions.wait_for_previous_grad_reduce()
    buffer.update_main_grads()
    grads = {name: g.clone() for name, g in model.full_gradients().items() if g is not None}
    assert len(grads) == 20
    buffer.scale_gradients(0.5)
    assert all(torch.equal(g * 0.5, model.full_gradients()[name]) for name, g in grads.items())
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    old = model.raw_param["first.weight"].clone()
    buffer.copy_main_weights_to_model_weights()
    gathers.wait_params([next(model.parameters())])
    torch.testing.assert_close(model.raw_param["first.weight"], old + 1.0)
    assert {name for name, _ in buffer.optimizer_named_parameters} == dict(model.module.named_parameters()).keys()
    assert buffer.parameter_groups == model.parameter_groups()
    buffer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
