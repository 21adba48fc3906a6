"""Models that reach their parameters in unusual ways train as on one process, or are refused by name."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.parity import assert_equal_tensors, fixed_seed

WIDTH = 6


class Recurrent(nn.Module):
    """Recurrent layers keep a list of their weights beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        for block in self.blocks:
            x, _ = block(x)
        return x[:, -1]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ReturnsWeight(nn.Module):
    """Hands out a view of its own weight, which is used when other units have been gathered into the same slot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), self.linear.weight.t()


class UsesReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReturnsWeight() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weights = []
        for layer in self.layers:
            x, weight = layer(x)
            weights.append(weight)
        return sum((x @ weight for weight in weights), start=x)


class Prompt(nn.Module):
    """Returns its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Prompt(), Prompt()])
        self.layers = Layers()

    def forward(self, x: Tensor) -> Tensor:
        first, second = (prompt() for prompt in self.prompts)
        return self.layers(x) @ first + x @ second


class Masked(Layers):
    """Half of the gradient of one weight is masked by a hook that was registered before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.register_hook(_mask)


def _mask(grad: Tensor) -> Tensor:
    return grad * (torch.arange(grad.numel()) % 2).view_as(grad)


def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def penalised_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on parameters, each rank on its shards; its gradient does not come through any unit."""
    local = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
    return F.mse_loss(model(x), y) + 0.1 * sum((piece**2).sum() for piece in local)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    units: tuple[type[nn.Module], ...]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = plain_loss


CASES = {
    "recurrent": Case(Recurrent, (nn.LSTM,)),
    "penalty": Case(Layers, (nn.Linear,), penalised_loss),
    "returned view": Case(UsesReturned, (ReturnsWeight,)),
    "returned parameter": Case(Prompted, (Prompt, nn.Linear)),
    "gradient hook": Case(Masked, (nn.Linear,)),
}


def _wrap(
    model: nn.Module, units: tuple[type[nn.Module], ...], strategy: int
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fully_shard(model, optimizer, fsdp_unit_modules=list(units), zero_dp_strategy=strategy)


def train(name: str, strategy: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients and weights of three steps of two microbatches, sharded and on one process."""
    case = CASES[name]
    with fixed_seed(0):
        reference = case.build()
    with fixed_seed(0):
        model, optimizer = _wrap(case.build(), case.units, strategy)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    pairs = []
    for step in range(3):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            x, y = (torch.randn(12, WIDTH, generator=generator) for _ in range(2))
            case.loss(reference, x, y).backward()
            rank, ranks = dist.get_rank(), dist.get_world_size()
            case.loss(model, x.chunk(ranks)[rank], y.chunk(ranks)[rank]).backward()
        found = {key: grad for key, grad in model.full_gradients().items() if grad is not None}
        pairs.append((found, {key: param.grad.clone() for key, param in reference.named_parameters()}))
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        pairs.append((model.full_parameters(), copy.deepcopy(dict(reference.named_parameters()))))
    return pairs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("num_ranks", "strategy"), [(2, 0), (2, 1), (2, 3), (3, 3)])
def test_trains_as_one_process(run_ranks: RunRanks, name: str, num_ranks: int, strategy: int) -> None:
    for pairs in run_ranks(num_ranks, train, name, strategy):
        for found, wanted in pairs:
            assert_equal_tensors(found, wanted, rtol=1e-5, atol=1e-6)


def mix_units(strategy: int) -> str:
    """Each rank calls another layer."""
    with fixed_seed(0):
        model, _ = _wrap(Layers(), (nn.Linear,), strategy)
    layers = model.module.layers
    del layers[2 + dist.get_rank() :]
    del layers[1 : 1 + dist.get_rank()]
    with pytest.raises(ScheduleError) as raised:
        plain_loss(model, torch.ones(2, WIDTH), torch.ones(2, WIDTH)).backward()
    return str(raised.value)


@pytest.mark.parametrize("strategy", [1, 3])
def test_ranks_that_call_different_units_are_found(run_ranks: RunRanks, strategy: int) -> None:
    first, second = run_ranks(2, mix_units, strategy)
    assert first == second
    assert first.startswith("ranks gathered or reduced different units")


def hook_after_wrapping() -> str:
    model, _ = _wrap(Layers(), (nn.Linear,), 3)
    next(model.parameters()).register_post_accumulate_grad_hook(print)
    with pytest.raises(ConfigurationError) as raised:
        model(torch.ones(2, WIDTH))
    return str(raised.value)


def hook_before_wrapping() -> str:
    model = Layers()
    model.layers[0].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ConfigurationError) as raised:
        _wrap(model, (nn.Linear,), 3)
    return str(raised.value)


def test_hooks_that_could_not_work_are_refused_by_name(run_ranks: RunRanks) -> None:
    (after,), (before,) = set(run_ranks(2, hook_after_wrapping)), set(run_ranks(2, hook_before_wrapping))
    assert after.startswith("layers.0.weight was given a post-accumulate-grad hook after")
    assert before.startswith("1 parameters have post-accumulate-grad hooks (such as layers.0.weight)")
