"""Modules inside of a sharded model may be called on their own: the model's own weights are there for them."""

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp import fully_shard_model
from tests.conftest import RunRanks
from tests.support.api_net import Layer, build


class Outer(nn.Module):
    """Hides the network one level further down, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.extra = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.inner(x))


X = torch.linspace(-1, 1, 20).view(4, 5)


def calls(strategy: int) -> list[float]:
    torch.manual_seed(0)
    plain = Outer()
    torch.manual_seed(0)
    model = fully_shard_model(Outer(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    found = []
    for _ in range(2):
        with torch.no_grad():
            found.append((model.module.inner(X) - plain.inner(X)).abs().max().item())
            found.append((model.module.inner.head(X) - plain.inner.head(X)).abs().max().item())
        found.append((model(X) - plain(X)).abs().max().item())
    for each in (plain, model.module):
        each.inner(X).square().sum().backward()
    gradients = model.full_gradients()
    assert gradients["extra.weight"] is None
    for name, param in plain.named_parameters():
        if param.grad is not None:
            grad = gradients[name]
            assert grad is not None
            found.append((grad - param.grad).abs().max().item())
    return found


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_inner_modules_compute_and_train_on_their_own(run_ranks: RunRanks, strategy: int) -> None:
    for differences in run_ranks(2, calls, strategy):
        assert max(differences) < 1e-6


def fail_inside() -> str:
    model = fully_shard_model(build(), fsdp_unit_modules=[Layer])
    with pytest.raises(RuntimeError) as raised:
        model.module.head(torch.ones(2, 7))
    torch.testing.assert_close(model(X), build()(X))
    return str(raised.value)


def test_a_failed_call_leaves_the_model_at_rest(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, fail_inside):
        assert "shapes cannot be multiplied" in message
