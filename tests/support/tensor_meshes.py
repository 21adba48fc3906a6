"""Arrangements in which pairs of ranks share every sample and divide a `TinyTransformer`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.arrangements import Arrangement, flattened, mesh_of
from tests.support.models import Batch

Divide = Callable[[nn.Module, DeviceMesh], None]


def tensor_mesh() -> DeviceMesh:
    """Data parallel times tensor parallel 2 over all ranks."""
    return mesh_of((dist.get_world_size() // 2, 2), ("dp_shard", "tp"))


def hybrid_mesh(outer: int) -> DeviceMesh:
    """The same with the data-parallel ranks on two axes."""
    return mesh_of((outer, dist.get_world_size() // (2 * outer), 2), ("dp_outer", "dp_shard", "tp"))


def tensor_arguments() -> dict[str, Any]:
    return {"device_mesh": tensor_mesh(), "dp_shard_dim": "dp_shard", "tp_dim": "tp"}


def hybrid_arguments(outer: int) -> dict[str, Any]:
    found = hybrid_mesh(outer)
    group = flattened(found, ("dp_outer", "dp_shard"), "dp_all").get_group()
    axes = {"dp_outer_dim": "dp_outer", "dp_shard_dim": "dp_shard", "tp_dim": "tp"}
    return {"device_mesh": found, "hybrid_fsdp_group": group, **axes}


def place(divide: Divide, model: nn.Module) -> None:
    divide(model, tensor_mesh()["tp"])


def hybrid_place(outer: int, divide: Divide, model: nn.Module) -> None:
    divide(model, hybrid_mesh(outer)["tp"])


def part(whole: Batch) -> Batch:
    """Ranks of one tensor-parallel group compute the same samples."""
    return whole.part(dist.get_rank() // 2, dist.get_world_size() // 2)


def tensor_parallel(divide: Divide) -> Arrangement:
    return Arrangement(f"tensor parallel, {divide.__name__}", tensor_arguments, partial(place, divide), part)


def hybrid_tensor_parallel(outer: int, divide: Divide) -> Arrangement:
    name = f"hybrid and tensor parallel, {divide.__name__}"
    return Arrangement(name, partial(hybrid_arguments, outer), partial(hybrid_place, outer, divide), part)


# ---- plans of torch's `parallelize_module` ---------------------------------------------------------------------------

_COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.up")
_ROWS = ("attention.out", "mlp.down")


def divide_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide embedding, attention, MLP and head; norms and positions stay plain tensors, the same on all ranks."""
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for block in _blocks(model):
        plan |= {f"{block}.{name}": ColwiseParallel() for name in _COLUMNS}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in _ROWS}
    parallelize_module(model, mesh, plan)


def divide_tensors_and_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same, with activations between the layers divided along the tokens; all parameters are DTensors."""
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    whole_input = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in _blocks(model):
        plan |= {f"{block}.{norm}": SequenceParallel() for norm in ("attention_norm", "mlp_norm")}
        plan |= {f"{block}.attention": whole_input, f"{block}.mlp": whole_input}
        plan |= {f"{block}.{name}": ColwiseParallel() for name in _COLUMNS}
        plan |= {f"{block}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in _ROWS}
    parallelize_module(model, mesh, plan)


def _blocks(model: nn.Module) -> list[str]:
    return [f"blocks.{name}" for name, _ in model.get_submodule("blocks").named_children()]
