"""Modules inside of a sharded model may be called on their own: the model's own weights are there for them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp import fully_shard_model
from tests.support.api_net import Layer, build
from tests.support.on_ranks import assert_equal_tensors, on_ranks


class Outer(nn.Module):
    """Hides the network one level further down, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.extra = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.inner(x))


X = torch.linspace(-1, 1, 20).view(4, 5)


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_inner_modules_compute_and_train_on_their_own(strategy: int) -> None:
    torch.manual_seed(0)
    plain = Outer()
    module = copy.deepcopy(plain)
    model = fully_shard_model(module, fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(module.inner(X), plain.inner(X), atol=1e-6)
            assert torch.allclose(module.inner.head(X), plain.inner.head(X), atol=1e-6)
        assert torch.allclose(model(X), plain(X), atol=1e-6)
    for each in (plain, module):
        each.inner(X).square().sum().backward()
    gradients = model.full_gradients()
    assert gradients["extra.weight"] is None
    found = {name: grad for name, grad in gradients.items() if grad is not None}
    wanted = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    assert_equal_tensors(found, wanted, atol=1e-6)


@on_ranks(2)
def test_a_failed_call_leaves_the_model_at_rest() -> None:
    model = fully_shard_model(build(), fsdp_unit_modules=[Layer])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.module.head(torch.ones(2, 7))
    torch.testing.assert_close(model(X), build()(X))
