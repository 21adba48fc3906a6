"""Losses that units leave in attributes, modules that join after sharding, and modules that are called on their own."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.engine.hooks import ForwardGraph, _plain_attributes
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.utils import (
    get_mcore_tensor_parallel_partition_dim,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
)
from megatron_fsdp.wrap.shard_unit import refuse_torch
from tests.conftest import RunRanks
from tests.support import api_net
from tests.support.case import STRATEGIES, Scenario, Setting, check_strategies, each_half, shard, train_and_accumulate
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, on_ranks, refusal
from tests.support.zoo import FEATURES, Layer, Ordered, Penalised, SideLoss, vector_case


class DeepSideLoss(SideLoss):
    """Leaves one loss in a list of a submodule, and one in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.register_buffer("kept", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        half = 0.5 * self.penalty
        self.inner.losses = [half]
        self.kept = half * self.up.bias.sum()
        del self.penalty
        return result


class Deep(Penalised):
    """Adds up what the units left behind before it uses their results."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        side = sum(layer.inner.losses[0] + layer.kept for layer in self.layers)
        return self.last(x) + side


@each_half(STRATEGIES)
def test_losses_left_in_attributes_are_trained(run_ranks: RunRanks, settings: tuple[Setting, ...]) -> None:
    case = vector_case(partial(Deep, (0, 1, 2, 3, 4), 5, unit=DeepSideLoss))
    check_strategies(run_ranks, 2, Scenario(train_and_accumulate, case), settings)


@pytest.mark.parametrize("before", [{}, {"loss": 0.0}, {"loss": None}], ids=str)
def test_losses_in_attributes_of_layers_of_torch_are_found(before: dict[str, object]) -> None:
    layer, weight = nn.Tanh(), torch.ones(2, requires_grad=True)
    vars(layer).update(before)
    graph = ForwardGraph(nn.Sequential(layer), ())
    graph.begin()
    layer.loss = weight.square()  # type: ignore[assignment]
    (found,), has_graph = graph.end()
    assert found is layer.loss
    assert has_graph


def test_layers_of_torch_in_a_sharded_model_are_not_searched() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    refuse_torch(model)  # which marks every module
    own = [_plain_attributes(layer) for layer in model]
    assert own == [len(vars(layer)) for layer in model]


# ---- modules that come later ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_would_train_unseen_is_refused_by_name() -> None:
    for number, name, make, what in (
        (1, "", lambda _: Layer(), "layers.1 is a Layer with trainable parameters"),
        (1, "up", lambda _: nn.Linear(FEATURES, 9), "layers.1.up is a Linear with trainable parameters"),
        (2, "gain", lambda _: nn.Parameter(torch.ones(1)), "layers.2.gain is a parameter"),
        (3, "up", lambda up: nn.Sequential(up, nn.Linear(9, 9)), "layers.3.up is a Sequential with trainable"),
    ):
        model, x = fully_shard_model(Ordered(), fsdp_unit_modules=[Layer]), torch.ones(2, FEATURES)
        model(x)
        owner, name = (model.module.layers[number], name) if name else (model.module.layers, str(number))
        setattr(owner, name, make(getattr(owner, name, None)))
        message = refusal(model, x, error=ConfigurationError)
        assert what in message
        assert "put there after the model was sharded" in message


@on_ranks(2)
def test_wrappers_frozen_parts_and_modules_without_parameters_are_let_through() -> None:
    model, x = fully_shard_model(Ordered(), fsdp_unit_modules=[Layer]), torch.ones(2, FEATURES)
    before = model(x)
    module = model.module
    module.layers[0] = nn.Sequential(module.layers[0], nn.Identity())
    module.layers[1].probe = nn.Linear(3, 3).requires_grad_(False)
    module.extra = nn.Tanh()
    assert torch.equal(model(x), before)


# ---- modules inside that are called on their own ---------------------------------------------------------------------


X = torch.linspace(-1, 1, 20).view(4, 5)


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_inner_modules_compute_and_train_on_their_own(strategy: int) -> None:
    """The network is one level further down, as below adapters."""
    with fixed_seed(0):
        plain: Any = nn.Sequential(api_net.build(), nn.Linear(3, 3))
    module = copy.deepcopy(plain)
    model = fully_shard_model(module, fsdp_unit_modules=[api_net.Layer], zero_dp_strategy=strategy)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(module[0](X), plain[0](X), atol=1e-6)
            assert torch.allclose(module[0].head(X), plain[0].head(X), atol=1e-6)
        assert torch.allclose(model(X), plain(X), atol=1e-6)
    for each in (plain, module):
        each[0](X).square().sum().backward()
    assert model.full_gradients()["1.weight"] is None
    assert_equal_tensors(api_net.gradients(model), api_net.gradients(plain), atol=1e-6)


@on_ranks(2)
def test_a_failed_call_leaves_the_model_at_rest() -> None:
    model = fully_shard_model(api_net.build(), fsdp_unit_modules=[api_net.Layer])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.module.head(torch.ones(2, 7))
    torch.testing.assert_close(model(X), api_net.build()(X))


# ---- names that client frameworks import and read, and what they do --------------------------------------------------


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


@on_ranks(2)
def test_buffers_and_pipelines_do_what_they_say() -> None:
    model, _ = shard(vector_case(Ordered))
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
