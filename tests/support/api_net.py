"""A small network, its data and a training loop, for tests of the public functions; the same on every rank."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.support.on_ranks import fixed_seed

SAMPLES = 12


class Layer(nn.Module):
    """A linear layer of 5 features, which 2 ranks cannot halve, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Two layers and a head, with a buffer; 82 parameters. (samples, 5) -> (samples, 3)."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)) * self.gain.sum() / 4 + self.offset


def build(seed: int = 0) -> Net:
    with fixed_seed(seed):
        return Net()


def mesh() -> DeviceMesh:
    """All ranks in one dimension, "dp"."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def wrap(strategy: int = 3, model: nn.Module | None = None, **arguments: Any) -> MegatronFSDP:
    """Shard a network in its layers, over all ranks."""
    given = {"fsdp_unit_modules": [Layer], "zero_dp_strategy": strategy, **arguments}
    return fully_shard_model(build() if model is None else model, mesh(), **given)


def batches(count: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches of `SAMPLES` samples: inputs (12, 5) and targets (12, 3); number `first` and those after it."""
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 + index)
        yield torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


def own_part(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Forward and backward of the mean squared error; on a sharded model of this rank's rows. Returns the loss."""
    inputs, targets = map(own_part, batch) if isinstance(model, MegatronFSDP) else batch
    params = model.raw_param.values() if isinstance(model, MegatronFSDP) else model.parameters()
    loss = F.mse_loss(model(inputs.to(next(iter(params)).dtype)).float(), targets)  # in the dtype that it computes in
    loss.backward()
    return loss.item()


def run_batch(model: nn.Module, number: int) -> float:
    """Forward and backward of one of the batches."""
    return backward(model, next(batches(1, number)))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, schedule: Any = None
) -> list[Any]:
    """The plain loop over whole batches `first` and after; the rates of the first group."""
    rates = []
    for batch in batches(steps, first):
        optimizer.zero_grad()
        backward(model, batch)
        rates.append(optimizer.param_groups[0].get("lr"))
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return rates


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights by name, copied; collective on a sharded model."""
    found = model.full_parameters() if isinstance(model, MegatronFSDP) else dict(model.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name, copied, without those that are None; collective on a sharded model."""
    own = {name: param.grad for name, param in model.named_parameters()}
    found = model.full_gradients() if isinstance(model, MegatronFSDP) else own
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def summed_gradients(*numbers: int) -> dict[str, Tensor]:
    """Gradients of one process, added up over the whole batches of these numbers."""
    model = build()
    for number in numbers:
        run_batch(model, number)
    return gradients(model)


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest absolute difference of any element; infinite where the names differ or an element is NaN."""
    if left.keys() != right.keys():
        return float("inf")
    largest = [(left[name].double() - right[name].double()).abs().nan_to_num(nan=torch.inf).max() for name in left]
    return torch.stack(largest).max().item()


def message_of(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)
