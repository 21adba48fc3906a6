"""A small model of layers, sharded in several ways, for tests of gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_fsdp import fully_shard_model
from tests.support.arrangements import mesh_of
from tests.support.on_ranks import fixed_seed

SAMPLES = 8


class Layer(nn.Module):
    """A norm that tensor-parallel plans leave whole, and a pair of weights that they cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


def make_model() -> nn.Sequential:
    with fixed_seed(0):
        return nn.Sequential(*(Layer() for _ in range(4)))


def make_inputs() -> Tensor:
    with fixed_seed(1):
        return torch.randn(SAMPLES, 8)


def all_ranks() -> DeviceMesh:
    return mesh_of((dist.get_world_size(),), ("dp",))


def two_by_two(first: str, second: str) -> DeviceMesh:
    return mesh_of((2, 2), (first, second))


def fsdp2() -> nn.Module:
    model, mesh = make_model(), all_ranks()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_by_engine(model: nn.Module, mesh: DeviceMesh, **arguments: Any) -> nn.Module:
    sharded = fully_shard_model(model, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Layer], **arguments)
    assert isinstance(sharded, nn.Module)
    return sharded


def engine() -> nn.Module:
    return shard_by_engine(make_model(), all_ranks())
