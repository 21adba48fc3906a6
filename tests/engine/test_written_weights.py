"""Writes into parameters between forwards, through whatever alias, and inside of them: as in one process."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError, ShardOperationError
from tests.conftest import RunRanks
from tests.support.case import STRATEGIES, Scenario, Setting, check_strategies, each_half, three_steps
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.optimizer_reference import flat, hybrid
from tests.support.zoo import FEATURES as WIDTH
from tests.support.zoo import ModelCase, make_batch, vector_loss

X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)

Params = Sequence[Any]


def build() -> nn.Module:
    with fixed_seed(0):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def local(param: Any) -> Any:
    return param.to_local() if isinstance(param, DTensor) else param


def swap(params: Params) -> None:
    params[0].data, params[2].data = params[2].data, params[0].data


def assign_a_vector(params: Params) -> None:
    numel = sum(param.numel() for param in params)
    nn.utils.vector_to_parameters(torch.linspace(-0.3, 0.3, numel), params)  # type: ignore[arg-type]


@torch.no_grad()
def write_to_local(params: Params) -> None:
    local(params[0]).mul_(-2)


@torch.inference_mode()
def write_in_inference(params: Params) -> None:
    params[2].mul_(3)


WRITES: dict[str, Callable[[Params], object]] = {
    "data": lambda params: params[0].data.add_(0.25),
    "detached": lambda params: params[2].detach().neg_(),
    "view of data": lambda params: params[0].data.view(params[0].shape).mul_(0.5),
    "list of data": lambda params: torch._foreach_mul_([param.data for param in params], -1.5),
    "local tensor": write_to_local,
    "inference mode": write_in_inference,
    "assigned data": lambda params: setattr(params[1], "data", torch.ones(WIDTH)),
    "assigned parameter": lambda params: setattr(params[1], "data", nn.Parameter(torch.ones(WIDTH) / 2)),
    "vector": assign_a_vector,
    "swapped data": swap,
    "out": lambda params: torch.add(params[0].data, 1.0, out=params[2].data),
}


def differences(dtype: torch.dtype, how: dict[str, Any]) -> list[str]:
    """Write into a sharded model and one that is not; name the writes after which outputs differ."""
    plain, found = build().to(dtype).float(), []
    model = fully_shard_model(build().to(dtype), fsdp_unit_modules=[nn.Linear], **how)
    params, expected = list(model.parameters()), list(plain.parameters())

    def differs() -> bool:
        with torch.no_grad():
            want = copy.deepcopy(plain).to(dtype)(X.to(dtype))
            return not torch.equal(model(X.to(dtype)), want)

    for name, write in {"nothing": lambda _: None, **WRITES}.items():
        for given in (params, expected):
            write(given)
        found += [name] * differs()
    kept = [[param.data for param in each] for each in (params, expected)]
    for each in (params, expected):
        for param in each:
            param.data = param.data * 0
    found += ["exchanged data"] * differs()
    for each, backup in zip((params, expected), kept, strict=True):
        for param, value in zip(each, backup, strict=True):
            param.data = value
    found += ["restored data"] * differs()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_writes_through_any_alias_are_seen_by_the_next_forward(dtype: torch.dtype) -> None:
    assert [differences(dtype, flat(strategy)) for strategy in range(4)] == [[]] * 4


@pytest.mark.full
@on_ranks(4)
def test_writes_through_any_alias_are_seen_by_the_next_forward_of_hybrids() -> None:
    hybrids = [(3, "no_shard"), (3, "optim"), (1, "no_shard")]
    assert [differences(torch.bfloat16, hybrid(*each)) for each in hybrids] == [[]] * 3


REFUSED: dict[str, Callable[[Any], object]] = {
    "data of another shape": lambda weight: setattr(weight, "data", torch.zeros(WIDTH + 1, WIDTH)),
    "data of another dtype": lambda weight: setattr(weight, "data", torch.zeros(WIDTH, WIDTH).half()),
    "other memory": lambda weight: weight.data.set_(weight * 2),
    "another shape in place": lambda weight: weight.data.resize_(WIDTH + 1, WIDTH),
    "transposed in place": lambda weight: weight.data.t_(),
}


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_what_would_change_nothing_is_refused(strategy: int) -> None:
    model = fully_shard_model(build(), zero_dp_strategy=strategy)
    inner: Any = model.module
    for name, write in REFUSED.items():
        with pytest.raises(ShardOperationError, match="shard"):
            write(inner[0].weight)
        assert torch.equal(inner[0].weight.full_tensor(), build()[0].weight), name  # type: ignore[index]
    assert inner[0].weight.data.set_(inner[0].weight.data).shape == (WIDTH, WIDTH)
    for takes_gradient in (True, False):
        inner[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=takes_gradient)
        assert "after" in refusal(model, X, error=ConfigurationError)


class Delta(nn.Module):
    """A parametrization by a change of the weight, which belongs to another module."""

    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.__dict__["delta"] = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Adapted(nn.Module):
    """Two linears, of which the second is parametrized in each forward, as peft adapts parameters of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.delta = nn.Parameter(torch.ones(WIDTH, WIDTH) / 8)
        self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        parametrize.register_parametrization(self.second, "weight", Delta(self.delta))
        output: Tensor = self.second(hidden)
        parametrize.remove_parametrizations(self.second, "weight", leave_parametrized=False)
        return output


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(), Adapted())


@each_half(STRATEGIES)
def test_a_forward_that_sets_weights_to_themselves_trains(run_ranks: RunRanks, settings: tuple[Setting, ...]) -> None:
    check_strategies(
        run_ranks, 2, Scenario(three_steps, ModelCase(adapted, make_batch, vector_loss, (Adapted,))), settings
    )
